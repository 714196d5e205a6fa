// Package kernels makes the library's own kernels run on the software driver:
// importing it registers, for each PTX entry of csrc/kernels, a Go function
// that does the same.
package kernels

import (
	"github.com/cuvmm/cuvmm/csrc/kernels"
	"github.com/cuvmm/cuvmm/cuda/sim"
)

func init() {
	sim.RegisterKernel(kernels.VectorAdd, vectorAdd)
	sim.RegisterKernel(kernels.Fill, fill)
	sim.RegisterKernel(kernels.Sum, sum)
	sim.RegisterKernel(kernels.AliasAdd, aliasAdd)
}

// element is the size of the elements of all of these kernels, in bytes.
const element = 4

// pieces bounds how many elements a kernel holds at a time.
const pieces = 1 << 16

// each calls do for n elements in pieces: where one starts in bytes, and how
// many elements it has.
func each(n uint64, do func(off uint64, n int)) {
	for i := uint64(0); i < n; i += pieces {
		do(i*element, int(min(pieces, n-i)))
	}
}

func vectorAdd(k *sim.Kernel) {
	a, b, c := sim.Param[uint64](k, 0), sim.Param[uint64](k, 1), sim.Param[uint64](k, 2)
	each(sim.Param[uint64](k, 3), func(off uint64, n int) {
		x, y := sim.Load[float32](k, a+off, n), sim.Load[float32](k, b+off, n)
		for i := range x {
			x[i] += y[i]
		}
		sim.Store(k, c+off, x)
	})
}

func fill(k *sim.Kernel) {
	p, first, step := sim.Param[uint64](k, 0), sim.Param[uint32](k, 2), sim.Param[uint32](k, 3)
	each(sim.Param[uint64](k, 1), func(off uint64, n int) {
		v := make([]uint32, n)
		for i := range v {
			v[i] = first + (uint32(off/element)+uint32(i))*step
		}
		sim.Store(k, p+off, v)
	})
}

func sum(k *sim.Kernel) {
	p, total := sim.Param[uint64](k, 0), uint64(0)
	n := sim.Param[uint64](k, 1)
	each(n, func(off uint64, n int) {
		for _, v := range sim.Load[uint32](k, p+off, n) {
			total += uint64(v)
		}
	})
	if n > 0 {
		k.AddWord(sim.Param[uint64](k, 2), total)
	}
}

func aliasAdd(k *sim.Kernel) {
	write, read, out := sim.Param[uint64](k, 0), sim.Param[uint64](k, 1), sim.Param[uint64](k, 2)
	delta := sim.Param[uint32](k, 4)
	each(sim.Param[uint64](k, 3), func(off uint64, n int) {
		v := sim.Load[uint32](k, read+off, n)
		for i := range v {
			v[i] += delta
		}
		sim.Store(k, write+off, v)
		sim.Store(k, out+off, sim.Load[uint32](k, read+off, n))
	})
}
