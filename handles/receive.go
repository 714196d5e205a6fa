package handles

import (
	"context"
	"fmt"

	"github.com/cuvmm/cuvmm/cuda"
	"github.com/cuvmm/cuvmm/handles/peer"
	"github.com/cuvmm/cuvmm/internal/core"
	"github.com/cuvmm/cuvmm/internal/errs"
	"github.com/cuvmm/cuvmm/internal/exchange"
	"github.com/cuvmm/cuvmm/internal/fd"
	"github.com/cuvmm/cuvmm/internal/share"
	"github.com/cuvmm/cuvmm/internal/wire"
	"github.com/cuvmm/cuvmm/vmm"
)

// ReceiveBuffer waits for memory that the peer shares with [SendBuffer], and
// maps it for the device as one contiguous range, whatever its chunks. The
// memory may lie on another device, if d can reach that (otherwise
// cuda.ErrNotSupported). ReceiveBuffer checks what the peer declares, first by itself
// and then against the memory. If it does not fit, ReceiveBuffer returns an error,
// which the peer receives too, and keeps nothing. If the peer fails, even before it offers
// memory, ReceiveBuffer returns [peer.ErrRefused] with the reason; of several failures while
// nothing received, the last. The caller closes the buffer.
//
// The buffer has exactly the memory that was shared: it can be clipped and moved, and
// grows only within that memory. Memory that is received twice is mapped twice, at two
// addresses: see package vmm.
func ReceiveBuffer(ctx context.Context, c *peer.Conn, d *cuda.Device, o ImportOptions) (*vmm.Buffer, error) {
	return receiveBuffer(ctx, "handles.ReceiveBuffer", c, d, o, Descriptor{Kind: BufferKind}, func(*vmm.Buffer) error { return nil })
}

// ReceiveArray waits for memory that the peer shares with [SendArray], of
// elements of the same type and size (otherwise [ErrMismatch]). In all else it is
// like ReceiveBuffer.
func ReceiveArray[T any](ctx context.Context, c *peer.Conn, d *cuda.Device, o ImportOptions) (a *vmm.Array[T], err error) {
	e, size := ElementOf[T]()
	want := Descriptor{Kind: ArrayKind, Element: e, ElementSize: size}
	_, err = receiveBuffer(ctx, "handles.ReceiveArray", c, d, o, want, func(b *vmm.Buffer) (err error) {
		a, err = vmm.ArrayOf[T](b)
		return err
	})
	if err != nil {
		return nil, err
	}
	return a, nil
}

// receiveBuffer receives a run of chunks. It calls use with the buffer before it tells
// the peer that the memory is mapped.
func receiveBuffer(ctx context.Context, op string, c *peer.Conn, d *cuda.Device, o ImportOptions, want Descriptor, use func(*vmm.Buffer) error) (*vmm.Buffer, error) {
	return receive(ctx, op, c, d, o, want, func(i *importing) (*vmm.Buffer, error) {
		b, err := i.Buffer(share.ImportOptions{Length: i.length, Hint: o.Hint, Align: o.Align, Name: o.Name})
		if err != nil {
			return nil, err
		}
		if err := use(b); err != nil {
			return nil, share.Of(b).Abandon(op, err)
		}
		return b, nil
	})
}

// importing is offered memory while it is being imported.
type importing struct {
	*exchange.Importer
	length uint64 // in use, in bytes
}

// receive receives one transfer. build makes the buffer of the imported chunks.
func receive(ctx context.Context, op string, c *peer.Conn, d *cuda.Device, o ImportOptions, want Descriptor,
	build func(*importing) (*vmm.Buffer, error)) (*vmm.Buffer, error) {
	if core.SystemOf(d) == nil {
		return nil, errs.PeerInvalid(op, "a nil device", "take one from System.Devices")
	}
	if err := exchange.CheckBounds(op, o.MaxBytes, o.MaxChunks, o.Align); err != nil {
		return nil, err
	}
	in, err := connOf(op, c)
	if err != nil {
		return nil, err
	}
	defer in.Release()
	return in.receive(ctx, op, d, o, want, build)
}

func (c conn) receive(ctx context.Context, op string, d *cuda.Device, o ImportOptions, want Descriptor,
	build func(*importing) (*vmm.Buffer, error)) (*vmm.Buffer, error) {
	if err := c.turn(ctx, op, c.taking); err != nil {
		return nil, err
	}
	defer c.taking.Give()
	t, err := c.nextOffer(ctx, op)
	if err != nil {
		return nil, err
	}
	got, err := c.accept(ctx, op, t, d, o, want, build)
	if err == nil {
		err = c.confirm(ctx, op, t)
	}
	t.close()
	// Later messages of the transfer are dropped.
	c.mu.Lock()
	c.endLocked(t)
	ended := t.last
	c.unlock()
	if err == nil {
		return got, nil
	}
	if !ended {
		_ = c.tell(ctx, op, failed(wire.Declined, t.number, err))
	}
	if got != nil {
		err = share.Of(got).Abandon(op, err)
	}
	return nil, err
}

