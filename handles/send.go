package handles

import (
	"context"
	"crypto/sha256"
	"encoding/binary"
	"errors"
	"time"

	"github.com/cuvmm/cuvmm/handles/peer"
	"github.com/cuvmm/cuvmm/internal/core"
	"github.com/cuvmm/cuvmm/internal/driver"
	"github.com/cuvmm/cuvmm/internal/errs"
	"github.com/cuvmm/cuvmm/internal/exchange"
	"github.com/cuvmm/cuvmm/internal/peererr"
	"github.com/cuvmm/cuvmm/internal/phys"
	"github.com/cuvmm/cuvmm/internal/share"
	"github.com/cuvmm/cuvmm/internal/wire"
	"github.com/cuvmm/cuvmm/vmm"
)

// SendBuffer shares a buffer's bytes in use with the peer, which takes them with
// [ReceiveBuffer]. It returns when the peer has mapped them, or has said why not
// ([peer.ErrRefused]); the peer must take the offer, and then go on, within
// Options.Timeout. The connection can be used after an error, unless that says
// that the connection is over.
//
// Both processes use the same physical memory from then on. It lives until both
// have closed it, so the buffer may be closed at once, and what is sent does not
// change with the buffer: memory that it takes later is not the peer's, and what
// it clips the peer still has. Any holder may read and write the memory for ever, and
// pass it on if it took it with ImportOptions.KeepDescriptors. Work on the two sides is to be ordered by messages, or
// otherwise.
//
// After an error the peer does not keep the memory, unless the connection ended
// just then. Memory that was created with no handle type cannot be shared
// (cuda.ErrNotSupported): see vmm.Properties.Handles. Memory that has a fabric
// handle goes by that. Where the peer's driver does not take it, and the memory
// has a descriptor too, it goes by descriptor, of which both sides' logs and
// [TransfersOf] tell; without a descriptor it is refused.
func SendBuffer(ctx context.Context, c *peer.Conn, b *vmm.Buffer) error {
	const op = "handles.SendBuffer"
	if b == nil {
		return peererr.Invalid(op, "a nil buffer", "make one with vmm.NewBuffer")
	}
	return sendMemory(ctx, op, c, b, Descriptor{Kind: BufferKind}, 1)
}

// SendArray shares an array's elements in use with the peer, which takes them
// with [ReceiveArray] of the same type; otherwise it is SendBuffer.
func SendArray[T any](ctx context.Context, c *peer.Conn, a *vmm.Array[T]) error {
	const op = "handles.SendArray"
	if a == nil {
		return peererr.Invalid(op, "a nil array", "make one with vmm.NewArray")
	}
	e, size := ElementOf[T]()
	return sendMemory(ctx, op, c, a.Buffer(), Descriptor{Kind: ArrayKind, Element: e, ElementSize: uint32(size)}, uint64(size))
}

// SendAllocation shares physical memory with the peer, which takes it with
// [ReceiveAllocation]; otherwise it is SendBuffer.
func SendAllocation(ctx context.Context, c *peer.Conn, a *vmm.Allocation) error {
	const op = "handles.SendAllocation"
	if a == nil {
		return peererr.Invalid(op, "a nil allocation", "make one with vmm.Create")
	}
	h, open := phys.Use(a)
	if !open {
		return errs.ClosedError(op, "allocation")
	}
	v := share.View{Chunks: []share.Chunk{{Handle: h}}}
	d := Descriptor{Kind: AllocationKind, Length: h.Size}
	err := sendView(ctx, op, c, d, h.System(), h.Asked, h.Imported, v)
	return errors.Join(err, v.Release())
}

// sendMemory sends what a buffer has in use, in elements of so many bytes.
func sendMemory(ctx context.Context, op string, c *peer.Conn, b *vmm.Buffer, d Descriptor, element uint64) error {
	in := share.Of(b)
	used := in.Used()
	v, err := in.View(op, used)
	if err != nil {
		return err
	}
	d.Length = used / element
	about := in.About()
	err = sendView(ctx, op, c, d, core.SystemOf(b.Device()), about.Asked, about.Imported, v)
	return errors.Join(err, v.Release())
}

func sendView(ctx context.Context, op string, c *peer.Conn, d Descriptor, on *core.System, asked driver.AllocationProp, imported bool, v share.View) error {
	handles := make([]*phys.Handle, len(v.Chunks))
	for i, ch := range v.Chunks {
		handles[i] = ch.Handle
	}
	var size uint64
	for _, h := range handles {
		size += h.Size
	}
	if err := phys.Exportable(op, driver.HandlePosixFD|driver.HandleFabric, asked, imported, size); err != nil {
		return err
	}
	if err := describe(op, &d, on, asked, handles); err != nil {
		return err
	}
	in, err := connOf(op, c)
	if err != nil {
		return err
	}
	defer in.Release()
	if err := in.turn(ctx, op, in.offering); err != nil {
		return err
	}
	defer in.offering.Give()
	return in.offer(ctx, op, identify(handles), &d, handles)
}

