package sim

import (
	"slices"
	"testing"

	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"
)

// The interval map against a list that is searched from end to end.
func TestIntervalsMatchAList(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		var s intervals[int]
		var model []interval[int]
		number := rapid.Uint64Range(0, 40)
		t.Repeat(map[string]func(*rapid.T){
			"insert": func(t *rapid.T) {
				lo, hi, v := number.Draw(t, "lo"), number.Draw(t, "hi"), rapid.Int().Draw(t, "v")
				fits := lo < hi && !slices.ContainsFunc(model, func(i interval[int]) bool { return lo < i.hi && i.lo < hi })
				require.Equal(t, fits, s.insert(lo, hi, v))
				if fits {
					model = append(model, interval[int]{lo, hi, v})
				}
			},
			"remove": func(t *rapid.T) {
				lo := number.Draw(t, "lo")
				at := slices.IndexFunc(model, func(i interval[int]) bool { return i.lo == lo })
				v, ok := s.remove(lo)
				require.Equal(t, at >= 0, ok)
				if ok {
					require.Equal(t, model[at].v, v)
					model = slices.Delete(model, at, at+1)
				}
			},
			"find": func(t *rapid.T) {
				x := number.Draw(t, "x")
				at := slices.IndexFunc(model, func(i interval[int]) bool { return i.lo <= x && x < i.hi })
				found, ok := s.find(x)
				require.Equal(t, at >= 0, ok)
				if ok {
					require.Equal(t, model[at], found)
				}
			},
			"over": func(t *rapid.T) {
				lo, hi := number.Draw(t, "lo"), number.Draw(t, "hi")
				var want []interval[int]
				for _, i := range model {
					if lo < hi && lo < i.hi && i.lo < hi {
						want = append(want, i)
					}
				}
				slices.SortFunc(want, func(a, b interval[int]) int { return int(a.lo) - int(b.lo) })
				require.Equal(t, want, slices.Collect(s.overlapping(lo, hi)))
				for first := range s.overlapping(lo, hi) { // a walk can be left
					require.Equal(t, want[0], first)
					break
				}
			},
			"": func(t *rapid.T) { require.Equal(t, len(model), s.len()) },
		})
	})
}

func BenchmarkIntervalsFind(b *testing.B) {
	var s intervals[int]
	const n = 100_000
	for i := range uint64(n) {
		s.insert(i*2, i*2+1, int(i))
	}
	var x uint64
	for b.Loop() {
		s.find(x % (2 * n))
		x += 104729
	}
}

// len counts the intervals.
func (s *intervals[V]) len() (n int) {
	for range s.all() {
		n++
	}
	return n
}
