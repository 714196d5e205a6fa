package handles

import (
	"context"
	"errors"
	"strconv"
	"time"

	"github.com/cuvmm/cuvmm/cuda"
	"github.com/cuvmm/cuvmm/handles/peer"
	"github.com/cuvmm/cuvmm/internal/core"
	"github.com/cuvmm/cuvmm/internal/driver"
	"github.com/cuvmm/cuvmm/internal/errs"
	"github.com/cuvmm/cuvmm/internal/exchange"
	"github.com/cuvmm/cuvmm/internal/phys"
	"github.com/cuvmm/cuvmm/internal/share"
	"github.com/cuvmm/cuvmm/internal/wire"
	"github.com/cuvmm/cuvmm/vmm"
)

// SendBuffer shares a buffer's bytes in use with the peer, which receives them with
// [ReceiveBuffer]. It returns when the peer has mapped them or refused them
// ([peer.ErrRefused], with the reason). The peer must reply to each message within
// Options.Timeout. After an error the connection can be used on, unless the error says
// that the connection has ended.
//
// From then on both processes use the same physical memory. It lives until both
// have closed it, so the buffer may be closed at once. What was sent does not
// change with the buffer: the peer does not get memory that the buffer takes later, and
// keeps memory that the buffer clips. Any holder may read and write the memory
// indefinitely, and can pass it on if it was received with
// ImportOptions.KeepDescriptors. The two sides order their work themselves, by messages
// for example.
//
// After an error the peer does not keep the memory, unless the connection ended
// just then. The call that receives returns the error's text, too, even if the memory
// could not be offered. Memory that was created without a handle type cannot be shared
// (cuda.ErrNotSupported): see vmm.Properties.Handles. Memory travels by descriptor if it
// has that handle type, otherwise by fabric handle.
func SendBuffer(ctx context.Context, c *peer.Conn, b *vmm.Buffer) error {
	const op = "handles.SendBuffer"
	if b == nil {
		return errs.PeerInvalid(op, "a nil buffer", "make one with vmm.NewBuffer")
	}
	return sendMemory(ctx, op, c, b, Descriptor{Kind: BufferKind}, 1)
}

// SendArray shares an array's elements in use with the peer, which receives them
// with [ReceiveArray] of the same type. In all else it is like SendBuffer.
func SendArray[T any](ctx context.Context, c *peer.Conn, a *vmm.Array[T]) error {
	const op = "handles.SendArray"
	if a.Buffer() == nil {
		return errs.PeerInvalid(op, "a nil or zero array", "make one with vmm.NewArray")
	}
	e, size := ElementOf[T]()
	return sendMemory(ctx, op, c, a.Buffer(), Descriptor{Kind: ArrayKind, Element: e, ElementSize: size}, uint64(size))
}

// sendMemory sends a buffer's memory in use. element is the size of an element in bytes.
func sendMemory(ctx context.Context, op string, c *peer.Conn, b *vmm.Buffer, d Descriptor, element uint64) error {
	from := share.Of(b)
	if from == nil {
		return errs.PeerInvalid(op, "a zero buffer", "make one with vmm.NewBuffer")
	}
	in, err := connOf(op, c)
	if err != nil {
		return err
	}
	defer in.Release()
	used, v, err := inUse(op, from)
	if err != nil {
		return in.refuse(ctx, op, err)
	}
	d.Length = int(used / element)
	about := from.About()
	to, known := c.Peer()
	how := "sent over a connection"
	if known {
		how = "sent to process " + strconv.Itoa(to.PID)
	}
	now := time.Now()
	for _, ch := range v.Chunks {
		ch.Handle.NoteSent(how, now)
	}
	err = in.sendView(ctx, op, d, core.SystemOf(b.Device()), about.Asked, about.Imported, v)
	return released(err, v)
}

