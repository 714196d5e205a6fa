// Command 01-hello puts numbers on the GPU and reads them back.
//
//	go run ./samples/01-hello
package main

import (
	"fmt"
	"log"

	"github.com/cuvmm/cuvmm/cuda/auto"
	"github.com/cuvmm/cuvmm/vmm"
)

func main() {
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
