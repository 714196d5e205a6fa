package publish

import (
	"context"
	"fmt"

	"github.com/cuvmm/cuvmm/cuda"
	"github.com/cuvmm/cuvmm/internal/core"
	"github.com/cuvmm/cuvmm/internal/driver"
	"github.com/cuvmm/cuvmm/internal/errs"
	"github.com/cuvmm/cuvmm/internal/wait"
)

// timeline writes words of pages in their turn. Of a publication it orders the generations:
// the words read a generation when the work before its announcement is done, and never a
// later one first. Of a follower it writes when holds have ended. All writes are on one
// stream of its own, which waits for events of the streams that the caller names. So no
// stream of the user carries a write that a capture could record, and the order of the
// numbers is that of the one stream.
//
// Its owner serializes the calls.
type timeline struct {
	dev    *cuda.Device
	stream *cuda.Stream // nil: the CPU waits and writes
}

func newTimeline(d *cuda.Device) (*timeline, error) {
	t := &timeline{dev: d}
	if !streamWords(d) {
		return t, nil
	}
	s, err := d.NewStream(cuda.StreamOptions{})
	if err != nil {
		return nil, err
	}
	t.stream = s
	return t, nil
}

// behind orders later writes after the work that is on the stream now, which the caller
// holds. A stream that captures a graph is refused, without effect. Without a stream of
// its own it waits for that work.
func (t *timeline) behind(ctx context.Context, op string, in *core.Stream) error {
	m, capturing, err := in.Mark(op)
	switch {
	case err != nil:
		return err
	case capturing:
		return core.CapturingError(op, in)
	case t.stream == nil:
		f := new(core.Fence)
		f.Add(m)
		if err := passed(ctx, op, f); err != nil {
			return err
		}
		if r := in.Ctx.Lost(); r != driver.Success { // a fence passes then, but the work was not done
			return in.Ctx.CallError(op, driver.CallEventQuery, r, "the stream's work")
		}
		return nil
	}
	defer m.Release()
	return core.StreamOf(t.stream).After(op, m)
}

// passed waits for a fence.
func passed(ctx context.Context, op string, f *core.Fence) error {
	if !wait.Poll(ctx, f.Passed) {
		f.Release()
		return errs.PeerWait(ctx, op, "the stream's work is not done", "announce again with a longer limit")
	}
	return nil
}

// write makes a word read a number, in its turn.
func (t *timeline) write(op string, w *pageSlot, word slotWord, number uint64) error {
	if t.stream == nil {
		w.word(word).Store(number)
		return nil
	}
	in := core.StreamOf(t.stream)
	drv := in.Ctx.System().Drv
	if r := drv.StreamWriteValue64(in.Ctx.Handle, in.Handle, w.at(word), number); r != driver.Success {
		return in.Ctx.CallError(op, driver.CallStreamWriteValue64, r, fmt.Sprintf("number %d", number))
	}
	return nil
}

// later runs do on the reclaimer when all writes so far are done.
func (t *timeline) later(op string, do func() error) error {
	sys := core.SystemOf(t.dev)
	f := new(core.Fence)
	if t.stream != nil {
		var err error
		if f, err = core.FenceOf(sys, op, []*cuda.Stream{t.stream}); err != nil {
			return err
		}
	}
	sys.Reclaim(f, nil, do)
	return nil
}

// drop is close for a timeline that has written nothing, after an operation that failed with
// cause.
func (t *timeline) drop(cause error) error {
	if t.stream == nil {
		return cause
	}
	return dropStream(t.stream, cause)
}

// dropStream closes a stream without work, after an operation that failed with cause.
func dropStream(s *cuda.Stream, cause error) error {
	u := core.SystemOf(s.Device()).NewUndo(driver.Device(s.Device().Ordinal()))
	u.Own("stream", 0, s.Close)
	return u.After(cause)
}

// done reports whether all writes so far are done.
func (t *timeline) done() (bool, error) {
	if t.stream == nil {
		return true, nil
	}
	return t.stream.Done()
}

// close closes the stream, and waits for its writes.
func (t *timeline) close() error {
	if t.stream == nil {
		return nil
	}
	return t.stream.Close()
}
