package vmm_test

import (
	"fmt"
	"log"

	"github.com/cuvmm/cuvmm/cuda"
	"github.com/cuvmm/cuvmm/cuda/sim"
	"github.com/cuvmm/cuvmm/vmm"
)

// A test of your own begins with
//
//	machine, sys := sim.Open(t)
//
// which fails the test for whatever it leaves open. Here the machine is made by
// hand, as an example has no testing.T.
func ExampleBuffer_Append() {
	machine, err := sim.New(sim.Options{})
	if err != nil {
		log.Fatal(err)
	}
	sys, err := machine.OpenOwned(cuda.Options{TraceLeaks: true})
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
	buffer, err := vmm.NewBuffer(dev, vmm.BufferOptions{})
	if err != nil {
		log.Fatal(err)
	}
	defer buffer.Close()

	look := func() {
		bytes, err := machine.Bytes(buffer.Ptr(), 5)
		if err != nil {
			log.Fatal(err)
		}
		fmt.Printf("%q\n", bytes)
	}
	machine.Hold(stream.Handle()) // the GPU is busy
	if _, err := buffer.Append(stream, []byte("hello")); err != nil {
		log.Fatal(err)
	}
	look()
	machine.Release(stream.Handle())
	if err := stream.Synchronize(); err != nil {
		log.Fatal(err)
	}
	look()
	// Output:
	// "\x00\x00\x00\x00\x00"
	// "hello"
}

// On the software driver any call can be made to fail.
func ExampleBuffer_Grow() {
	machine, err := sim.New(sim.Options{})
	if err != nil {
		log.Fatal(err)
	}
	sys, err := machine.OpenOwned(cuda.Options{})
	if err != nil {
		log.Fatal(err)
	}
	defer sys.Close()
	buffer, err := vmm.NewBuffer(sys.Devices()[0], vmm.BufferOptions{})
	if err != nil {
		log.Fatal(err)
	}
	defer buffer.Close()

	const outOfMemory = 2 // CUDA_ERROR_OUT_OF_MEMORY
	machine.Inject(sim.Fault{Call: "cuMemCreate", Result: outOfMemory, Times: 1})
	fmt.Println(buffer.Grow(4<<20) != nil) // true: the growth needs memory, and fails once
	fmt.Println(buffer.Grow(4<<20) != nil, buffer.Stats().Committed)
	// Output:
	// true
	// false 4194304
}
