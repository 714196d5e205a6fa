package sim

import "github.com/cuvmm/cuvmm/csrc/kernels"

// The library's own kernels run on every machine: for each PTX entry of
// csrc/kernels there is a Go function here that does the same.
func init() {
	RegisterKernel(kernels.VectorAdd, twinVectorAdd)
	RegisterKernel(kernels.Fill, twinFill)
	RegisterKernel(kernels.Sum, twinSum)
	RegisterKernel(kernels.AliasAdd, twinAliasAdd)
}

// twinElement is the size of the elements of all of these kernels, in bytes.
const twinElement = 4

// twinPiece bounds how many elements a kernel holds at a time.
const twinPiece = 1 << 16

// inPieces calls do for n elements in pieces: where one starts in bytes, and how
// many elements it has.
func inPieces(n uint64, do func(off uint64, n int)) {
	for i := uint64(0); i < n; i += twinPiece {
		do(i*twinElement, int(min(twinPiece, n-i)))
	}
}

func twinVectorAdd(k *Kernel) {
	a, b, c := Param[uint64](k, 0), Param[uint64](k, 1), Param[uint64](k, 2)
	inPieces(Param[uint64](k, 3), func(off uint64, n int) {
		x, y := Load[float32](k, a+off, n), Load[float32](k, b+off, n)
		for i := range x {
			x[i] += y[i]
		}
		Store(k, c+off, x)
	})
}

func twinFill(k *Kernel) {
	p, first, step := Param[uint64](k, 0), Param[uint32](k, 2), Param[uint32](k, 3)
	inPieces(Param[uint64](k, 1), func(off uint64, n int) {
		v := make([]uint32, n)
		for i := range v {
			v[i] = first + (uint32(off/twinElement)+uint32(i))*step
		}
		Store(k, p+off, v)
	})
}

func twinSum(k *Kernel) {
	p, total := Param[uint64](k, 0), uint64(0)
	n := Param[uint64](k, 1)
	inPieces(n, func(off uint64, n int) {
		for _, v := range Load[uint32](k, p+off, n) {
			total += uint64(v)
		}
	})
	if n > 0 {
		k.AddWord(Param[uint64](k, 2), total)
	}
}

func twinAliasAdd(k *Kernel) {
	write, read, out := Param[uint64](k, 0), Param[uint64](k, 1), Param[uint64](k, 2)
	delta := Param[uint32](k, 4)
	inPieces(Param[uint64](k, 3), func(off uint64, n int) {
		v := Load[uint32](k, read+off, n)
		for i := range v {
			v[i] += delta
		}
		Store(k, write+off, v)
		Store(k, out+off, Load[uint32](k, read+off, n))
	})
}