// inUse returns how many bytes of a buffer are in use, and their chunks. It refuses memory that a broker keeps.
func inUse(op string, m share.Memory) (n uint64, v share.View, err error) {
	if m.About().Kept {
		return 0, v, errs.Peer(op, cuda.ErrNotPermitted, "memory that a broker keeps, and gives to another process after this one",
			"publish it: see Client.Keep in package broker")
	}
	n = m.Used()
	v, err = m.View(op, n)
	return n, v, err
}

// released gives up what was sent, and returns the error of sending it. The peer has
// memory that was sent, so what cannot be released then is no error: the reclaimer
// retries it, and System.Drain returns what fails again.
func released(err error, v share.View) error {
	if left := v.Release(); err != nil {
		return errors.Join(err, left)
	}
	return nil
}

func (c conn) sendView(ctx context.Context, op string, d Descriptor, on *core.System, asked driver.AllocationProp, imported bool, v share.View) error {
	handles := make([]*phys.Handle, len(v.Chunks))
	for i, ch := range v.Chunks {
		handles[i] = ch.Handle
	}
	var size uint64
	for _, h := range handles {
		size += h.Size
	}
	err := phys.Exportable(op, driver.HandlePosixFD|driver.HandleFabric, asked, imported, size)
	if err == nil {
		err = describe(op, &d, on, asked, handles)
	}
	if err == nil {
		err = c.turn(ctx, op, c.offering)
	}
	if err != nil {
		return c.refuse(ctx, op, err)
	}
	defer c.offering.Give()
	return c.offerHandles(ctx, op, &d, handles)
}

// refuse tells the peer why nothing is offered, and returns the reason: the receiver that
// waits, or else the next one, returns it. A sender whose context ends while another one has
// the connection says nothing.
func (c conn) refuse(ctx context.Context, op string, reason error) error {
	if !c.offering.Try() && c.turn(ctx, op, c.offering) != nil {
		return reason
	}
	defer c.offering.Give()
	t := c.begin()
	defer c.end()
	return c.withdrawUnoffered(ctx, op, t, reason)
}

// withdrawUnoffered withdraws a transfer that was not offered, and returns the reason.
func (c conn) withdrawUnoffered(ctx context.Context, op string, t uint32, reason error) error {
	if err := c.tell(ctx, op, failed(wire.Withdrawn, t, reason)); err != nil {
		c.mu.Lock()
		c.out.begun-- // the peer never heard of it
		c.mu.Unlock()
	}
	return reason
}

// begin spends the number of the next transfer. The caller has the slot offering.
func (c conn) begin() uint32 {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.out.begun++
	return c.out.begun
}

// end has later replies to the transfer dropped.
func (c conn) end() {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.out.ended, c.out.replies = c.out.begun, nil
}

// offerHandles is offer for memory of this process.
func (c conn) offerHandles(ctx context.Context, op string, d *Descriptor, chunks []*phys.Handle) error {
	kind := partsOf(d.Handle)
	return c.offer(ctx, op, d, func(ctx context.Context, t uint32, sent int) (int, error) {
		return c.sendChunks(ctx, op, t, kind, sent, chunks[sent:])
	})
}

// offer runs a transfer as its sender. send sends some of the chunks behind those that were sent, and
// returns how many. The caller has the slot offering.
func (c conn) offer(ctx context.Context, op string, d *Descriptor, send func(ctx context.Context, t uint32, sent int) (int, error)) error {
	t := c.begin()
	defer c.end()
	b, err := d.MarshalBinary()
	if err == nil {
		err = c.Send(ctx, op, message{kind: wire.Offer, transfer: t, rest: b}.pack())
	}
	if err != nil {
		return c.withdrawUnoffered(ctx, op, t, err)
	}
	// under are the counts of chunks that the peer has yet to acknowledge.
	sent, under, done := 0, []int(nil), false
	for err == nil && !done {
		if err = c.Drain(ctx, op); err != nil {
			break
		}
		if sent == len(d.Chunks) || len(under) == chunkWindow || c.replied() {
			under, done, err = c.nextReply(ctx, op, sent == len(d.Chunks), under)
			continue
		}
		var n int
		if n, err = send(ctx, t, sent); err == nil {
			sent += n
			under = append(under, sent)
		}
	}
	if errors.Is(err, peer.ErrGone) {
		err = c.lastWords(ctx, op, err)
	}
	switch {
	case done:
		return c.tell(ctx, op, message{kind: wire.Confirmed, transfer: t})
	case !errors.Is(err, peer.ErrRefused):
		_ = c.tell(ctx, op, failed(wire.Withdrawn, t, err))
	}
	return err
}

