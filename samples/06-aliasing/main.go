// Command 06-aliasing gives one memory two addresses, writes through one and
// reads through the other. It uses the three objects beneath every array: memory
// (Allocation), addresses (Reservation), and the tie between them (Mapping). Two
// ways make the read see what was written: the order of streams and events
// between kernels, and a fence within one kernel.
//
//	go run ./samples/06-aliasing [-driver auto|real|sim]
package main

import (
	"fmt"

	"github.com/cuvmm/cuvmm/csrc/kernels"
	"github.com/cuvmm/cuvmm/cuda"
	"github.com/cuvmm/cuvmm/samples/internal/app"
	"github.com/cuvmm/cuvmm/vmm"
)

var sample = app.Sample{
	Name:  "06-aliasing",
	Shows: "one memory at two addresses, and what orders a write through one before a read through the other",
	Next:  "07-compressible: memory with properties",
	Run:   run,
}

func main() { app.Main(sample) }

func run(e *app.Env) (err error) {
	if err := e.Open(); err != nil {
		return err
	}
	size, err := vmm.GranularityOf(e.Device, vmm.Properties{})
	if err != nil {
		return err
	}
	memory, err := vmm.Create(e.Device, size, vmm.Properties{})
	if err != nil {
		return err
	}
	defer app.Close(memory, &err)
	r, err := vmm.Reserve(e.Device, 2*size, vmm.ReserveOptions{})
	if err != nil {
		return err
	}
	defer app.Close(r, &err)
	first, err := r.Map(0, memory)
	if err != nil {
		return err
	}
	defer app.Close(first, &err)
	second, err := r.Map(size, memory)
	if err != nil {
		return err
	}
	defer app.Close(second, &err)
	if err := r.SetAccess(0, 2*size, vmm.Access{Location: e.Device.Location(), Mode: vmm.ReadWrite}); err != nil {
		return err
	}
	e.Line("memory", "%d MiB, at %v and at %v", size>>20, first.Ptr(), second.Ptr())

	writer, err := e.Device.NewStream(cuda.StreamOptions{})
	if err != nil {
		return err
	}
	defer app.Close(writer, &err)
	reader, err := e.Device.NewStream(cuda.StreamOptions{})
	if err != nil {
		return err
	}
	defer app.Close(reader, &err)
	module, err := e.Device.LoadModule(kernels.Basic)
	if err != nil {
		return err
	}
	defer app.Close(module, &err)
	if err := byEvent(module, writer, reader, first, second); err != nil {
		return fmt.Errorf("ordered by an event: %w", err)
	}
	e.Line("verified", "a write on one stream, an event, a read through the other address on another stream")
	if err := byFence(module, writer, first, second); err != nil {
		return fmt.Errorf("ordered by a fence: %w", err)
	}
	e.Line("verified", "a write, fence.proxy.alias, and a read through the other address, in one kernel")
	return nil
}
