package kerneltest

import (
	"math/rand/v2"
	"testing"

	"github.com/cuvmm/cuvmm/csrc/kernels"
	"github.com/cuvmm/cuvmm/cuda"
	"github.com/cuvmm/cuvmm/internal/test/gputest"
	"github.com/stretchr/testify/require"
)

// Every launch does all of the work, whatever the alignment of an entry and the count of its bytes.
func TestScatter(t *testing.T) {
	gputest.Each(t, func(t *testing.T, d *cuda.Device) {
		m, err := d.LoadModule(kernels.Distribute)
		require.NoError(t, err)
		closed(t, m)
		k, err := m.Kernel(kernels.Scatter)
		require.NoError(t, err)
		s, err := d.NewStream(cuda.StreamOptions{})
		require.NoError(t, err)
		closed(t, s)
		r := &rig{d, s, k, rand.New(rand.NewPCG(3, 2))}
		for _, n := range []int{0, 1, 300} {
			from := make([]byte, 1<<18)
			for i := range from {
				from[i] = byte(r.rng.Uint32())
			}
			source := array(t, r, from)
			for _, l := range launches(n) {
				want := make([]byte, 1<<20)
				to := array(t, r, want)
				table := make([]kernels.ScatterEntry, 0, n+1)
				for at := 0; len(table) < n; {
					unit := []int{1, 4, 16}[r.rng.IntN(3)]
					at = (at + 15) &^ 15
					at += r.rng.IntN(16) &^ (unit - 1)
					size, off := r.rng.IntN(2000)&^(unit-1), r.rng.IntN(1<<17)&^(unit-1)
					copy(want[at:], from[off:][:size])
					table = append(table, kernels.ScatterEntry{To: uint64(to.Ptr()) + uint64(at), Offset: uint32(off), Bytes: uint32(size)})
					at += size
				}
				entries := array(t, r, append(table, kernels.ScatterEntry{To: uint64(to.Ptr()) + 1<<20 - 8, Bytes: 8}))
				r.launch(t, l, source.Ptr(), entries.Ptr(), uint64(n))
				require.Equal(t, want, contents(t, r, to), "%d entries, %v", n, l)
			}
		}
	})
}
