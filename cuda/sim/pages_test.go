package sim

import (
	"testing"

	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"
)

// Runs of pages against a slice of pages.
func TestPagesAgainstAModel(t *testing.T) {
	const size = 64
	rapid.Check(t, func(t *rapid.T) {
		p := newPages(size, page{at: -2})
		var model [size]page
		for i := range model {
			model[i] = page{at: -2}
		}
		draw := func(t *rapid.T) span {
			lo := rapid.Uint64Range(0, size-1).Draw(t, "first")
			return span{lo, rapid.Uint64Range(lo+1, size).Draw(t, "end")}
		}
		t.Repeat(map[string]func(*rapid.T){
			"change": func(t *rapid.T) {
				s, at := draw(t), rapid.Int32Range(-2, 1).Draw(t, "at")
				var seen uint64
				p.each(s, func(s span, pg *page) { seen += s.size(); pg.at = at })
				require.Equal(t, s.size(), seen)
				for i := s.lo; i < s.hi; i++ {
					model[i].at = at
				}
			},
			"": func(t *rapid.T) {
				next := uint64(0)
				for i, r := range p.runs {
					require.Equal(t, next, r.lo)
					require.Less(t, r.lo, r.hi)
					require.False(t, i > 0 && p.runs[i-1].page == r.page, "equal neighbours are one run")
					for x := r.lo; x < r.hi; x++ {
						require.Equal(t, model[x], r.page)
					}
					next = r.hi
				}
				require.Equal(t, uint64(size), next)
				s := draw(t)
				at, ok := same(&p, s, func(pg page) int32 { return pg.at })
				want := true
				for _, pg := range model[s.lo:s.hi] {
					want = want && pg == model[s.lo]
				}
				require.Equal(t, want, ok)
				if ok {
					require.Equal(t, model[s.lo].at, at)
				}
				var looked uint64
				p.visit(s, func(s span, pg page) { looked += s.size(); require.Equal(t, model[s.lo], pg) })
				require.Equal(t, s.size(), looked)
			},
		})
	})
}