// partsOf returns the kind of message that brings memory of these handle types: both ends
// are on one host, so a descriptor reaches any receiver.
func partsOf(types vmm.HandleTypes) uint16 {
	if types&vmm.PosixFD != 0 {
		return wire.Chunks
	}
	return wire.Fabric
}

// sendChunks exports and sends the first of the remaining chunks, and returns how many.
func (c conn) sendChunks(ctx context.Context, op string, t uint32, kind uint16, sent int, left []*phys.Handle) (int, error) {
	m := message{kind: kind, transfer: t, count: uint32(sent)}
	if kind == wire.Fabric {
		left = left[:min(len(left), wire.MaxBatch)]
		for _, h := range left {
			f, err := h.ExportFabric(op)
			if err != nil {
				return 0, err
			}
			m.fabric = append(m.fabric, cuda.FabricHandle(f))
		}
		return len(left), c.Send(ctx, op, m.pack())
	}
	fds, err := c.exports.OpenSome(ctx, op, left, c.Limits().Timeout)
	if err != nil {
		return 0, err
	}
	defer c.exports.Close(fds)
	m.fds = fds
	return len(fds), c.Send(ctx, op, m.pack())
}

// replied reports whether a reply has come: the peer may have declined, so that nothing
// more needs to be exported.
func (c conn) replied() bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	return len(c.out.replies) > 0
}

// nextReply waits for the peer's next reply, and returns the counts of under that are
// left. all is whether all chunks were sent.
func (c conn) nextReply(ctx context.Context, op string, all bool, under []int) (left []int, done bool, err error) {
	m, err := c.awaitOwed(ctx, op, "reply", &c.out.replies, &c.out.spinner)
	switch {
	case err != nil:
		return under, false, err
	case m.kind == wire.Declined:
		return under, false, m.err(op)
	case m.kind == wire.Mapped && all && len(under) <= 1:
		return nil, true, nil
	case m.kind == wire.Taken && len(under) > 0 && m.count == uint32(under[0]):
		return under[1:], false, nil
	}
	return under, false, c.Fail(errs.Violation("reply %#x out of turn", m.kind))
}

// lastWords returns why the peer declined if it did and then went, and the error otherwise: a
// message that it sent can be received after its end was noticed.
func (c conn) lastWords(ctx context.Context, op string, gone error) error {
	for {
		m, err := c.awaitOwed(ctx, op, "reply", &c.out.replies, &c.out.spinner)
		switch {
		case err != nil:
			return gone
		case m.kind == wire.Declined:
			return m.err(op)
		}
	}
}

// tellWait bounds how long tell waits for a peer that does not read.
const tellWait = time.Second

// tell sends the last message of a transfer even if the caller's context has ended. A
// peer that it does not reach runs into its own limit.
func (c conn) tell(ctx context.Context, op string, m message) error {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), min(tellWait, c.Limits().Timeout))
	defer cancel()
	return c.Send(ctx, op, m.pack())
}

// describe fills in a descriptor's fields about memory.
func describe(op string, d *Descriptor, on *core.System, asked driver.AllocationProp, chunks []*phys.Handle) error {
	m, err := exchange.Describe(op, on, asked, chunks)
	d.Location, d.Device, d.Handle, d.Compressible, d.RDMA, d.Chunks = m.Location, m.Device, m.Handle, m.Compressible, m.RDMA, m.Chunks
	d.Exporter = Self()
	return err
}
