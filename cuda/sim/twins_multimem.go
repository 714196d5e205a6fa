package sim

import (
	"math"
	"time"

	"github.com/cuvmm/cuvmm/csrc/kernels"
	"github.com/cuvmm/cuvmm/internal/driver"
)

func init() {
	for _, e := range kernels.Elements() {
		if e.UnitBytes() == 4 {
			registerReduction[uint32](e)
		} else {
			registerReduction[uint64](e)
		}
	}
	RegisterKernel(kernels.Broadcast, twinBroadcast)
	RegisterKernel(kernels.Barrier, twinBarrier)
	RegisterKernel(kernels.L2Norm, twinL2Norm)
}

// registerReduction registers the twins of an element's reductions, whose units are as
// large as T.
func registerReduction[T uint32 | uint64](e kernels.Element) {
	unit := uint64(e.UnitBytes())
	RegisterKernel(e.AllReduce(), func(k *Kernel) {
		mc := Param[uint64](k, 0)
		inPieces(Param[uint64](k, 1), func(off uint64, n int) {
			at := mc + off/twinElement*unit
			MultimemStore(k, at, MultimemLoadReduce[T](k, e, at, n))
		})
	})
	RegisterKernel(e.Red(), func(k *Kernel) {
		mc, src := Param[uint64](k, 0), Param[uint64](k, 1)
		inPieces(Param[uint64](k, 2), func(off uint64, n int) {
			at := off / twinElement * unit
			MultimemReduce(k, e, mc+at, Load[T](k, src+at, n))
		})
	})
}

func twinBroadcast(k *Kernel) {
	mc, src := Param[uint64](k, 0), Param[uint64](k, 1)
	inPieces(Param[uint64](k, 2), func(off uint64, n int) {
		MultimemStore(k, mc+off, Load[uint32](k, src+off, n))
	})
}

// arrive adds one to every replica of a counter, and waits until the device's own
// has reached the target. It reports false where the word at abort ended that.
func arrive(k *Kernel, mc, own uint64, target uint32, abort uint64) bool {
	if k.LoadWord32(abort) != 0 {
		return false
	}
	MultimemReduce(k, kernels.U32, mc, []uint32{1})
	for int32(k.LoadWord32(own)-target) < 0 {
		if k.LoadWord32(abort) != 0 {
			return false
		}
		k.Sleep(20 * time.Microsecond)
	}
	return true
}

func twinBarrier(k *Kernel) {
	arrive(k, Param[uint64](k, 0), Param[uint64](k, 1), Param[uint32](k, 2), Param[uint64](k, 3))
}

func twinL2Norm(k *Kernel) {
	x, sum := Param[uint64](k, 0), 0.0
	inPieces(Param[uint64](k, 1), func(off uint64, n int) {
		for _, v := range Load[float32](k, x+off, n) {
			sum += float64(v) * float64(v)
		}
	})
	partialMC, partial := Param[uint64](k, 2), Param[uint64](k, 3)
	k.word(partial, driver.AccessReadWrite, func(w *atomicWord) {
		for {
			old := w.Load()
			if w.CompareAndSwap(old, math.Float64bits(math.Float64frombits(old)+sum)) {
				return
			}
		}
	})
	if !arrive(k, Param[uint64](k, 4), Param[uint64](k, 5), Param[uint32](k, 6), Param[uint64](k, 8)) {
		return
	}
	all := MultimemLoadReduce[float64](k, kernels.F64, partialMC, 1)
	Store(k, Param[uint64](k, 7), []float64{math.Sqrt(all[0])})
}
