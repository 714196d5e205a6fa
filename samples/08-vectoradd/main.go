// Command 08-vectoradd adds vectors that lie on all GPUs at once: one range of
// addresses, behind which each device in turn has a chunk of memory. Each device
// adds the part that it owns, and the first one then reads all of it.
//
//	go run ./samples/08-vectoradd [-driver auto|real|sim]
//
// One GPU is enough. The software driver shows two.
package main

import (
	"errors"

	"github.com/cuvmm/cuvmm/csrc/kernels"
	"github.com/cuvmm/cuvmm/cuda"
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
	devices := e.System.Devices()
	together, chunk, err := survey(devices)
	if err != nil {
		return err
	}
	perVector := rounds * len(devices)
	r, err := vmm.Reserve(devices[0], 3*perVector*chunk, vmm.ReserveOptions{Align: chunk})
	if err != nil {
		return err
	}
	defer app.Close(r, &err)
	e.Line("range", "%v, %d MiB: the vectors a, b and c, %d chunks each", r.Ptr(), r.Size()>>20, perVector)

	// A vector has the same number of chunks on each device, so chunk i of a, of
	// b and of c are on one device.
	var grants []vmm.Access
	for _, d := range devices {
		grants = append(grants, vmm.Access{Location: d.Location(), Mode: vmm.ReadWrite})
	}
	mappings := make([]*vmm.Mapping, 3*perVector)
	for i := range mappings {
		if mappings[i], err = place(r, i*chunk, devices[i%len(devices)], chunk); err != nil {
			return err
		}
		defer app.Close(mappings[i], &err)
		if !together {
			if err := mappings[i].SetAccess(grants[i%len(devices)]); err != nil {
				return err
			}
		}
	}
	if together {
		// One call for the whole range: one for each chunk costs far more.
		if err := r.SetAccess(0, r.Size(), grants...); err != nil {
			return err
		}
		e.Line("access", "every device to everything, granted in one call")
	} else {
		e.Line("access", "each device to what it owns, since they cannot reach one another")
	}

	at := func(vector, i int) cuda.Ptr { return r.Ptr() + cuda.Ptr((vector*perVector+i)*chunk) }
	words := chunk / 4
	streams, modules := make([]*cuda.Stream, len(devices)), make([]*cuda.Module, len(devices))
	for i, d := range devices {
		if streams[i], err = d.NewStream(cuda.StreamOptions{}); err != nil {
			return err
		}
		defer app.Close(streams[i], &err)
		if modules[i], err = d.LoadModule(kernels.Basic); err != nil {
			return err
		}
		defer app.Close(modules[i], &err)
		add, err := modules[i].Kernel(kernels.VectorAdd)
		if err != nil {
			return err
		}
		var owned []int
		for c := i; c < perVector; c += len(devices) {
			owned = append(owned, c)
			a, b := values(c*words, words)
			if err := errors.Join(upload(streams[i], at(0, c), a), upload(streams[i], at(1, c), b)); err != nil {
				return err
			}
			if err := add.Launch(streams[i], cuda.Threads(words), at(0, c), at(1, c), at(2, c), uint64(words)); err != nil {
				return err
			}
		}
		e.Line("owner", "%v: chunks %d of each vector", d, owned)
	}
	for _, s := range streams {
		if err := s.Synchronize(); err != nil {
			return err
		}
	}
	reader := streams[0]
	for i := range perVector {
		if !together {
			reader = streams[i%len(devices)]
		}
		if err := verify(reader, at(2, i), i*words, words); err != nil {
			return err
		}
	}
	e.Line("verified", "c = a + b in %d elements", perVector*words)
	return nil
}
