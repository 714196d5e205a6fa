package capturetest

import (
	"errors"

	"github.com/cuvmm/cuvmm/cuda"
	"github.com/cuvmm/cuvmm/vmm/pool"
)

// pool has a block that is live and memory that is free.
func (w *world) pool() *pool.Pool {
	p := made[*pool.Pool](w)(pool.New(w.dev, pool.Options{Chunk: 2 * mib}))
	w.poolBlock(p, 9*mib)
	b, err := p.Alloc(pool.Request{Bytes: mib, Stream: w.stream()})
	if err = errors.Join(err, p.Free(b)); err != nil {
		w.Fatal(err)
	}
	return p
}

func (w *world) poolBlock(p *pool.Pool, n int) pool.Block {
	b := must[pool.Block](w)(p.Alloc(pool.Request{Bytes: n, Stream: w.stream()}))
	w.Cleanup(func() { _ = p.Free(b) }) // unless the case did
	return b
}

var poolCases = join(
	plain("Pool", (*world).pool, "Device", "Stats", "Live", "Check"),
	plain("Block", func(w *world) pool.Block { return w.poolBlock(w.pool(), 100) }, "Ptr", "Bytes"),
	plain("Live", func(w *world) pool.Live { return w.pool().Live()[0] }, "String"),
	plain("Tag", func(*world) pool.Tag { return pool.NewTag("tag") }, "String"),
	table{
		"New": func(w *world) func() error {
			return func() error { return keep[*pool.Pool](w)(pool.New(w.another(), pool.Options{})) }
		},
		"NewTag": nothing(func() any { return pool.NewTag("tag") }),
		"Pool.Alloc": func(w *world) func() error {
			p, s := w.pool(), w.stream()
			// New memory of each kind, then what another stream freed.
			return func() error {
				for _, n := range []int{100, 20 * mib, mib} {
					b, err := p.Alloc(pool.Request{Bytes: n, Stream: s})
					if err := errors.Join(err, p.Free(b)); err != nil {
						return err
					}
				}
				return nil
			}
		},
		"Pool.Free": func(w *world) func() error {
			p, s := w.pool(), w.stream()
			b, c := w.poolBlock(p, 100), w.poolBlock(p, 20*mib)
			return func() error { return errors.Join(p.Free(b), p.Free(c, s)) }
		},
		"Pool.FreePtr": func(w *world) func() error {
			p, s := w.pool(), w.stream()
			b := w.poolBlock(p, 100)
			return func() error { return p.FreePtr(b.Ptr(), s) }
		},
		"Pool.Find": func(w *world) func() error {
			p := w.pool()
			b := w.poolBlock(p, 100)
			return func() error { p.Find(b.Ptr()); return nil }
		},
		"Pool.SetLimit": func(w *world) func() error {
			p := w.pool()
			return func() error { return p.SetLimit(mib) }
		},
		"Pool.Trim": func(w *world) func() error {
			p := w.pool()
			return func() error { _, err := p.Trim(0); return err }
		},
		"Pool.Close": func(w *world) func() error {
			p := must[*pool.Pool](w)(pool.New(w.dev, pool.Options{}))
			s := must[*cuda.Stream](w)(w.dev.NewStream(cuda.StreamOptions{}))
			w.closed(s)
			b := must[pool.Block](w)(p.Alloc(pool.Request{Bytes: mib, Stream: s}))
			if err := p.Free(b); err != nil {
				w.Fatal(err)
			}
			return p.Close
		},
	},
)
