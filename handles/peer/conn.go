package peer

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"io"
	"os"
	"sync"
	"time"

	"github.com/cuvmm/cuvmm/internal/errs"
	"github.com/cuvmm/cuvmm/internal/life"
	"github.com/cuvmm/cuvmm/internal/link"
	"github.com/cuvmm/cuvmm/internal/sock"
	"github.com/cuvmm/cuvmm/internal/wait"
	"github.com/cuvmm/cuvmm/internal/wire"
)

// Conn is a connection to another process, which carries messages with file
// descriptors. It sends one message and receives one at a time; all methods are
// safe for concurrent use. The caller closes it.
//
// Every wait ends with its context. The peer must greet, and finish a message that it
// has begun, within Options.Timeout. After that, and after any other violation of the
// protocol, the connection is closed, and every later call returns the same error.
type Conn struct {
	linked
	sock   *sock.Conn
	peer   Credentials
	known  bool
	limits link.Limits
	closer life.Closer

	sending, receiving wait.Slot
	mailbox            mailbox
	out                outbound // of the goroutine that sends
	in                 inbound  // of the goroutine that receives
	// owes is the time that the peer has left for the greeting or the message that it has
	// begun.
	owes    time.Duration
	warning wait.Spinner // of the goroutine that receives
	buf     []byte
	greeted chan struct{}

	mu     sync.Mutex
	failed error
	over   chan struct{} // closed when failed is set, and by Close
}

// linked lets the packages above reach the inner state.
type linked = link.Holder[link.Conn[Message]]

// newConn greets the peer. That does not block, since the buffer of a new connection
// is empty, unless another process filled that of an inherited one.
func newConn(s *sock.Conn, o Options) *Conn {
	c := &Conn{sock: s, sending: wait.NewSlot(), receiving: wait.NewSlot(), greeted: make(chan struct{}), over: make(chan struct{}),
		limits: link.Limits{Timeout: o.Timeout, MaxFDs: o.MaxFDs, MayLose: func(kind uint16) bool { return kind == wire.Chunks }, Log: o.Log}}
	c.linked = link.Hold[link.Conn[Message]](inner{c})
	c.mailbox.inbox, c.mailbox.changed = link.NewInbox[Message](), make(chan struct{})
	c.in.versions, c.in.limits = ownVersions, &c.limits
	_, _ = rand.Read(c.in.own[:]) // never fails
	c.owes = o.Timeout
	_ = s.SetWriteDeadline(time.Now().Add(o.Timeout))
	// An error is left to the first Receive: a peer that is gone may have given a reason.
	_ = s.Send(greeting(c.in.own, c.in.versions), nil)
	c.out.sequence = 1
	return c
}

// Peer returns the credentials of the process at the other end. known is false for a
// socketpair, whose credentials prove nothing.
func (c *Conn) Peer() (p Credentials, known bool) { return c.peer, c.known }

// fail ends the connection for good, and tells the peer why unless it is gone or refused
// itself. It returns the first reason.
func (c *Conn) fail(err error) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.failed != nil {
		return c.failed
	}
	select {
	case <-c.over: // Close was first
		return err
	default:
	}
	c.failed = err
	if !errors.Is(err, ErrGone) && !errors.Is(err, ErrRefused) && c.sending.Within(refusalWait) {
		var to nonce
		select {
		case <-c.greeted:
			to = c.out.peer
		default:
		}
		refuse(c.sock, to, c.out.sequence, err.Error())
		c.sending.Give()
	}
	close(c.over) // first, for the goroutines that the socket's end wakes
	c.sock.Shutdown()
	return err
}

// refusalWait bounds how long a refusal waits for a peer that does not read, and for a
// concurrent sender.
const refusalWait = 100 * time.Millisecond

// refuse sends a refusal with its reason.
func refuse(s *sock.Conn, to nonce, sequence uint64, reason string) {
	reason = wire.Clip(reason, wire.MaxReason)
	h := header{version: firstVersion, kind: wire.Refusal, to: to, sequence: sequence, bytes: uint32(len(reason)), allBytes: uint32(len(reason))}
	_ = s.SetWriteDeadline(time.Now().Add(refusalWait))
	_ = s.Send(append(h.append(nil), reason...), nil)
}

func (c *Conn) isOver() bool {
	select {
	case <-c.over:
		return true
	default:
		return false
	}
}

// ended returns the error of a call on a connection that has ended.
func (c *Conn) ended(op string) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.failed != nil {
		return c.failed
	}
	return errs.PeerClosed(op, "connection")
}

