package vrange

import (
	"fmt"
	"math/rand/v2"
	"slices"
	"testing"

	"github.com/cuvmm/cuvmm/internal/phys"
	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"
)

func piece(off, size uint64) *Mapping { return &Mapping{Off: off, Memory: &phys.Handle{Size: size}} }

// The table says what a sorted list says, whatever is inserted and removed.
func TestTheTableIsASortedList(t *testing.T) {
	const slots = 4 * leafSize
	rapid.Check(t, func(t *rapid.T) {
		var all table
		var list []*Mapping // the model
		find := func(off uint64) int {
			return slices.IndexFunc(append(list, piece(slots, 1)), func(m *Mapping) bool { return m.end() > off })
		}
		check := func(off uint64) {
			i := find(off)
			want := list[i:]
			require.Equal(t, len(list), all.n)
			require.True(t, slices.Equal(want, slices.Collect(all.from(off))), "from %d", off)
			if len(want) == 0 {
				require.Nil(t, all.get(off))
			} else {
				require.Same(t, want[0], all.get(off))
			}
			for i, l := range all.leaves {
				require.NotEmpty(t, l.all)
				require.LessOrEqual(t, len(l.all), leafSize)
				require.Equal(t, l.off, l.all[0].off)
				require.True(t, i == 0 || all.leaves[i-1].off < l.off)
			}
		}
		t.Repeat(map[string]func(*rapid.T){
			"insert": func(t *rapid.T) {
				// A run of pieces from a free offset up to the next piece.
				off := rapid.Uint64Range(0, slots-1).Draw(t, "off")
				i := find(off)
				end := uint64(slots)
				if i < len(list) {
					end = list[i].Off
				}
				if off >= end {
					t.Skip("taken")
				}
				most := rapid.Uint64Range(1, slots).Draw(t, "most")
				var run []*Mapping
				for at := off; at < min(end, off+most); {
					m := piece(at, min(rapid.Uint64Range(1, 3).Draw(t, "size"), end-at))
					run = append(run, m)
					at = m.end()
				}
				list = slices.Insert(list, i, run...)
				all.insert(run)
				check(0)
				check(off)
			},
			"remove": func(t *rapid.T) {
				if len(list) == 0 {
					t.Skip("empty")
				}
				i := rapid.IntRange(0, len(list)-1).Draw(t, "at")
				n := rapid.IntRange(1, len(list)-i).Draw(t, "n")
				run := slices.Clone(list[i : i+n])
				list = slices.Delete(list, i, i+n)
				all.remove(run)
				check(0)
				check(run[0].Off)
			},
			"": func(t *rapid.T) { check(rapid.Uint64Range(0, slots).Draw(t, "look")) },
		})
	})
}

// A range whose mappings come at its end, as those of a buffer, has full leaves.
func TestATableThatGrowsAtItsEndIsFull(t *testing.T) {
	var all table
	for i := range uint64(10 * leafSize) {
		all.insert([]*Mapping{piece(i, 1)})
	}
	require.Len(t, all.leaves, 10)
}

// BenchmarkTable inserts n pages in random order and removes them in another.
func BenchmarkTable(b *testing.B) {
	for _, n := range []int{100, 1_000, 10_000, 100_000} {
		b.Run(fmt.Sprint(n), func(b *testing.B) {
			pages := make([][]*Mapping, n)
			for i := range pages {
				pages[i] = []*Mapping{piece(uint64(i), 1)}
			}
			order, back := rand.New(rand.NewPCG(1, 2)).Perm(n), rand.New(rand.NewPCG(3, 4)).Perm(n)
			for b.Loop() {
				var all table
				for _, i := range order {
					all.insert(pages[i])
				}
				for _, i := range back {
					all.remove(pages[i])
				}
			}
			b.ReportMetric(float64(b.Elapsed().Nanoseconds())/float64(b.N*n), "ns/page")
		})
	}
}
