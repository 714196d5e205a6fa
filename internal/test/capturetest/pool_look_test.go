package capturetest

import (
	"github.com/cuvmm/cuvmm/vmm/pool"
	"github.com/cuvmm/cuvmm/vmm/pool/pooltest"
)

// What looks at a pool.
var poolLookCases = join(
	plain("Pool", (*world).watchedPool, "History", "ResetPeaks", "Snapshot", "StopHistory"),
	plain("Segment", func(w *world) pool.Segment { return w.watchedPool().Snapshot().Segments[0] }, "Hole"),
	plain("Tag", func(*world) pool.Tag { return pool.NewTag("tag") }, "MarshalText"),
	table{
		"Pool.StartHistory": func(w *world) func() error {
			p := w.pool()
			return func() error { p.StartHistory(pool.HistoryOptions{Stacks: true}); return nil }
		},
		"History.Trace": func(w *world) func() error {
			h := w.watchedPool().History()
			return func() error { return h.Trace("mine").Check() }
		},
	},
)

var poolTestCases = table{
	"New": func(w *world) func() error {
		return func() error { pooltest.New(w, w.another(), pool.Options{}); return nil }
	},
	"Check": func(w *world) func() error {
		p := made[*pool.Pool](w)(pool.New(w.dev, pool.Options{}))
		return func() error { pooltest.Check(w, p); return nil }
	},
}

// watchedPool is a pool with a history.
func (w *world) watchedPool() *pool.Pool {
	p := w.pool()
	p.StartHistory(pool.HistoryOptions{})
	w.poolBlock(p, 100)
	return p
}