// identify names memory in this process's terms. Handles are numbered once in
// the life of a process, so other memory never has the same name.
func identify(handles []*phys.Handle) (who identity) {
	sum := sha256.New()
	for _, h := range handles {
		_, _ = sum.Write(binary.LittleEndian.AppendUint64(nil, h.ID))
	}
	copy(who[:], sum.Sum(nil))
	return who
}

// offer runs a transfer as its sender. The caller has the slot for offering.
func (c conn) offer(ctx context.Context, op string, who identity, d *Descriptor, chunks []*phys.Handle) error {
	b := c.transfers
	b.mu.Lock()
	b.out.begun++
	t := b.out.begun
	b.mu.Unlock()
	defer func() {
		b.mu.Lock()
		b.out.ended, b.out.answers = t, nil
		b.mu.Unlock()
	}()
	m, err := offerMessage(t, who, d)
	if err == nil {
		err = c.Send(ctx, op, m)
	}
	if err != nil {
		b.mu.Lock()
		b.out.begun-- // the peer never heard of it
		t = b.out.ended
		b.mu.Unlock()
		return err
	}
	// under are the counts of chunks that the peer has still to acknowledge.
	sent, under, done := 0, []int(nil), false
	by := c.begin(d.Handle)
	for err == nil && !done {
		if err = c.Drain(ctx, op); err != nil {
			break
		}
		if sent == len(chunks) || len(under) == by.window() || c.answeredAlready() {
			before := len(under)
			if under, done, err = c.answered(ctx, op, under, &by); by.restart {
				sent, by.restart = 0, false
			} else if len(under) < before {
				by.settled = true
			}
			continue
		}
		var n int
		if n, err = c.sendChunks(ctx, op, t, by.way, sent, chunks[sent:]); err == nil {
			sent += n
			under = append(under, sent)
		}
	}
	switch {
	case done:
		c.carried.note(&c.carried.sent, by, c.Limits().Log, "sent")
		return c.tell(ctx, op, transferMessage(wire.Confirmed, t))
	case !errors.Is(err, peer.ErrRefused):
		_ = c.tell(ctx, op, reasonMessage(wire.Withdrawn, t, err))
	}
	return err
}

// sendChunks exports and sends the first of the chunks that are left, and
// returns how many.
func (c conn) sendChunks(ctx context.Context, op string, t uint32, way vmm.HandleTypes, sent int, left []*phys.Handle) (int, error) {
	if way == vmm.Fabric {
		left = left[:min(len(left), wire.MaxBatch)]
		m := countMessage(wire.Fabric, t, sent)
		for _, h := range left {
			f, err := h.ExportFabric(op)
			if err != nil {
				return 0, err
			}
			m.Body = append(m.Body, f[:]...)
		}
		return len(left), c.Send(ctx, op, m)
	}
	e, err := exchange.Some(ctx, op, left, c.Limits().Timeout)
	if err != nil {
		return 0, err
	}
	defer e.Close()
	m := countMessage(wire.Chunks, t, sent)
	m.FDs = e.FDs
	return len(e.FDs), c.Send(ctx, op, m)
}

// answeredAlready reports whether the peer has said something: it refuses, or
// has the memory already, so that no more need be exported.
func (c conn) answeredAlready() bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	return len(c.out.answers) > 0
}

// answered waits for the next reply of the peer, to messages that so many
// chunks have been sent with.
func (c conn) answered(ctx context.Context, op string, under []int, by *handleNegotiation) (left []int, done bool, err error) {
	m, err := c.awaitOwed(ctx, op, "answer", &c.out.answers, &c.out.spinner)
	switch {
	case err != nil:
		return under, false, err
	case m.Kind == wire.Declined:
		return under, false, reasonOf(op, m)
	case m.Kind == wire.Mapped:
		// Perhaps before it was sent all: it has that memory already.
		return nil, true, nil
	case m.Kind == wire.Taken && len(under) > 0 && countOf(m) == uint32(under[0]):
		return under[1:], false, nil
	case m.Kind == wire.ByFD && by.downgrade(textOf(m)):
		return nil, false, nil
	}
	return under, false, c.Fail(peererr.Violation("answer %d out of turn", m.Kind))
}

// tellWait bounds how long the end of a transfer is told to a peer that does not
// read.
const tellWait = time.Second

// tell sends what the peer should know even though the caller's context may
// have ended. A peer that cannot be told runs into its own limit.
func (c conn) tell(ctx context.Context, op string, m peer.Message) error {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), min(tellWait, c.Limits().Timeout))
	defer cancel()
	return c.Send(ctx, op, m)
}

// describe fills in what a descriptor says of memory.
func describe(op string, d *Descriptor, on *core.System, asked driver.AllocationProp, chunks []*phys.Handle) error {
	m, err := exchange.Describe(op, on, asked, chunks)
	d.Location, d.Device, d.Handle, d.Compressible, d.RDMA, d.Chunks = m.Location, m.Device, m.Handle, m.Compressible, m.RDMA, m.Chunks
	d.Exporter = Self()
	return err
}
