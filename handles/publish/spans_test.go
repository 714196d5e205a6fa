package publish

import (
	"testing"

	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"
)

// Spans say the same as a set of elements.
func TestSpansAreASet(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		var all spans
		set := map[int]bool{}
		for range rapid.IntRange(1, 30).Draw(t, "steps") {
			a, b := rapid.IntRange(0, 40).Draw(t, "a"), rapid.IntRange(0, 40).Draw(t, "b")
			if rapid.IntRange(0, 5).Draw(t, "drop") == 0 {
				all.drop(a)
				for i := range a {
					delete(set, i)
				}
			} else {
				all.add(span{a, b})
				for i := a; i < b; i++ {
					set[i] = true
				}
			}
			n := 0
			for i, s := range all {
				require.Less(t, s.from, s.to)
				require.True(t, i == 0 || all[i-1].to < s.from)
				for e := s.from; e < s.to; e++ {
					require.True(t, set[e])
					n++
				}
			}
			require.Len(t, set, n)
			want := b
			for set[want] {
				want++
			}
			require.Equal(t, want, all.prefix(b))
		}
	})
}
