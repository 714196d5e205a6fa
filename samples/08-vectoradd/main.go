// Command 08-vectoradd adds vectors that lie on all GPUs at once: one range of
// addresses, behind which each device in turn has a chunk of memory. Each device
// adds the part that it owns, and the first one then reads all of it.
//
//	go run ./samples/08-vectoradd [-driver auto|real|sim]
//
// One GPU is enough. The software driver shows two.
package main

import (
	"github.com/cuvmm/cuvmm/cuda/sim"
	"github.com/cuvmm/cuvmm/samples/internal/app"
	"github.com/cuvmm/cuvmm/vmm"
)

var sample = app.Sample{
	Name:    "08-vectoradd",
	Shows:   "one range of addresses over the memory of all GPUs, and kernels on each part",
	Next:    "09-send: memory that another process receives",
	Machine: sim.Options{Devices: make([]sim.DeviceOptions, 2)},
	Run:     run,
}

func main() { app.Main(sample) }

// rounds is how many chunks of each vector every device has.
const rounds = 2

func run(e *app.Env) (err error) {
	if err := e.Open(); err != nil {
		return err
	}
	v := vectors{devices: e.System.Devices()}
	defer app.Close(&v, &err)
	if v.together, v.chunk, err = survey(v.devices); err != nil {
		return err
	}
	v.chunks = rounds * len(v.devices)
	if v.space, err = vmm.Reserve(v.devices[0], 3*v.chunks*v.chunk, vmm.ReserveOptions{Align: v.chunk}); err != nil {
		return err
	}
	v.owns(v.space)
	e.Line("range", "%v, %d MiB: the vectors a, b and c, %d chunks each", v.space.Ptr(), v.space.Size()>>20, v.chunks)
	if err := v.back(); err != nil {
		return err
	}
	if v.together {
		e.Line("access", "every device to everything, granted in one call")
	} else {
		e.Line("access", "each device to what it owns, since they cannot reach one another")
	}
	for i, d := range v.devices {
		owned, err := v.add(i)
		if err != nil {
			return err
		}
		e.Line("owner", "%v: chunks %d of each vector", d, owned)
	}
	for _, s := range v.streams {
		if err := s.Synchronize(); err != nil {
			return err
		}
	}
	for i := range v.chunks {
		reader := v.streams[0]
		if !v.together {
			reader = v.streams[i%len(v.devices)]
		}
		if err := verify(reader, v.at(2, i), i*v.words(), v.words()); err != nil {
			return err
		}
	}
	e.Line("verified", "c = a + b in %d elements", v.chunks*v.words())
	return nil
}

// back maps memory behind the vectors and grants access to it. A vector has the same
// number of chunks on each device, so chunk i of a, of b and of c are on one device.
func (v *vectors) back() error {
	var grants []vmm.Access
	for _, d := range v.devices {
		grants = append(grants, vmm.Access{Location: d.Location(), Mode: vmm.ReadWrite})
	}
	for i := range 3 * v.chunks {
		owner := i % len(v.devices)
		m, err := place(v.space, i*v.chunk, v.devices[owner], v.chunk)
		if err != nil {
			return err
		}
		v.owns(m)
		if !v.together {
			if err := m.SetAccess(grants[owner]); err != nil {
				return err
			}
		}
	}
	if !v.together {
		return nil
	}
	// One call for the whole range: one for each chunk costs far more.
	return v.space.SetAccess(0, v.space.Size(), grants...)
}
