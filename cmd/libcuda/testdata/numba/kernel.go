//go:build linux && cgo && (amd64 || arm64) && !cuvmm_nocgo

package main

import "github.com/cuvmm/cuvmm/cuda/sim"

// The kernel that Numba's tests of the driver load: each thread writes its number.
func init() {
	sim.RegisterKernel("_Z10helloworldPi", func(k *sim.Kernel) {
		numbers := make([]int32, k.Block[0])
		for i := range numbers {
			numbers[i] = int32(i)
		}
		sim.Store(k, sim.Param[uint64](k, 0), numbers)
	})
}
