package main

import (
	"fmt"

	"github.com/cuvmm/cuvmm/csrc/kernels"
	"github.com/cuvmm/cuvmm/cuda"
	"github.com/cuvmm/cuvmm/managed"
	"github.com/cuvmm/cuvmm/samples/internal/app"
)

// add sums the layers in the scratch on the GPU, and has the CPU check the sums.
func add(s *cuda.Stream, weights []*managed.Array[float32], scratch *managed.Buffer) (want float32, err error) {
	module, err := s.Device().LoadModule(kernels.Basic)
	if err != nil {
		return 0, err
	}
	defer app.Close(module, &err)
	add, err := module.Kernel(kernels.VectorAdd)
	if err != nil {
		return 0, err
	}
	if err := s.Memset(scratch.Ptr(), 0, scratch.Len()); err != nil {
		return 0, err
	}
	for i, w := range weights {
		if err := add.Launch(s, cuda.Threads(w.Len()), w.Ptr(), scratch.Ptr(), scratch.Ptr(), uint64(w.Len())); err != nil {
			return 0, err
		}
		want += float32(i + 1)
	}
	result, err := managed.ArrayOf[float32](scratch)
	if err != nil {
		return 0, err
	}
	return want, result.Host(s, func(data []float32) error {
		for i, v := range data {
			if v != want {
				return fmt.Errorf("element %d is %v, not %v", i, v, want)
			}
		}
		return nil
	})
}
