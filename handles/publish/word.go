package publish

import (
	"context"
	"fmt"
	"sync/atomic"

	"github.com/cuvmm/cuvmm/cuda"
	"github.com/cuvmm/cuvmm/internal/core"
	"github.com/cuvmm/cuvmm/internal/driver"
	"github.com/cuvmm/cuvmm/internal/peererr"
	"github.com/cuvmm/cuvmm/internal/sharedpage"
	"github.com/cuvmm/cuvmm/internal/wait"
)

// word is a follower's page as one of its two sides has it: mapped, and
// registered as pinned host memory, so that streams write and wait for it. On a
// device without 64-bit stream memory operations it is not registered, and the
// CPU does both.
type word struct {
	page *sharedpage.Page
	slot int           // of the page's words
	ctx  *core.Context // nil where it is not registered
	base driver.Ptr
}

// streamWords reports whether the device's streams write and wait for words.
func streamWords(d *cuda.Device) bool {
	return core.SystemOf(d).Attribute(driver.Device(d.Ordinal()), driver.AttrStreamMemOps64) > 0
}

// newWord takes the page over, unless it fails.
func newWord(op string, d *cuda.Device, p *sharedpage.Page) (*word, error) {
	w := &word{page: p}
	if !streamWords(d) {
		return w, nil
	}
	c, err := core.ContextOf(d)
	if err != nil {
		return nil, err
	}
	sys := c.System()
	asked := func() string { return "a page that is shared with another process" }
	if r := sys.Drv.MemHostRegister(c.Handle, p.Pointer(), p.Size(), driver.HostRegisterPortable|driver.HostRegisterDeviceMap); r != driver.Success {
		return nil, c.CallError(op, driver.CallMemHostRegister, r, asked())
	}
	at, r := sys.Drv.MemHostGetDevicePointer(c.Handle, p.Pointer())
	if r != driver.Success {
		err := c.CallError(op, driver.CallMemHostGetDevicePointer, r, asked())
		if undo := sys.Drv.MemHostUnregister(c.Handle, p.Pointer()); undo != driver.Success {
			err = fmt.Errorf("%w (and undoing it failed: %w)", err, c.CallError(op, driver.CallMemHostUnregister, undo, asked()))
		}
		return nil, err
	}
	w.ctx, w.base = c, at
	return w, nil
}

func (w *word) value() *atomic.Uint64 { return w.page.Word(w.slot) }

// at is the word as streams address it.
func (w *word) at() driver.Ptr { return w.base + driver.Ptr(8*w.slot) }

// reached reports whether the word reads a generation or a later one.
func (w *word) reached(generation uint64) bool { return int64(w.value().Load()-generation) >= 0 }

// close takes the page out of this process. No stream may write it or wait for
// it any more. The driver waits for its context's work meanwhile.
func (w *word) close(op string) error {
	if c := w.ctx; c != nil {
		unregister := func() driver.Result { return c.System().Drv.MemHostUnregister(c.Handle, w.page.Pointer()) }
		if r := c.Teardown(unregister); r != driver.Success {
			return c.CallError(op, driver.CallMemHostUnregister, r, "a page that is shared with another process")
		}
		w.ctx = nil
	}
	return w.page.Close()
}

// sequence orders the generations of one publication: the words read a
// generation when the work before its announcement is done, and never a later
// one first. All writes are on one stream of the publication's own, which waits
// for the streams that are named by their events. So no stream of the user's
// ever carries a write that a capture could take up, and the order between
// generations is that of the one stream.
//
// Its owner lets one in at a time.
type sequence struct {
	dev    *cuda.Device
	stream *cuda.Stream // nil: the CPU waits and writes
}

func newSequence(d *cuda.Device) (*sequence, error) {
	q := &sequence{dev: d}
	if !streamWords(d) {
		return q, nil
	}
	s, err := d.NewStream(cuda.StreamOptions{})
	if err != nil {
		return nil, err
	}
	q.stream = s
	return q, nil
}

// behind has later values come after the work that is on the stream now. Where
// it captures a graph that is refused and nothing has changed. Without a stream
// of its own it waits for that work.
func (q *sequence) behind(ctx context.Context, op string, in *core.Stream) error {
	sys := core.SystemOf(q.dev)
	if q.stream == nil {
		f, err := sys.NewFence(op, []*core.Stream{in})
		if err != nil {
			return err
		}
		return passed(ctx, op, f)
	}
	if err := in.Use(op, sys); err != nil {
		return err
	}
	defer in.Release()
	m, capturing, err := in.Mark(op)
	if err != nil {
		return err
	}
	if capturing {
		return core.CapturingError(op, in)
	}
	defer m.Release()
	return core.StreamOf(q.stream).After(op, m)
}

// passed waits for a fence.
func passed(ctx context.Context, op string, f *core.Fence) error {
	if !wait.Poll(ctx, f.Passed) {
		f.Release()
		return peererr.Wait(ctx, op, "the stream's work is not done", "announce again with a longer limit")
	}
	return nil
}

// write has the word read the generation, in its turn.
func (q *sequence) write(op string, w *word, generation uint64) error {
	if q.stream == nil {
		w.value().Store(generation)
		return nil
	}
	in := core.StreamOf(q.stream)
	drv := in.Ctx.System().Drv
	if r := drv.StreamWriteValue64(in.Ctx.Handle, in.Handle, w.at(), generation); r != driver.Success {
		return in.Ctx.CallError(op, driver.CallStreamWriteValue64, r, fmt.Sprintf("generation %d", generation))
	}
	return nil
}

// later runs do on the reclaimer when all writes until now are done.
func (q *sequence) later(op string, do func() error) error {
	sys := core.SystemOf(q.dev)
	f := new(core.Fence)
	if q.stream != nil {
		var err error
		if f, err = core.FenceOf(sys, op, []*cuda.Stream{q.stream}); err != nil {
			return err
		}
	}
	sys.Reclaim(f, nil, do)
	return nil
}

// close gives the stream back. Its writes must be done, or it waits for them.
func (q *sequence) close() error {
	if q.stream == nil {
		return nil
	}
	return q.stream.Close()
}
