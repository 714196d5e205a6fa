//go:build linux

package vmm_test

import (
	"errors"
	"slices"
	"testing"

	"github.com/cuvmm/cuvmm/cuda"
	"github.com/cuvmm/cuvmm/cuda/sim"
	"github.com/cuvmm/cuvmm/internal/share"
	"github.com/cuvmm/cuvmm/internal/test/gputest"
	"github.com/cuvmm/cuvmm/vmm"
	"github.com/stretchr/testify/require"
)

// builders are the places of this package that build something and give it back if a later
// step fails. In each row a step fails, and the driver refuses what gives back as well: what
// is left then is on the System's list, whose names left has.
var builders = []struct {
	place   string
	fails   sim.Fault
	refused string
	left    []string
	do      func(w *world) error
}{
	{"map.go: Reservation.Map, the count of the memory", sim.Fault{Call: "cuMemMap"}, "cuMemRelease", nil, // its Allocation has it
		func(w *world) error { return gputest.Err(w.r.Map(0, w.a)) }},
	{"map.go: Reservation.MapRun, the count of each memory", sim.Fault{Call: "cuMemMap"}, "cuMemRelease", nil,
		func(w *world) error { return gputest.Err(w.r.MapRun(0, nil, w.a)) }},
	{"grow.go: buffer.createLocked, created chunks", sim.Fault{Call: "cuMemMap"}, "cuMemRelease", []string{"memory", "memory", "memory"},
		func(w *world) error { return w.b.Grow(3 * kib64) }},
	{"fork.go: buffer.prefixLocked, the range", sim.Fault{Call: "cuMemCreate"}, "cuMemAddressFree", []string{"address range"}, forks},
	{"move.go: buffer.mapChunks, the new chunk", sim.Fault{Call: "cuMemMap"}, "cuMemRelease", []string{"memory"}, forks},
	{"move.go: buffer.mapChunks, the range", sim.Fault{Call: "cuMemMap"}, "cuMemAddressFree", []string{"address range"}, forks},
	{"move.go: buffer.discard of a fork, what is mapped", sim.Fault{Call: "cuMemcpyDtoDAsync"}, "cuMemUnmap", []string{"memory", "address range"}, forks},
	{"move.go: buffer.discard of a fork, the range", sim.Fault{Call: "cuMemcpyDtoDAsync"}, "cuMemAddressFree", []string{"address range"}, forks},
	{"move.go: buffer.mapChunks of a move, the range", sim.Fault{Call: "cuMemMap"}, "cuMemAddressFree", []string{"address range"},
		func(w *world) error { return gputest.Err(w.b.Move(vmm.MoveOptions{})) }},
	{"pages.go: makePages, the pages", sim.Fault{Call: "cuMemCreate", After: 1}, "cuMemRelease", []string{"memory"},
		func(w *world) error { return w.ranges[0].Map(w.ctx(), nil, vmm.Span{First: 0, N: 3}) }},
	{"sparse.go: newSparse, the range", sim.Fault{}, "cuMemAddressFree", []string{"address range"},
		func(w *world) error {
			p, err := vmm.NewPages(w.d, vmm.PagesOptions{})
			if err == nil {
				err = p.Close()
			}
			require.NoError(w.t, err)
			return gputest.Err(vmm.NewSparse(w.d, vmm.SparseOptions{Pages: p, Reserve: kib64}))
		}},
	{"imported.go: importBuffer, the range", sim.Fault{Call: "cuMemMap"}, "cuMemAddressFree", []string{"address range"},
		func(w *world) error {
			chunks := imports(w.t, w.b, kib64)
			_, err := share.NewBuffer(testOp, importing(w.b, kib64, chunks))
			return errors.Join(err, chunks[0].Let(testOp))
		}},
}

// forks copies a part of a chunk.
func forks(w *world) error { return gputest.Err(w.b.Fork(nil, w.b.Len()-1, vmm.ForkOptions{})) }

func TestWhatABuilderCannotUndoIsGivenBackLater(t *testing.T) {
	for _, row := range builders {
		t.Run(row.place, func(t *testing.T) {
			w := newWorld(t, false)
			w.buffer(2)
			w.sparse(0)
			require.NoError(t, w.create(kib64, vmm.Properties{}))
			r, err := vmm.Reserve(w.d, kib64, vmm.ReserveOptions{})
			require.NoError(t, err)
			w.own(r)
			w.r = r
			before, live := w.sys.Stats(), w.m.Live()
			row.fails.Result, row.fails.Times = code, 1
			if row.fails.Call != "" {
				w.m.Inject(row.fails)
			}
			w.m.Inject(sim.Fault{Call: row.refused, Times: -1, Result: code})
			require.Error(t, row.do(w))
			var at *cuda.Error
			if err := w.drain(); len(row.left) > 0 {
				require.ErrorAs(t, err, &at)
			}
			var left []string
			for _, l := range w.sys.Leftovers() {
				left = append(left, l.What)
			}
			slices.Sort(left)
			slices.Sort(row.left)
			require.Equal(t, row.left, left)
			w.m.ClearFaults()
			require.NoError(t, w.drain())
			require.Empty(t, w.sys.Leftovers())
			require.Equal(t, live, w.m.Live())
			now := w.sys.Stats()
			require.Equal(t, []int{before.Allocations, before.Mappings, before.Reservations}, []int{now.Allocations, now.Mappings, now.Reservations})
			w.end()
		})
	}
}
