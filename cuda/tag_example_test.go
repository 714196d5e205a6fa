package cuda_test

import (
	"fmt"

	"github.com/cuvmm/cuvmm/cuda"
)

// The groups of a program's memory, which vmm.BufferOptions.Tag and pool.Options.Tag name.
const (
	weights cuda.Tag = "weights"
	caches  cuda.Tag = "caches"
)

// A program declares the groups of its memory once.
func ExampleTag() {
	for _, t := range []cuda.Tag{weights, caches} {
		fmt.Println(t)
	}
	// Output:
	// weights
	// caches
}
