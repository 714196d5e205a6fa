package handles

import (
	"context"
	"errors"
	"fmt"

	"github.com/cuvmm/cuvmm/cuda"
	"github.com/cuvmm/cuvmm/internal/driver"
	"github.com/cuvmm/cuvmm/internal/errs"
	"github.com/cuvmm/cuvmm/internal/share"
	"github.com/cuvmm/cuvmm/vmm"
)

// Open maps what is published under a name as it was announced last, once: an
// ordinary array, in a range of exactly that memory, which no later change of
// the publication reaches. Elements must be of the publisher's type and size
// ([ErrMismatch]); a buffer is opened as bytes. It returns when the elements are
// there; where nothing was announced yet it waits for that. The caller closes
// the array.
func Open[T any](ctx context.Context, k *Client, d *cuda.Device, name string, o ImportOptions) (*vmm.Array[T], error) {
	const op = "handles.Open"
	b, err := k.open(ctx, op, d, name, o, wantedOf[T]())
	if err != nil {
		return nil, err
	}
	a, err := vmm.ArrayOf[T](b)
	if err != nil {
		return nil, errors.Join(err, b.Close())
	}
	return a, nil
}

func (k *Client) open(ctx context.Context, op string, d *cuda.Device, name string, o ImportOptions, want wanted) (*vmm.Buffer, error) {
	if d == nil {
		return nil, failure(op, cuda.ErrInvalidArgument, "a nil device", "take one from System.Devices")
	}
	said, a, err := k.subscribe(ctx, op, name, 0, o.ReadOnly)
	if err != nil {
		return nil, err
	}
	defer func() { _ = a.page.Close() }()
	defer k.leave(said.token, a.inlet)
	if err := want.of(op, name, &said.about); err != nil {
		return nil, err
	}
	in, err := newIntake(op, d, &said.about, o)
	if err != nil {
		return nil, err
	}
	page, err := k.openPage(op, a.page, said.slot)
	if err != nil {
		return nil, err
	}
	defer func() { _ = page.Close() }()
	t := &tracker{unit: uint64(want.size), granularity: in.gran, room: min(said.reserved, maxBytes), most: MaxChunks}
	got := &collection{k: k, op: op, options: o, token: said.token, tracker: t, intake: in}
	last, err := got.collect(ctx, a.inlet)
	if err == nil {
		err = k.awaitWord(ctx, op, &word{page: page, slot: int(said.slot)}, last.ordered)
	}
	if err != nil {
		return nil, got.discard(err)
	}
	b, err := got.buffer(share.ImportOptions{Length: last.length * t.unit})
	if err != nil {
		return nil, got.discard(err)
	}
	return b, nil
}

// collection takes in the chunks of a publication until it is level.
type collection struct {
	*intake
	k       *Client
	op      string
	options ImportOptions
	token   token
	tracker *tracker
}

func (c *collection) collect(ctx context.Context, i *inlet) (*update, error) {
	for {
		var a arrival
		select {
		case a = <-i.updates:
		case <-i.over:
			return nil, i.why
		case <-ctx.Done():
			return nil, waitError(ctx, c.op, "nothing was announced yet", "try again")
		}
		err := c.tracker.take(a.update)
		if err != nil {
			err = c.k.conn.fail(err)
		} else {
			err = c.carryOut(a)
			_ = c.k.conn.Send(ctx, pack(c.tracker.took(c.token, err)))
		}
		_ = closeAll(a.fds)
		if err != nil || a.last {
			return a.update, err
		}
	}
}

func (c *collection) carryOut(a arrival) error {
	if a.over {
		return failure(c.op, cuda.ErrCapacity, "chunks beyond the publisher's own range", "the publisher declared it wrong")
	}
	if a.lost {
		return errFDsLost(fmt.Sprintf("the file descriptors of %s were dropped", errs.Count(len(a.sizes), "chunk")))
	}
	sizes := append(append([]uint64(nil), c.tracker.chunks[:a.keep]...), a.sizes...)
	gone := c.chunks[a.keep:]
	c.chunks = c.chunks[:a.keep:a.keep]
	for _, h := range gone {
		if r := h.Release(); r != driver.Success {
			return h.ReleaseError(c.op, r)
		}
	}
	// What there is by now is checked as a whole.
	d := *c.declared
	d.Chunks = sizes
	next, err := newIntake(c.op, c.dev, &d, c.options)
	if err != nil {
		return err
	}
	next.chunks = c.chunks
	c.intake = next
	return next.take(a.fds)
}

// awaitWord waits on the CPU until a generation is complete, or the publisher is
// gone without having completed it.
func (k *Client) awaitWord(ctx context.Context, op string, w *word, generation uint64) error {
	pause := shortestPoll
	for {
		ended := false
		select {
		case <-k.read:
			ended = true
		default:
		}
		switch {
		case w.reached(generation):
			return nil
		case ended:
			k.mu.Lock()
			defer k.mu.Unlock()
			return failure(op, ErrUnfinished, fmt.Sprintf("generation %d", generation), "open it again when the publisher is back").because(k.gone(op))
		case !sleep(ctx, pause):
			return waitError(ctx, op, fmt.Sprintf("the publisher's work of generation %d is not done", generation), "try again with a longer limit")
		}
		pause = min(2*pause, longestPoll)
	}
}
