// Command 03-kernel runs a kernel of its own, PTX text that is part of the
// program, on two arrays: y = a*x + y.
//
//	go run ./samples/03-kernel [-driver auto|real|sim] [-n ELEMENTS]
//
// The software driver runs no PTX. It runs the Go function that is registered
// under the kernel's name, so that the rest of a program can be tested without a GPU.
package main

import (
	_ "embed"
	"fmt"

	"github.com/cuvmm/cuvmm/cuda"
	"github.com/cuvmm/cuvmm/cuda/sim"
	"github.com/cuvmm/cuvmm/samples/internal/app"
	"github.com/cuvmm/cuvmm/vmm"
)

//go:embed saxpy.ptx
var ptx []byte

// entry is the kernel's name in the PTX.
const entry = "sample_saxpy"

func init() {
	sim.RegisterKernel(entry, func(k *sim.Kernel) {
		a, n := sim.Param[float32](k, 0), int(sim.Param[uint32](k, 3))
		x, y := sim.Load[float32](k, sim.Param[uint64](k, 1), n), sim.Load[float32](k, sim.Param[uint64](k, 2), n)
		for i := range y {
			y[i] += a * x[i]
		}
		sim.Store(k, sim.Param[uint64](k, 2), y)
	})
}

var sample = app.Sample{
	Name:  "03-kernel",
	Shows: "a kernel of your own, launched on two arrays",
	Next:  "04-pool: many blocks of memory, taken and freed in the order of streams",
	Run:   run,
}

func main() { app.Main(sample) }

func run(e *app.Env) (err error) {
	n := e.Flags.Int("n", 1_000_000, "how many `elements` the arrays have")
	if err := e.Open(); err != nil {
		return err
	}
	if *n < 1 || *n > 1<<24 {
		return app.Usagef("-n %d: use 1 to %d", *n, 1<<24)
	}
	module, err := e.Device.LoadModule(ptx)
	if err != nil {
		return err
	}
	defer app.Close(module, &err)
	saxpy, err := module.Kernel(entry)
	if err != nil {
		return err
	}
	s, err := e.Device.NewStream(cuda.StreamOptions{})
	if err != nil {
		return err
	}
	defer app.Close(s, &err)

	ones, counts := make([]float32, *n), make([]float32, *n)
	for i := range *n {
		ones[i], counts[i] = 1, float32(i)
	}
	x, err := vmm.NewArray[float32](e.Device, vmm.BufferOptions{})
	if err != nil {
		return err
	}
	defer app.Close(x, &err)
	y, err := vmm.NewArray[float32](e.Device, vmm.BufferOptions{})
	if err != nil {
		return err
	}
	defer app.Close(y, &err)
	if _, err := x.Append(s, ones); err != nil {
		return err
	}
	if _, err := y.Append(s, counts); err != nil {
		return err
	}

	// Arguments follow the launch's shape. The library compares them with what
	// the kernel declares.
	shape := cuda.Threads(*n)
	e.Line("launch", "%d blocks of %d threads", shape.Grid[0], shape.Block[0])
	if err := saxpy.Launch(s, shape, float32(2), x.Ptr(), y.Ptr(), uint32(*n)); err != nil {
		return err
	}
	// The copy is work on the stream behind the kernel.
	if err := y.All().CopyTo(s, counts); err != nil {
		return err
	}
	for i, v := range counts {
		if v != float32(i)+2 {
			return fmt.Errorf("element %d is %v, not %v", i, v, float32(i)+2)
		}
	}
	e.Line("verified", "y = 2x + y in %d elements", *n)
	return nil
}