// sockError ends a connection whose socket failed a receiver.
func (c *Conn) sockError(op string, err error) error {
	switch {
	case c.isOver() || wait.WasClosed(err):
		return c.ended(op)
	case errors.Is(err, io.EOF):
		return c.fail(errs.Peer(op, ErrGone, "", "connect again when it is back"))
	}
	return c.fail(errs.SystemCall(op, "", err))
}

// greet waits for the peer's greeting.
func (c *Conn) greet(ctx context.Context, op string) error {
	select {
	case <-c.greeted:
		return nil
	default:
	}
	select {
	case c.receiving <- struct{}{}:
		defer c.receiving.Give()
	case <-c.greeted:
		return nil
	case <-ctx.Done():
		return errs.PeerWait(ctx, op, "no greeting from the peer yet", "try again")
	case <-c.over:
		return c.ended(op)
	}
	return c.greetLocked(ctx, op)
}

func (c *Conn) greetLocked(ctx context.Context, op string) error {
	if c.in.greeted {
		return nil
	}
	if _, err := c.packet(ctx, op, true); err != nil {
		return err
	}
	c.out.peer, c.out.version, c.out.optional = c.in.peer, c.in.version, c.in.optional // senders read them after greeted
	close(c.greeted)
	return nil
}

// packet receives one packet, within a limit if the peer owes it. The caller
// has the slot.
func (c *Conn) packet(ctx context.Context, op string, owed bool) (*Message, error) {
	if c.buf == nil {
		// One byte longer than any packet, to notice one that is too long.
		c.buf = make([]byte, packetHeader+packetBody+1)
	}
	var n int
	var numbers []int
	var lost bool
	var limit time.Time
	began := time.Now()
	if owed {
		limit = began.Add(c.owes)
	}
	err := wait.Until(ctx, limit, c.sock.SetReadDeadline, func() (err error) {
		n, numbers, lost, err = c.sock.Receive(c.buf)
		return err
	})
	if owed {
		c.owes -= time.Since(began)
	}
	var fds []*FD
	for _, n := range numbers {
		fds = append(fds, received(n))
	}
	if err != nil {
		_ = CloseAll(fds)
		if !wait.TimedOut(err) {
			return nil, c.sockError(op, err)
		}
		if ctx.Err() != nil {
			return nil, errs.PeerWait(ctx, op, "", "try again: nothing was lost")
		}
		return nil, c.fail(errs.PeerCause(err, op, ErrTimeout, fmt.Sprintf("the peer did not finish what it owes within %v", c.limits.Timeout),
			"see what it waits for, or raise Options.Timeout"))
	}
	if c.isOver() { // the packet was in the queue when the connection ended
		_ = CloseAll(fds)
		return nil, c.ended(op)
	}
	m, err := c.in.receive(c.buf[:n], fds, lost)
	if err != nil {
		return nil, c.fail(err)
	}
	return m, nil
}

// Receive waits for the next message of the program. Its file descriptors belong to
// the caller. If the context ends nothing is lost: the next
// Receive goes on where this one stopped. Receive does not return memory that the peer
// sends (handles.SendBuffer).
func (c *Conn) Receive(ctx context.Context) (m Message, err error) {
	if !c.closer.Acquire() {
		return Message{}, errs.PeerClosed(errs.OpReceive, "connection")
	}
	defer c.closer.Release()
	err = c.await(ctx, errs.OpReceive, func() (ok bool) {
		m, ok = c.mailbox.takeProgram()
		return ok
	})
	return m, err
}

func (c *Conn) notTaken(ctx context.Context, op string) error {
	select {
	case <-c.over:
		return c.ended(op)
	default:
		return errs.PeerWait(ctx, op, "another goroutine was at it", "try again")
	}
}

// Send sends a message and returns once the system has all of it; the peer may not have
// read it yet. The body and the file descriptors stay
// the caller's. If the context ends after part of the message was sent, the connection is
// closed.
func (c *Conn) Send(ctx context.Context, m Message) error {
	const op = "peer.Conn.Send"
	switch {
	case m.Kind < 1 || m.Kind > MaxKind:
		return errs.PeerInvalid(op, fmt.Sprintf("a message of kind %d", m.Kind), fmt.Sprintf("use 1 to %d", MaxKind))
	}
	return c.transmit(ctx, op, m, 0)
}

