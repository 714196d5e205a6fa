// Command 07-compressible requests memory that the GPU may compress, prints what
// the driver granted, and uses it. The GPU reads memory that compresses well with
// less traffic; it takes as much room as any other.
//
//	go run ./samples/07-compressible [-driver auto|real|sim]
package main

import (
	"fmt"

	"github.com/cuvmm/cuvmm/csrc/kernels"
	"github.com/cuvmm/cuvmm/cuda"
	"github.com/cuvmm/cuvmm/samples/internal/app"
	"github.com/cuvmm/cuvmm/vmm"
)

var sample = app.Sample{
	Name:  "07-compressible",
	Shows: "memory that the GPU may compress: requested, granted, used",
	Next:  "08-vectoradd: one range of addresses over several GPUs",
	Run:   run,
}

func main() { app.Main(sample) }

func run(e *app.Env) (err error) {
	if err := e.Open(); err != nil {
		return err
	}
	caps, err := e.Device.Capabilities()
	if err != nil {
		return err
	}
	properties := vmm.Properties{Compressible: true}
	size, err := vmm.GranularityOf(e.Device, properties)
	if err != nil {
		return err
	}
	size *= 16
	memory, err := vmm.Create(e.Device, size, properties)
	if err != nil {
		return err
	}
	defer app.Close(memory, &err)
	granted, err := memory.Granted()
	if err != nil {
		return err
	}
	e.Line("supported", "%v, says the device", caps.Compression)
	e.Line("requested", "%d MiB, compressible: %v", size>>20, memory.Requested().Compressible)
	e.Line("granted", "compressible: %v", granted.Compressible)
	if !granted.Compressible {
		e.Line("", "it is plain memory, which works too")
	}

	r, err := vmm.Reserve(e.Device, size, vmm.ReserveOptions{})
	if err != nil {
		return err
	}
	defer app.Close(r, &err)
	m, err := r.Map(0, memory)
	if err != nil {
		return err
	}
	defer app.Close(m, &err)
	if err := m.SetAccess(vmm.Access{Location: e.Device.Location(), Mode: vmm.ReadWrite}); err != nil {
		return err
	}
	const value = 0xC0DEC
	words := uint64(size / 4)
	sum, err := fillAndSum(e.Device, m.Ptr(), words, value)
	if err != nil {
		return err
	}
	if sum != words*value {
		return fmt.Errorf("%d words of %d add up to %d, not to %d", words, value, sum, words*value)
	}
	e.Line("verified", "%d words of %d add up to %d", words, value, sum)
	return nil
}

// fillAndSum fills the memory with one value, which compresses best, and adds
// up all words.
func fillAndSum(dev *cuda.Device, at cuda.Ptr, words uint64, value uint32) (_ uint64, err error) {
	module, err := dev.LoadModule(kernels.Basic)
	if err != nil {
		return 0, err
	}
	defer app.Close(module, &err)
	fill, err := module.Kernel(kernels.Fill)
	if err != nil {
		return 0, err
	}
	add, err := module.Kernel(kernels.Sum)
	if err != nil {
		return 0, err
	}
	s, err := dev.NewStream(cuda.StreamOptions{})
	if err != nil {
		return 0, err
	}
	defer app.Close(s, &err)
	total, err := vmm.NewArray[uint64](dev, vmm.BufferOptions{})
	if err != nil {
		return 0, err
	}
	defer app.Close(total, &err)
	if err := total.Resize(s, 1); err != nil { // one zero
		return 0, err
	}
	if err := fill.Launch(s, cuda.Threads(1<<16), at, words, value, uint32(0)); err != nil {
		return 0, err
	}
	if err := add.Launch(s, cuda.Threads(1<<16), at, words, total.Ptr()); err != nil {
		return 0, err
	}
	var sum [1]uint64
	err = total.All().CopyTo(s, sum[:])
	return sum[0], err
}
