package cuda

import (
	"log/slog"
	"time"

	"github.com/cuvmm/cuvmm/csrc"
	"github.com/cuvmm/cuvmm/internal/core"
	"github.com/cuvmm/cuvmm/internal/driver"
	"github.com/cuvmm/cuvmm/internal/environ"
	"github.com/cuvmm/cuvmm/internal/errs"
)

// LibraryEnv names the environment variable that says which driver library to
// open if Options.Library does not. A program that runs with more rights than its
// caller (set-user-ID, set-group-ID, file capabilities) ignores it.
const LibraryEnv = "CUVMM_LIBCUDA"

type driverHolder = core.DriverHolder

// Options say how to open a System. The zero value is ready for use.
type Options struct {
	// Library is the file of the driver's library. If it is empty, the environment
	// variable CUVMM_LIBCUDA names the file, and without that the usual places are
	// searched. The software driver has none.
	Library string
	// RealMulticast lets multicast objects be created on the real driver. It is
	// opt-in because an object that goes wrong can disturb the fabric, and with it
	// all work on the machine. The software driver needs no permission.
	RealMulticast bool
	// Logger receives what no call returns: lost objects, a lost device, panics of
	// callbacks. If it is nil, the panics go to slog.Default, and the rest is discarded.
	Logger *slog.Logger
	// TraceLeaks keeps the creation stack of every object, so that reports of leaked
	// and lost ones name where they were made. It costs about a microsecond an object.
	TraceLeaks bool
	// NamedStreamsOnly promises that all GPU work which touches memory of this
	// System is on streams that the System knows: made by it, or borrowed. Close
	// then waits for those alone, and skips the wait for whole contexts, which
	// stalls other threads' launches.
	NamedStreamsOnly bool
	// AllocationWait is how long an allocation that finds no memory waits at most
	// for memory that comes back when the GPU has passed it: memory that was closed
	// with CloseAfter or clipped with ClipAfter, and memory that pools have free. 0 is a
	// second. A negative value means never: such an allocation waits only for teardowns
	// in progress, a few milliseconds.
	AllocationWait time.Duration

	driverHolder
}

// Open opens the real driver. There is one System in a process: a second Open
// returns the same one, and it ends when Close was called as often; the options of
// the first Open count. If no usable driver is found the error is ErrNoDriver and
// says what was tried. It is safe for concurrent use.
func Open(o Options) (*System, error) {
	if d, closed := core.DriverOf(&o.driverHolder); d != nil {
		return newSystem(d, o.config(closed))
	}
	fromEnv := ""
	if o.Library == "" {
		fromEnv = environ.Get(LibraryEnv)
		o.Library = fromEnv
	}
	return process.open(func() (*System, error) {
		d, err := csrc.Open(csrc.Options{Path: o.Library, Multicast: o.RealMulticast})
		if err != nil {
			f := errs.Failure{Op: "cuda.Open", Kind: errs.NoDriver, Err: err}
			if fromEnv != "" {
				f.Hint = "the path is from the environment variable " + LibraryEnv
			}
			return nil, errs.New(f)
		}
		return newSystem(driver.Of(d), o.config(nil))
	})
}

// config is the options in the core's form; closed is called after the last user of
// the System is gone.
func (o Options) config(closed func() error) core.Config {
	c := core.Config{
		Log:              o.Logger,
		TraceLeaks:       o.TraceLeaks,
		NamedStreamsOnly: o.NamedStreamsOnly,
		AllocationWait:   o.AllocationWait,
		Close:            closed,
	}
	switch {
	case c.AllocationWait == 0:
		c.AllocationWait = time.Second
	case c.AllocationWait < 0:
		c.AllocationWait = 0
	}
	if c.Log == nil {
		c.Log = slog.New(slog.DiscardHandler)
	}
	return c
}
