package capturetest

import (
	"errors"

	"github.com/cuvmm/cuvmm/cuda"
	"github.com/cuvmm/cuvmm/vmm"
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

// served begins and ends what a capture is served by.
func served(c *pool.Capture, err error) error {
	if err != nil {
		return err
	}
	_, err = c.End()
	return errors.Join(err, c.Close())
}

// within has a capture of the stream round f.
func (w *world) within(s *cuda.Stream, f func() error) error {
	g, err := s.WithCapture(cuda.CaptureOptions{}, f)
	return keep[*cuda.Graph](w)(g, err)
}

// poolCapture serves a capture of no other library.
func (w *world) poolCapture() *pool.Capture {
	c := must[*pool.Capture](w)(w.pool().BeginCaptureID(1<<41, pool.CaptureOptions{}))
	w.Cleanup(func() {
		if _, err := c.End(); errors.Join(err, c.Close()) != nil {
			w.Error(err)
		}
	})
	return c
}

func (w *world) workspaces() *pool.Workspaces {
	ws := must[*pool.Workspaces](w)(w.pool().Prepare(w.stream(), pool.Workspace{Name: "a", Bytes: mib}))
	w.Cleanup(func() {
		if err := ws.Close(); err != nil {
			w.Error(err)
		}
	})
	return ws
}

var poolCases = join(
	plain("Pool", (*world).pool, "Device", "Stats", "Live", "Check", "Released"),
	plain("Capture", (*world).poolCapture, "Released"),
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
		"Pool.Capture": func(w *world) func() error {
			p, s := w.pool(), w.stream()
			return func() error {
				g, _, err := p.Capture(s, pool.CaptureOptions{}, func() error {
					b, err := p.Alloc(pool.Request{Bytes: mib, Stream: s})
					return errors.Join(err, p.Free(b))
				})
				return keep[*cuda.Graph](w)(g, err)
			}
		},
		"Pool.BeginCapture": func(w *world) func() error {
			p, s := w.pool(), w.stream()
			return func() error {
				return w.within(s, func() error { return served(p.BeginCapture(s, pool.CaptureOptions{})) })
			}
		},
		"Pool.BeginCaptureID": func(w *world) func() error {
			p := w.pool()
			return func() error { return served(p.BeginCaptureID(1<<40, pool.CaptureOptions{})) }
		},
		"Pool.NewArena": func(w *world) func() error {
			p := w.pool()
			return func() error { return keep[*pool.Arena](w)(p.NewArena()) }
		},
		"Arena.Released": func(w *world) func() error {
			a := made[*pool.Arena](w)(w.pool().NewArena())
			return func() error { a.Released(); return nil }
		},
		"Workspaces.Released": func(w *world) func() error {
			ws := w.workspaces()
			return func() error { ws.Released(); return nil }
		},
		"Arena.Close": func(w *world) func() error {
			return made[*pool.Arena](w)(w.pool().NewArena()).Close
		},
		"Capture.ID":    func(w *world) func() error { c := w.poolCapture(); return func() error { c.ID(); return nil } },
		"Capture.Stats": func(w *world) func() error { c := w.poolCapture(); return func() error { c.Stats(); return nil } },
		"Capture.End": func(w *world) func() error {
			c := w.poolCapture()
			return func() error { _, err := c.End(); return err }
		},
		"Capture.Close": func(w *world) func() error {
			c := w.poolCapture()
			_, _ = c.End()
			return c.Close
		},
		"Capture.CloseAfter": func(w *world) func() error {
			c, s := w.poolCapture(), w.stream()
			_, _ = c.End()
			return func() error { return errors.Join(c.CloseAfter(s), w.drain()) }
		},
		"Pool.Prepare": func(w *world) func() error {
			p, s := w.pool(), w.stream()
			return func() error {
				ws, err := p.Prepare(s, pool.Workspace{Name: "a", Bytes: 3 * mib})
				return errors.Join(err, ws.Close(s))
			}
		},
		"Workspaces.Get": func(w *world) func() error {
			ws := w.workspaces()
			return func() error { ws.Get("a"); return nil }
		},
		"Workspaces.Close": func(w *world) func() error {
			ws, s := w.workspaces(), w.stream()
			return func() error { return ws.Close(s) }
		},
		"Pool.SetLimit": func(w *world) func() error {
			p := w.pool()
			return func() error { return p.SetLimit(2 * mib) }
		},
		// One device has no peers to be granted: pool's own test has two.
		"Pool.Grant": func(w *world) func() error {
			p := w.pool()
			return func() error { return p.Grant(w.access(vmm.ReadWrite)) }
		},
		"Pool.Trim": func(w *world) func() error {
			p := w.pool()
			return func() error { _, err := p.Trim(0); return err }
		},
		"Pool.Waited": func(w *world) func() error {
			p, s := w.pool(), w.stream()
			return func() error { p.Waited(s); return nil }
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