// nextOffer waits for an offer, and takes it. If it was withdrawn nextOffer returns the reason,
// even if the connection has ended since.
func (c conn) nextOffer(ctx context.Context, op string) (*transfer, error) {
	err := c.Await(ctx, op, c.waiting)
	if err == nil {
		err = c.Drain(ctx, op)
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	if m := c.in.refused; m != nil {
		c.in.refused = nil
		return nil, m.err(op)
	}
	if err != nil {
		return nil, err
	}
	t := c.offeredLocked()
	t.taken = true
	return t, nil
}

// accept checks, imports and maps the offered memory.
func (c conn) accept(ctx context.Context, op string, t *transfer, d *cuda.Device, o ImportOptions, want Descriptor,
	build func(*importing) (*vmm.Buffer, error)) (*vmm.Buffer, error) {
	var declared Descriptor
	if err := declared.UnmarshalBinary(t.offer.rest); err != nil {
		return nil, err
	}
	if declared.Kind != want.Kind || declared.Element != want.Element || declared.ElementSize != want.ElementSize {
		return nil, errs.Peer(op, ErrMismatch, fmt.Sprintf("the peer offers %s, where %s is received", declared.what(), want.what()),
			"receive what the peer sends: a buffer, or an array of the same elements")
	}
	in, err := newImporter(op, d, &declared, o)
	if err != nil {
		return nil, err
	}
	i := &importing{in, declared.bytes()}
	if err := c.takeAll(ctx, op, t, i, partsOf(declared.Handle)); err != nil {
		return nil, i.Discard(err)
	}
	got, err := build(i)
	if err != nil {
		return nil, i.Discard(err)
	}
	return got, nil
}

// takeAll imports the chunks as they arrive.
func (c conn) takeAll(ctx context.Context, op string, t *transfer, i *importing, kind uint16) error {
	for i.Chunks() < i.Declared() {
		if i.Chunks() > 0 {
			if err := c.Send(ctx, op, message{kind: wire.Taken, transfer: t.number, count: uint32(i.Chunks())}.pack()); err != nil {
				return err
			}
		}
		part, err := c.awaitOwed(ctx, op, "further chunk", &t.parts, &c.in.spinner)
		if err != nil {
			return err
		}
		switch {
		case part.kind == wire.Withdrawn:
			err = part.err(op)
		case part.lost():
			err = errs.FilesLost(fmt.Sprintf("file descriptors of chunks from %d on were dropped", part.count))
		case part.count != uint32(i.Chunks()):
			err = errs.Violation("chunks from %d on, where %d is the next", part.count, i.Chunks())
		case part.kind != kind:
			err = errs.Violation("a message of kind %#x, where memory of those handle types comes in %#x", part.kind, kind)
		case kind == wire.Fabric:
			err = i.TakeFabric(part.fabric)
		default:
			err = i.Receive(part.fds)
		}
		// Imported or refused, the driver needs the descriptors no longer.
		if c.spend(t, part.fds); err != nil {
			return err
		}
	}
	return nil
}

// spend keeps imported descriptors for closeSpent, or closes them if this process has many
// open. Closing a chunk's last descriptor takes the kernel as long as an import, so it
// happens after the sender knows that its memory is mapped.
func (c conn) spend(t *transfer, fds []*peer.FD) {
	t.spent = append(t.spent, fds...)
	if limit, err := fd.Limit(); err != nil || uint64(peer.OpenFDs()) > limit/exchange.Share {
		t.close()
	}
}

// fewSpent is how many descriptors are closed in the time that the confirmation takes.
const fewSpent = 4

// closeSpent closes the spent descriptors: many on another goroutine, which the
// connection's Close waits for.
func (c conn) closeSpent(t *transfer) {
	spent := t.spent
	if len(spent) <= fewSpent || !c.Acquire() {
		t.close()
		return
	}
	t.spent = nil
	go func() {
		defer c.Release()
		_ = peer.CloseAll(spent)
	}()
}

// close closes the spent descriptors.
func (t *transfer) close() {
	_ = peer.CloseAll(t.spent)
	t.spent = nil
}

// confirm tells the sender that its memory is mapped, and waits for the confirmation.
func (c conn) confirm(ctx context.Context, op string, t *transfer) error {
	c.mu.Lock()
	t.mapped = true
	c.mu.Unlock()
	if err := c.Send(ctx, op, message{kind: wire.Mapped, transfer: t.number}.pack()); err != nil {
		return err
	}
	c.closeSpent(t)
	part, err := c.awaitOwed(ctx, op, "confirmation", &t.parts, &c.in.spinner)
	if err != nil {
		return err
	}
	part.close()
	switch part.kind {
	case wire.Confirmed:
		return nil
	case wire.Withdrawn:
		return part.err(op)
	}
	return c.Fail(errs.Violation("more chunks of transfer %d, which has them all", t.number))
}

// what names the kind and the elements.
func (d *Descriptor) what() string {
	if d.Kind == ArrayKind {
		return fmt.Sprintf("an array of %v, of %s each", d.Element, errs.Count(d.ElementSize, "byte"))
	}
	return "a buffer"
}
