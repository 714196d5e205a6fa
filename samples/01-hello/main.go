// Command 01-hello puts numbers on the GPU and reads them back.
//
//	go run ./samples/01-hello
//
// CUVMM_DRIVER chooses the driver, as it does for every program: real or sim.
package main

import (
	"fmt"
	"log"
	"os"

	"github.com/cuvmm/cuvmm/cuda/auto"
	"github.com/cuvmm/cuvmm/vmm"
)

func main() {
	if len(os.Args) > 1 {
		log.Fatalf("argument %q: none is taken; CUVMM_DRIVER=real or CUVMM_DRIVER=sim chooses the driver", os.Args[1])
	}
	sys, err := auto.Open(auto.Options{}) // the GPU, or the software driver without one
	check(err)
	defer func() { check(sys.Close()) }()
	dev, err := sys.Device(0)
	check(err)
	array, err := vmm.NewArray[float32](dev, vmm.BufferOptions{})
	check(err)
	defer func() { check(array.Close()) }()

	_, err = array.Append(nil, []float32{1, 2, 3, 4})
	check(err)
	back := make([]float32, array.Len())
	check(array.All().CopyTo(nil, back))
	_, err = fmt.Printf("%v holds %v at %v, on the %v\nnext: samples/02-growable, an array that grows in place\n", dev, back, array.Ptr(), sys.Driver())
	check(err)
}

func check(err error) {
	if err != nil {
		log.Fatal(err)
	}
}
