package sim

import "github.com/cuvmm/cuvmm/csrc/kernels"

func init() { RegisterKernel(kernels.Scatter, twinScatter) }

func twinScatter(k *Kernel) {
	from, table, n := Param[uint64](k, 0), Param[uint64](k, 1), Param[uint64](k, 2)
	for i := uint64(0); i < n; i += twinPiece {
		for _, e := range Load[kernels.ScatterEntry](k, table+16*i, int(min(twinPiece, n-i))) {
			Store(k, e.To, Load[byte](k, from+uint64(e.Offset), int(e.Bytes)))
		}
	}
}
