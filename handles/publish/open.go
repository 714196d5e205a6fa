package publish

import (
	"context"
	"fmt"

	"github.com/cuvmm/cuvmm/cuda"
	"github.com/cuvmm/cuvmm/handles"
	"github.com/cuvmm/cuvmm/handles/peer"
	"github.com/cuvmm/cuvmm/internal/core"
	"github.com/cuvmm/cuvmm/internal/errs"
	"github.com/cuvmm/cuvmm/internal/exchange"
	"github.com/cuvmm/cuvmm/internal/share"
	"github.com/cuvmm/cuvmm/internal/wait"
	"github.com/cuvmm/cuvmm/vmm"
)

// Open maps the publication of a name once, as it was announced last: as an ordinary
// array, in a range of exactly that memory, which later changes of the publication do
// not affect. It does not wait for a publication of the name ([Client.Await]). Until Open returns it counts as a follower of the client. T must have the publisher's element type and size
// ([handles.ErrMismatch]); a buffer is opened as bytes. Open waits for the first
// announcement, while the publisher rewrites or has the memory suspended, and until the elements are complete. A
// publisher waits for no reader of what was opened: follow a publication that is rewritten.
// The caller closes the array.
func Open[T any](ctx context.Context, k *Client, d *cuda.Device, name string, o handles.ImportOptions) (*vmm.Array[T], error) {
	const op = "publish.Open"
	l, err := k.lineOf(op)
	if err != nil {
		return nil, err
	}
	b, err := l.open(ctx, op, d, name, o, wantedOf[T]())
	if err != nil {
		return nil, err
	}
	a, err := vmm.ArrayOf[T](b)
	if err != nil {
		return nil, share.Of(b).Abandon(op, err)
	}
	return a, nil
}

func (k *line) open(ctx context.Context, op string, d *cuda.Device, name string, o handles.ImportOptions, want wanted) (*vmm.Buffer, error) {
	if core.SystemOf(d) == nil {
		return nil, errs.PeerInvalid(op, "a nil device", "take one from System.Devices")
	}
	if err := exchange.CheckBounds(op, o.MaxBytes, o.MaxChunks, o.Align); err != nil {
		return nil, err
	}
	said, r, err := k.subscribe(ctx, op, name, 0, o.ReadOnly, possession{})
	if err != nil {
		return nil, err
	}
	defer r.close()
	defer k.leave(said.token, r.mailbox)
	if err := want.of(op, name, &said.about); err != nil {
		return nil, err
	}
	in, err := newImporter(op, d, said.about, o)
	if err != nil {
		return nil, err
	}
	page, err := k.openPage(op, r.page, said.slot)
	if err != nil {
		return nil, err
	}
	defer func() { _ = page.Close() }()
	t := &replica{unit: uint64(want.size), granularity: in.Granularity(), room: min(said.reserved, maxRoom), most: handles.MaxChunks}
	got := &snapshotReader{k: k, op: op, token: said.token, replica: t, Importer: in}
	slot := &pageSlot{page: page, index: int(said.slot)}
	var last *update
	for opened := true; opened && err == nil; {
		if last, err = got.read(ctx, r.mailbox); err == nil {
			err = k.awaitWord(ctx, op, slot, last.ordered)
			// The next view shows it, if it is rewritten, or suspended.
			opened = last.state == Suspended || slot.word(fluxWord).Load() >= last.generation
		}
	}
	if err != nil {
		return nil, got.Discard(err)
	}
	b, err := got.Buffer(share.ImportOptions{Length: last.length * t.unit, Hint: o.Hint, Align: o.Align, Name: o.Name})
	if err != nil {
		return nil, got.Discard(err)
	}
	return b, nil
}

// snapshotReader imports the chunks of a publication until it is level.
type snapshotReader struct {
	*exchange.Importer
	k       *line
	op      string
	token   token
	replica *replica
}

func (c *snapshotReader) read(ctx context.Context, b *mailbox) (*update, error) {
	for {
		var a arrival
		select {
		case a = <-b.updates:
		case <-b.over:
			var ok bool
			if a, ok = b.arrived(); !ok {
				return nil, b.why
			}
		case <-ctx.Done():
			what := "nothing was announced yet"
			switch {
			case c.replica.state == Suspended:
				what = "the publisher has suspended the memory"
			case c.replica.generation > 0:
				what = "the publisher rewrites the elements"
			}
			return nil, errs.PeerWait(ctx, c.op, what, "try again, or with a longer limit")
		}
		err := c.replica.apply(a.update)
		if err != nil {
			err = c.k.conn.in.Fail(err)
		} else {
			err = c.carryOut(a)
			_ = c.k.conn.Send(ctx, pack(c.replica.finish(c.token, err)))
		}
		_ = peer.CloseAll(a.fds)
		if err != nil || a.last {
			return a.update, err
		}
	}
}

func (c *snapshotReader) carryOut(a arrival) error {
	if a.over {
		return errs.Peer(c.op, cuda.ErrCapacity, "chunks beyond the publisher's own range", "the publisher declared it wrong")
	}
	if a.lost() {
		return errs.FilesLost(fmt.Sprintf("the file descriptors of %s were dropped", errs.Count(len(a.chunks), "chunk")))
	}
	sizes := append(sizesOf(c.replica.chunks[:a.keep]), sizesOf(a.chunks)...)
	gone := share.View{}
	for _, h := range c.KeepFirst(int(a.keep)) {
		gone.Chunks = append(gone.Chunks, share.Chunk{Handle: h})
	}
	if err := gone.Release(); err != nil {
		return err
	}
	if err := c.Declare(c.op, sizes); err != nil { // the limits apply to all chunks together
		return err
	}
	return c.Receive(a.fds)
}

// awaitWord waits on the CPU until a generation is complete, or the publisher ends
// before it is.
func (k *line) awaitWord(ctx context.Context, op string, w *pageSlot, generation uint64) error {
	switch {
	case !wait.Poll(ctx, func() bool { return k.ended() || w.reached(generation) }):
		return errs.PeerWait(ctx, op, fmt.Sprintf("the publisher's work of generation %d is not done", generation), "try again with a longer limit")
	case w.reached(generation): // even if the publisher ended afterwards
		return nil
	}
	k.mu.Lock()
	defer k.mu.Unlock()
	return errs.PeerCause(k.goneLocked(op), op, ErrUnfinished, fmt.Sprintf("generation %d", generation), "open it again when the publisher is back")
}

// newImporter prepares the import of a publication's chunks, which are declared as they arrive.
func newImporter(op string, on *cuda.Device, about handles.Descriptor, o handles.ImportOptions) (*exchange.Importer, error) {
	m := exchange.Memory{Location: about.Location, Device: about.Device, Handle: about.Handle, Compressible: about.Compressible, RDMA: about.RDMA}
	return exchange.NewImporter(op, on, m, exchange.ImportOptions{ReadOnly: o.ReadOnly, KeepDescriptors: o.KeepDescriptors}, func(chunks []int, granularity, there uint64) error {
		if o.MaxBytes > 0 {
			there = uint64(o.MaxBytes)
		}
		about.Chunks = chunks
		return about.Validate(handles.Limits{Granularity: int(granularity), MaxBytes: int(min(there, maxRoom)), MaxChunks: o.MaxChunks})
	})
}