// transmit sends a message of any kind. With a timeout it returns ErrTimeout if it could
// send nothing in that time, and the connection goes on.
func (c *Conn) transmit(ctx context.Context, op string, m Message, timeout time.Duration) error {
	switch {
	case len(m.Body) > MaxBody:
		return errs.Peer(op, ErrTooLarge, fmt.Sprintf("%d bytes, where %d is the most", len(m.Body), MaxBody), "send several messages")
	case len(m.FDs) > MaxFDs:
		return errs.Peer(op, ErrTooLarge, fmt.Sprintf("%d file descriptors, where %d is the most", len(m.FDs), MaxFDs), "send several messages")
	}
	if !c.closer.Acquire() {
		return errs.PeerClosed(op, "connection")
	}
	defer c.closer.Release()
	if ctx.Err() != nil {
		return errs.PeerWait(ctx, op, "", "nothing was sent")
	}
	numbers := make([]int, len(m.FDs))
	for i, f := range m.FDs {
		if err := f.hold(op, fmt.Sprintf("file descriptor %d of the message", i)); err != nil {
			return err
		}
		defer f.s.closer.Release()
		numbers[i] = f.s.n
	}
	if err := c.greet(ctx, op); err != nil {
		return err
	}
	if timeout > 0 {
		if !c.sending.Within(timeout) {
			return errs.Peer(op, ErrTimeout, "another message is being sent", "try again")
		}
	} else if !c.sending.Take(ctx, c.over) {
		return c.notTaken(ctx, op)
	}
	begun, err := c.send(ctx, op, &m, numbers, timeout)
	c.sending.Give()
	if err != nil && begun && !errors.Is(err, ErrGone) {
		return c.fail(err)
	}
	// If the peer is gone, its earlier messages can still be received.
	return err
}

// send cuts the message into packets. begun reports whether at least part of it was sent.
// The caller has the slot.
func (c *Conn) send(ctx context.Context, op string, m *Message, numbers []int, timeout time.Duration) (begun bool, err error) {
	limit := time.Now().Add(c.limits.Timeout)
	if timeout > 0 {
		limit = time.Now().Add(timeout)
	}
	bytes, fds, batch := 0, 0, sock.MaxFDs
	var backoff wait.Backoff
	for !begun || bytes < len(m.Body) || fds < len(numbers) {
		p, body, with := c.out.packet(m, bytes, fds, batch)
		err = wait.Until(ctx, limit, c.sock.SetWriteDeadline, func() error { return c.sock.Send(p, numbers[fds:fds+with]) })
		if sock.TooManyInFlight(err) {
			// The limit of descriptors in flight is that of the user, over all
			// processes, until the receivers take them.
			batch = max(1, with/2)
			if backoff.Sleep(ctx, limit) {
				continue
			}
			if !begun && ctx.Err() == nil {
				return false, errs.PeerCause(err, op, ErrOpenFiles, "too many file descriptors of this user are in flight, not yet read by their receivers",
					"end the processes that do not read, or raise the limit of open files (ulimit -n)")
			}
			err = os.ErrDeadlineExceeded
		}
		switch {
		case err == nil:
		case wait.TimedOut(err):
			return begun, errs.PeerWait(ctx, op, fmt.Sprintf("%d of %s and %d of %s were sent", bytes, errs.Count(len(m.Body), "byte"), fds, errs.Count(len(numbers), "file descriptor")),
				"see what the peer waits for, or raise Options.Timeout")
		case c.isOver() || wait.WasClosed(err):
			return begun, c.ended(op)
		case errors.Is(err, io.EOF):
			return begun, errs.Peer(op, ErrGone, "", "Receive returns the peer's reason, if it gave one")
		default:
			return begun, errs.SystemCall(op, fmt.Sprintf("a packet of %d bytes and %s", len(p), errs.Count(with, "file descriptor")), err)
		}
		if timeout > 0 && !begun {
			limit = time.Now().Add(c.limits.Timeout) // a message that has begun must be finished
		}
		c.out.sequence++
		bytes, fds, begun = bytes+body, fds+with, true
	}
	return begun, nil
}

// warn implements link.Conn.
func (c *Conn) warn() {
	select {
	case <-c.greeted:
	default:
		return
	}
	if c.out.optional&takesWarnings == 0 {
		return // an older peer would take it for a violation
	}
	if !c.sending.Try() {
		return // the message that is being sent wakes the peer
	}
	defer c.sending.Give()
	if p, _, _ := c.out.packet(&Message{Kind: wire.Warning}, 0, 0, 0); c.sock.SendNow(p) {
		c.out.sequence++
	}
}

// Close ends the connection and every call that waits on it. Messages that were sent and
// not yet received still arrive. Idempotent.
func (c *Conn) Close() error {
	c.closer.Life.Close()
	c.mu.Lock()
	select {
	case <-c.over:
	default:
		close(c.over)
		c.sock.Shutdown()
	}
	c.mu.Unlock()
	return c.closer.Close(func() error {
		c.in.discard()
		c.mailbox.discard()
		_ = c.sock.Close()
		return nil
	})
}
