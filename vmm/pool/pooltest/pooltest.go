// Package pooltest helps with tests of code that takes its memory from a pool:
// the test fails, and names the lines that allocated, unless all of it came back.
//
//	func TestModel(t *testing.T) {
//		_, sys := sim.Open(t)
//		p := pooltest.New(t, sys.Devices()[0], pool.Options{})
//		useMemoryOf(p)
//	}
package pooltest

import (
	"cmp"
	"fmt"
	"maps"
	"slices"

	"github.com/cuvmm/cuvmm/cuda"
	"github.com/cuvmm/cuvmm/internal/errs"
	"github.com/cuvmm/cuvmm/vmm/pool"
)

// TB is what this package needs of a test; *testing.T and *testing.B have it.
type TB interface {
	Helper()
	Cleanup(func())
	Errorf(format string, args ...any)
	Fatalf(format string, args ...any)
}

// New makes a pool for a test, which keeps the stacks of its blocks
// (Options.Track). When the test ends, the pool is checked as by Check and
// closed; blocks that are live then are freed first, so that what else the test
// closes does not fail because of them. Make the streams that the code under test uses
// before the pool, or leave them open: the pool is closed before what was made
// earlier.
func New(tb TB, d *cuda.Device, o pool.Options) *pool.Pool {
	tb.Helper()
	o.Track = true
	p, err := pool.New(d, o)
	if err != nil {
		tb.Fatalf("pooltest: %v", err)
		return nil
	}
	tb.Cleanup(func() {
		tb.Helper()
		if Check(tb, p) {
			for _, l := range p.Live() {
				// It may be freed meanwhile, which is as good.
				_ = p.Free(l.Block)
			}
		}
		if err := p.Close(); err != nil {
			tb.Errorf("pooltest: %v", err)
		}
	})
	return p
}

// Check fails the test for blocks of the pool that are live: one line for each
// place that allocated some, with its file and line where the pool has
// Options.Track, the largest first. It fails for a pool that is not
// consistent in itself, too. It reports whether there are live blocks, and
// changes nothing.
func Check(tb TB, p *pool.Pool) (leaked bool) {
	tb.Helper()
	places := map[string]*place{}
	for _, l := range p.Live() {
		where := "at an unknown place (the pool was made without Options.Track)"
		if len(l.Stack) > 0 {
			f := l.Stack[0]
			where = fmt.Sprintf("at %s:%d (%s)", f.File, f.Line, f.Function)
		}
		if l.Tag != 0 {
			where += fmt.Sprintf(" for %q", l.Tag)
		}
		at := places[where]
		if at == nil {
			at = &place{where: where, first: l.Block.Ptr()}
			places[where] = at
		}
		at.blocks++
		at.bytes += l.Block.Bytes()
	}
	all := slices.SortedFunc(maps.Values(places), func(a, b *place) int {
		return cmp.Or(cmp.Compare(b.bytes, a.bytes), cmp.Compare(a.where, b.where))
	})
	for _, at := range all {
		tb.Errorf("pooltest: not freed: %v", at)
	}
	if err := p.Check(); err != nil {
		tb.Errorf("pooltest: %v", err)
	}
	return len(all) > 0
}

// place is somewhere that allocated blocks.
type place struct {
	where  string
	first  cuda.Ptr
	blocks int
	bytes  int
}

func (p *place) String() string {
	blocks := fmt.Sprintf("a block of %s at %v", errs.Count(p.bytes, "byte"), p.first)
	if p.blocks > 1 {
		blocks = fmt.Sprintf("%d blocks of %d bytes in all, the first at %v", p.blocks, p.bytes, p.first)
	}
	return blocks + ", allocated " + p.where
}
