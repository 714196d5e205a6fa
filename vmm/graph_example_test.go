package vmm_test

import (
	"fmt"
	"log"

	"github.com/cuvmm/cuvmm/csrc/kernels"
	"github.com/cuvmm/cuvmm/cuda"
	"github.com/cuvmm/cuvmm/cuda/auto"
	"github.com/cuvmm/cuvmm/vmm"
)

// A kernel on an array, launched through a graph.
func Example_kernelsAndGraphs() {
	sys, err := auto.Open(auto.Options{})
	if err != nil {
		log.Fatal(err)
	}
	defer sys.Close()
	dev := sys.Devices()[0]
	stream, err := dev.NewStream(cuda.StreamOptions{})
	if err != nil {
		log.Fatal(err)
	}
	defer stream.Close()
	array, err := vmm.NewArray[uint32](dev, vmm.BufferOptions{})
	if err != nil {
		log.Fatal(err)
	}
	defer array.Close()
	if err := array.Resize(stream, 6); err != nil {
		log.Fatal(err)
	}

	module, err := dev.LoadModule(kernels.Basic) // PTX text, your own or the library's
	if err != nil {
		log.Fatal(err)
	}
	defer module.Close()
	fill, err := module.Kernel(kernels.Fill)
	if err != nil {
		log.Fatal(err)
	}
	graph, err := stream.WithCapture(cuda.CaptureOptions{}, func() error {
		return fill.Launch(stream, cuda.Threads(6), array.Ptr(), uint64(6), uint32(10), uint32(2))
	})
	if err != nil {
		log.Fatal(err)
	}
	defer graph.Close()
	if err := graph.Launch(stream); err != nil {
		log.Fatal(err)
	}

	numbers := make([]uint32, 6)
	if err := array.All().CopyTo(stream, numbers); err != nil {
		log.Fatal(err)
	}
	fmt.Println(numbers)
	// Output:
	// [10 12 14 16 18 20]
}
