// Package auto opens the driver that this machine has: the real one, or, where
// no NVIDIA driver is installed at all, the software driver.
package auto

import (
	"errors"
	"fmt"
	"os"
	"reflect"

	"github.com/cuvmm/cuvmm/csrc"
	"github.com/cuvmm/cuvmm/cuda"
	"github.com/cuvmm/cuvmm/cuda/sim"
	"github.com/cuvmm/cuvmm/internal/core"
	"github.com/cuvmm/cuvmm/internal/environ"
	"github.com/cuvmm/cuvmm/internal/errs"
)

// DriverEnv names the environment variable that chooses the driver if the program does
// not: "auto", "real" or "sim". A program that runs with more rights
// than its caller ignores it.
const DriverEnv = "CUVMM_DRIVER"

// Choice says which driver to open.
type Choice string

const (
	// Auto opens the real driver, and the software driver only if neither a
	// driver library nor an NVIDIA device node exists, or if the library found is
	// the software driver's own libcuda (cmd/libcuda), which is not loaded.
	// Anything in between (a driver that does not load, no permission, no device)
	// is an error: a program must not run on the wrong driver unnoticed.
	Auto Choice = "auto"
	// Real opens the real driver or fails.
	Real Choice = "real"
	// Software opens the software driver.
	Software Choice = "sim"
)

// Options say how to open. The zero value takes the driver from the environment
// variable CUVMM_DRIVER, and without that is Auto.
type Options struct {
	// Driver is the driver to open; if it is empty CUVMM_DRIVER says, or Auto.
	Driver Choice
	// CUDA are options for the System of either driver.
	CUDA cuda.Options
	// Machine describes the software driver's machine. If it is zero, the
	// environment does: sim.MachineEnv.
	Machine sim.Options
}

// Open opens a System. System.Driver reports which driver was chosen, and so does a
// line in Options.CUDA.Logger. The caller closes the System.
func Open(o Options) (*cuda.System, error) {
	choice, from := o.Driver, "the Driver option"
	if choice == "" {
		choice, from = Choice(environ.Get(DriverEnv)), "the environment variable "+DriverEnv
	}
	var s *cuda.System
	var err error
	switch choice {
	case Real:
		s, err = cuda.Open(o.CUDA)
	case Software:
		s, err = openSoftware(o)
	case Auto, "":
		if s, err = cuda.Open(o.CUDA); err != nil {
			if err = refusal(err); err == nil {
				s, err = openSoftware(o)
			}
		}
	default:
		return nil, errs.Invalid("auto.Open", fmt.Sprintf("driver %q from %s", choice, from),
			`use "auto", "real" or "sim"`)
	}
	if err != nil {
		return nil, err
	}
	core.SystemOf(s).Config.Log.Info("cuvmm: opened", "driver", s.Driver().String(), "devices", len(s.Devices()))
	return s, nil
}

func openSoftware(o Options) (*cuda.System, error) {
	m, err := newMachine(o.Machine)
	if err != nil {
		return nil, err
	}
	s, err := m.OpenOwned(o.CUDA)
	if err != nil {
		return nil, errors.Join(err, m.Close())
	}
	return s, nil
}

func newMachine(o sim.Options) (*sim.Machine, error) {
	if reflect.DeepEqual(o, sim.Options{}) {
		return sim.NewFromEnvironment()
	}
	return sim.New(o)
}

// nodes exist where an NVIDIA kernel driver does.
var nodes = []string{"/dev/nvidiactl", "/dev/nvidia0", "/dev/dxg"}

// refusal returns why the software driver is not taken in place of the real one, which
// failed to open with err. It is nil if there is no trace of a real one: neither a
// library nor a device node, or the software driver's library in place of the
// vendor's.
func refusal(err error) error {
	var open *csrc.OpenError
	if !errors.As(err, &open) {
		return err
	}
	switch open.Reason {
	case csrc.SoftwareDriver:
		return nil
	case csrc.NotFound, csrc.NoCgo:
	default:
		return err
	}
	for _, n := range nodes {
		if _, stat := os.Stat(n); !errors.Is(stat, os.ErrNotExist) {
			return errs.New(errs.Failure{Op: "auto.Open", Kind: errs.NoDriver, Err: err,
				Asked: n + " is there, but no driver library to use the GPU with, so the software driver was not taken in its place",
				Hint: "give the container the driver's libcuda.so.1 (NVIDIA_DRIVER_CAPABILITIES=compute with the NVIDIA container runtime), or ask for the software driver: " +
					DriverEnv + "=" + string(Software)})
		}
	}
	return nil
}
