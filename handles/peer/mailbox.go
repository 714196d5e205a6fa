package peer

import (
	"context"
	"sync"

	"github.com/cuvmm/cuvmm/internal/errs"
	"github.com/cuvmm/cuvmm/internal/link"
	"github.com/cuvmm/cuvmm/internal/wait"
	"github.com/cuvmm/cuvmm/internal/wire"
)

// Limits of the messages that wait for the program.
const (
	waitingMessages = 64
	waitingBytes    = 4 << 20
	waitingFDs      = 256
)

// mailbox sorts received messages: those of the program, and those of reserved kinds for
// the inbox. The goroutine that has the slot receiving fills it for all.
type mailbox struct {
	inbox link.Inbox[Message] // nil in a program without the package handles

	mu sync.Mutex
	// changed is closed and replaced at every change.
	changed chan struct{}
	// program are messages for Receive, of so many bytes and descriptors.
	program    []Message
	bytes, fds int
}

// wakeLocked wakes all goroutines that wait for a change.
func (b *mailbox) wakeLocked() {
	close(b.changed)
	b.changed = make(chan struct{})
}

// state returns a channel that the next change closes, and whether the mailbox is full, so
// that nothing further is read until the program takes a message.
func (b *mailbox) state() (changed chan struct{}, full bool) {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.changed, len(b.program) >= waitingMessages || b.bytes >= waitingBytes || b.fds >= waitingFDs
}

// put takes a message. An error is a violation of the protocol, and the message is closed
// then.
func (b *mailbox) put(m Message) error {
	keep, err := b.sort(m)
	if !keep {
		_ = m.Close() // without the lock: closing a file that the peer chose may take long
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	b.wakeLocked()
	return err
}

func (b *mailbox) sort(m Message) (keep bool, err error) {
	switch {
	case m.Kind <= MaxKind:
		b.mu.Lock()
		defer b.mu.Unlock()
		b.program = append(b.program, m)
		b.bytes, b.fds = b.bytes+len(m.Body), b.fds+len(m.FDs)
		return true, nil
	case m.Kind == wire.Warning:
		if len(m.Body)+len(m.FDs) > 0 {
			err = errs.Violation("a warning with %s and %s", errs.Count(len(m.Body), "byte"), errs.Count(len(m.FDs), "file descriptor"))
		}
		return false, err
	case b.inbox == nil:
		return false, errs.Violation("memory (a message of kind %#x), but this program does not import package handles", m.Kind)
	}
	return b.inbox.Sort(m)
}

// takeProgram takes the next message for the program.
func (b *mailbox) takeProgram() (m Message, ok bool) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if len(b.program) == 0 {
		return m, false
	}
	m = b.program[0]
	b.program = append([]Message(nil), b.program[1:]...)
	b.bytes, b.fds = b.bytes-len(m.Body), b.fds-len(m.FDs)
	b.wakeLocked()
	return m, true
}

// discard closes the messages that were not taken.
func (b *mailbox) discard() {
	b.mu.Lock()
	left := b.program
	b.program, b.bytes, b.fds = nil, 0, 0
	b.mu.Unlock()
	for _, m := range left {
		_ = m.Close()
	}
	if b.inbox != nil {
		b.inbox.Discard()
	}
}

// await waits until take returns true, and reads messages meanwhile.
func (c *Conn) await(ctx context.Context, op string, take func() bool) error {
	for {
		// Both before take, to miss no change between: what arrived before the end counts.
		over := c.isOver()
		changed, full := c.mailbox.state()
		switch {
		case take():
			return nil
		case over:
			return c.ended(op)
		}
		receiving := c.receiving
		if full {
			receiving = nil // until the program takes a message
		}
		select {
		case receiving <- struct{}{}:
		case <-changed:
			continue
		case <-ctx.Done():
			return errs.PeerWait(ctx, op, "", "try again: nothing was lost")
		case <-c.over:
			continue
		}
		// The goroutine that had the slot before may have read it.
		if take() {
			c.receiving.Give()
			return nil
		}
		err := c.read(ctx, op)
		c.receiving.Give()
		if err != nil {
			return err
		}
	}
}

// read reads one message into the mailbox. A warning counts as one: a peer may send
// nothing after it, so a caller that waits for more does so within its own limit. The
// caller has the slot.
func (c *Conn) read(ctx context.Context, op string) error {
	if err := c.greetLocked(ctx, op); err != nil {
		return err
	}
	for {
		if !c.in.begun {
			c.owes = c.limits.Timeout
		}
		m, err := c.packet(ctx, op, c.in.begun)
		if err != nil {
			return err
		}
		if m == nil {
			continue
		}
		if err := c.mailbox.put(*m); err != nil {
			return c.fail(err)
		}
		if m.Kind == wire.Warning && c.limits.Warned && wait.CanSpin() {
			c.warning.Spin(c.sock.Ready)
		}
		return nil
	}
}

// drain reads the messages that have arrived, while the mailbox has room.
func (c *Conn) drain(ctx context.Context, op string) error {
	for range waitingMessages {
		if _, full := c.mailbox.state(); full || !c.receiving.Try() {
			return nil // then another goroutine reads
		}
		var err error
		ready := c.sock.Ready()
		if ready {
			err = c.read(ctx, op)
		}
		c.receiving.Give()
		if err != nil || !ready {
			return err
		}
	}
	return nil
}
