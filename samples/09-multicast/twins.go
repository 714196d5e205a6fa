package main

import (
	_ "embed"
	"math"

	"github.com/cuvmm/cuvmm/cuda/sim"
)

// The kernels of the way by copies, and what runs in their place on the software
// driver.
const (
	sumOfSquares = "sample_sum_of_squares"
	rootOfSum    = "sample_root_of_sum"
)

//go:embed norm.ptx
var normText []byte

func init() {
	sim.RegisterKernel(sumOfSquares, func(k *sim.Kernel) {
		x, n, out := sim.Param[uint64](k, 0), sim.Param[uint64](k, 1), sim.Param[uint64](k, 2)
		sum := sim.Load[float64](k, out, 1)[0]
		for _, v := range sim.Load[float32](k, x, int(n)) {
			sum += float64(v) * float64(v)
		}
		sim.Store(k, out, []float64{sum})
	})
	sim.RegisterKernel(rootOfSum, func(k *sim.Kernel) {
		sum := 0.0
		for _, v := range sim.Load[float64](k, sim.Param[uint64](k, 0), int(sim.Param[uint64](k, 1))) {
			sum += v
		}
		sim.Store(k, sim.Param[uint64](k, 2), []float64{math.Sqrt(sum)})
	})
}
