package sim

import (
	"testing"

	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"
)

// Ranges against one flag per number.
func TestRangesMatchFlags(t *testing.T) {
	const size = 64
	rapid.Check(t, func(t *rapid.T) {
		var r ranges
		r.put(span{0, size})
		var taken [size]bool
		var held []span
		hold := func(t *rapid.T, s span) {
			for x := s.lo; x < s.hi; x++ {
				require.False(t, taken[x], "%d was handed out twice", x)
				taken[x] = true
			}
			held = append(held, s)
		}
		fits := func(s span) bool {
			for x := s.lo; x < s.hi; x++ {
				if x >= size || taken[x] {
					return false
				}
			}
			return s.lo < s.hi
		}
		free := func() (n uint64) {
			for _, t := range taken {
				if !t {
					n++
				}
			}
			return n
		}
		t.Repeat(map[string]func(*rapid.T){
			"take": func(t *rapid.T) {
				n := rapid.Uint64Range(1, 16).Draw(t, "n")
				align := uint64(1) << rapid.IntRange(0, 4).Draw(t, "align")
				lo, ok := r.acquire(n, align, rapid.Uint64Range(0, 8).Draw(t, "gap"))
				possible := false
				for x := uint64(0); x < size; x += align {
					possible = possible || fits(span{x, x + n})
				}
				require.Equal(t, possible, ok)
				if ok {
					require.Zero(t, lo%align)
					hold(t, span{lo, lo + n})
				}
			},
			"take at": func(t *rapid.T) {
				lo := rapid.Uint64Range(0, size).Draw(t, "lo")
				s := span{lo, lo + rapid.Uint64Range(0, 16).Draw(t, "n")}
				ok := r.acquireAt(s)
				require.Equal(t, fits(s), ok)
				if ok {
					hold(t, s)
				}
			},
			"take some": func(t *rapid.T) {
				n := rapid.Uint64Range(0, free()).Draw(t, "n")
				var got uint64
				for _, s := range r.acquirePieces(n) {
					got += s.size()
					hold(t, s)
				}
				require.Equal(t, n, got)
			},
			"put": func(t *rapid.T) {
				if len(held) == 0 {
					t.Skip("nothing is taken")
				}
				i := rapid.IntRange(0, len(held)-1).Draw(t, "which")
				for x := held[i].lo; x < held[i].hi; x++ {
					taken[x] = false
				}
				r.put(held[i])
				held = append(held[:i], held[i+1:]...)
			},
		})
	})
}

func TestTakingGoesRound(t *testing.T) {
	var r ranges
	r.put(span{0, 4})
	for want := range uint64(4) {
		got, ok := r.acquire(1, 1, 0)
		require.True(t, ok)
		require.Equal(t, want, got)
		r.put(span{got, got + 1})
	}
	got, ok := r.acquire(1, 1, 0)
	require.True(t, ok)
	require.Zero(t, got, "what was used first is used again first")
}

func TestGivingBackTwicePanics(t *testing.T) {
	var r ranges
	r.put(span{0, 4})
	require.Panics(t, func() { r.put(span{1, 2}) })
}
