package pool

import (
	"testing"

	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"
)

// vacant keeps track of the free places, and the first run that is long enough serves.
func TestVacant(t *testing.T) {
	rapid.Check(t, func(rt *rapid.T) {
		const size = 40
		v := vacant{{0, size}}
		var taken [size]bool
		var held []vacancy
		free := func(at, n int) bool {
			for i := at; i < at+n; i++ {
				if i >= size || taken[i] {
					return false
				}
			}
			return true
		}
		mark := func(r vacancy, as bool) {
			for i := r.from; i < r.to; i++ {
				taken[i] = as
			}
		}
		rt.Repeat(map[string]func(*rapid.T){
			"take": func(rt *rapid.T) {
				n := rapid.IntRange(1, 12).Draw(rt, "n")
				first := 0
				for first < size && !free(first, n) {
					first++
				}
				at, ok := v.pop(n)
				require.Equal(rt, first < size, ok)
				if ok {
					require.Equal(rt, first, at)
					held = append(held, vacancy{at, at + n})
					mark(vacancy{at, at + n}, true)
				}
			},
			"give": func(rt *rapid.T) {
				if len(held) == 0 {
					return
				}
				i := rapid.IntRange(0, len(held)-1).Draw(rt, "which")
				r := held[i]
				held = append(held[:i], held[i+1:]...)
				v.give(r.from, r.to-r.from)
				mark(r, false)
			},
			"": func(rt *rapid.T) {
				var want vacant
				for i := range size {
					switch n := len(want); {
					case taken[i]:
					case n > 0 && want[n-1].to == i:
						want[n-1].to++
					default:
						want = append(want, vacancy{i, i + 1})
					}
				}
				require.Len(rt, v, len(want))
				for i := range want {
					require.Equal(rt, want[i], v[i])
				}
			},
		})
	})
}
