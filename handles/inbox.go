package handles

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"

	"github.com/cuvmm/cuvmm/internal/errs"
)

// Messages of these kinds are the library's own: they carry memory, beside
// those of the program. A transfer has a number, which each side counts from 1
// for what it sends.
//
//	sender                                 receiver
//	offer -------------------------------> checks
//	chunks, or fabric -------------------> imports     (as often as needed)
//	              <--- taken (chunks so far), for each of those but the last
//	              <--- mapped
//	confirmed ---------------------------> keeps it
//
// The sender exports while the receiver checks, and goes on without being asked
// to. A receiver that has the memory already says mapped at once.
//
// Chunks travel as descriptors, or in fabric as fabric handles. A receiver whose
// driver refuses the first of those says by fd instead of taken, and the sender
// begins anew with descriptors, if the offer says that there are any.
//
// Either side ends it at any time before: the sender by withdrawn, the receiver
// by declined, both with the reason. So nobody keeps what the other believes to
// have failed, unless the connection ends in between. What of an ended transfer
// is still under way is dropped on arrival, and the connection goes on.
const (
	offerKind uint16 = MaxKind + 1 + iota
	chunksKind
	withdrawnKind
	confirmedKind
	takenKind
	mappedKind
	declinedKind
	fabricKind
	byFDKind
	// soonKind is a warning, empty and no part of a transfer: see Conn.soon.
	soonKind
	lastKind = soonKind
)

const (
	// chunkBatch is the most chunks, and so file descriptors, in a message: few
	// beside any limit of open files, and enough that a message costs little
	// beside its exports.
	chunkBatch = 64
	// chunkWindow is how many messages with chunks may be on their way: the
	// exports of one overlap with the imports of the one before.
	chunkWindow = 4
)

// What waits for the program while the library waits for something behind it.
const (
	waitingMessages = 64
	waitingBytes    = 4 << 20
	waitingFDs      = 256
)

// inbox sorts what came, each to whoever waits for it. Whoever has the slot for
// receiving fills it, for all.
type inbox struct {
	mu sync.Mutex
	// changed is closed, and made anew, when something came or was taken.
	changed chan struct{}
	// program are messages that Receive takes, of so many bytes and descriptors.
	program    []Message
	bytes, fds int
	// in is the transfer that the peer sends, out the one that this side sends.
	in  incoming
	out outgoing
	// dropped are messages that serve nobody, to be closed without the lock: to
	// close a file that the peer chose may take long.
	dropped []Message
}

// unlock gives the lock back and closes what was dropped under it.
func (b *inbox) unlock() {
	dropped := b.dropped
	b.dropped = nil
	b.mu.Unlock()
	for _, m := range dropped {
		_ = m.Close()
	}
}

// incoming is the receiver's side of transfers.
type incoming struct {
	// offered is the number of the last.
	offered uint32
	// open are those that have not ended: at most one that waits to be taken,
	// and at most one that was.
	open   []*transfer
	poller poller // of whoever takes
}

// transfer is one that the peer sends.
type transfer struct {
	number uint32
	offer  Message
	// parts came behind the offer and were not looked at yet.
	parts []Message
	// taken: somebody receives it. mapped: the sender may confirm it. last: the
	// peer has ended it.
	taken, mapped, last bool
	// by is how the memory came, once it did.
	by carriage
	// spent are descriptors that were imported, to be closed.
	spent []*FD
}

// outgoing is the sender's side of transfers.
type outgoing struct {
	begun, ended uint32
	answers      []Message
	poller       poller // of whoever offers
}

func (b *inbox) init() { b.changed = make(chan struct{}) }

// wake tells those who wait to look again. The caller has the lock.
func (b *inbox) wake() {
	close(b.changed)
	b.changed = make(chan struct{})
}

// full reports whether so much waits for the program that nothing further is
// read. The caller has the lock.
func (b *inbox) full() bool {
	return len(b.program) >= waitingMessages || b.bytes >= waitingBytes || b.fds >= waitingFDs
}

// put sorts a message in. An error says that no peer sends that now; then
// nothing of the message is left open.
func (b *inbox) put(m Message) error {
	b.mu.Lock()
	defer b.unlock()
	keep, err := b.sort(m)
	if !keep {
		b.dropped = append(b.dropped, m)
	}
	b.wake()
	return err
}

func (b *inbox) sort(m Message) (keep bool, err error) {
	if m.Kind <= MaxKind {
		b.program = append(b.program, m)
		b.bytes, b.fds = b.bytes+len(m.Body), b.fds+len(m.FDs)
		return true, nil
	}
	if m.Kind == soonKind {
		if len(m.Body)+len(m.FDs) > 0 {
			err = violation("a warning with %s and %s", errs.Count(len(m.Body), "byte"), errs.Count(len(m.FDs), "file descriptor"))
		}
		return false, err
	}
	t, err := transferOf(m)
	if err != nil {
		return false, err
	}
	switch m.Kind {
	case offerKind:
		if n := len(b.in.open); t != b.in.offered+1 || n > 0 && !b.in.open[n-1].last {
			return false, violation("offer %d behind %d, which has not ended", t, b.in.offered)
		}
		b.in.offered = t
		b.in.open = append(b.in.open, &transfer{number: t, offer: m})
		return true, nil
	case chunksKind, fabricKind, withdrawnKind, confirmedKind:
		if t > b.in.offered {
			return false, violation("part of transfer %d, which was not offered", t)
		}
		for _, tr := range b.in.open {
			if tr.number == t {
				return b.part(tr, m)
			}
		}
		return false, nil // ended, and the peer did not know yet
	default: // an answer
		switch {
		case t > b.out.begun:
			return false, violation("an answer to transfer %d, of %d", t, b.out.begun)
		case t != b.out.begun || b.out.begun == b.out.ended:
			return false, nil
		case len(b.out.answers) > 2*chunkWindow:
			return false, violation("more than %d answers to the same transfer under way", 2*chunkWindow)
		}
		b.out.answers = append(b.out.answers, m)
		return true, nil
	}
}

// part sorts in a part of an open transfer.
func (b *inbox) part(tr *transfer, m Message) (keep bool, err error) {
	switch {
	case tr.last:
		return false, violation("more of transfer %d, which the peer has ended", tr.number)
	case m.Kind == confirmedKind && !tr.mapped:
		return false, violation("transfer %d confirmed before it was mapped", tr.number)
	case m.Kind == withdrawnKind && !tr.taken:
		b.end(tr) // nobody has seen it
		return false, nil
	case len(tr.parts) > chunkWindow:
		return false, violation("more than %d parts of a transfer under way", chunkWindow)
	}
	tr.last = m.Kind != chunksKind && m.Kind != fabricKind
	tr.parts = append(tr.parts, m)
	return true, nil
}

// end ends a transfer that the peer sends, and drops what came of it. The caller
// has the lock, and gives it back by unlock.
func (b *inbox) end(tr *transfer) {
	b.dropped = append(append(b.dropped, tr.offer), tr.parts...)
	tr.parts = nil
	b.in.open = slices.DeleteFunc(b.in.open, func(o *transfer) bool { return o == tr })
}

// offered is the transfer that waits to be taken, or nil.
func (b *inbox) offered() *transfer {
	if n := len(b.in.open); n > 0 && !b.in.open[n-1].taken {
		return b.in.open[n-1]
	}
	return nil
}

// takeProgram takes the next message of the program.
func (b *inbox) takeProgram() (m Message, ok bool) {
	if len(b.program) == 0 {
		return m, false
	}
	m = b.program[0]
	b.program = append([]Message(nil), b.program[1:]...)
	b.bytes, b.fds = b.bytes-len(m.Body), b.fds-len(m.FDs)
	b.wake()
	return m, true
}

// discard closes what nobody took.
func (b *inbox) discard() {
	b.mu.Lock()
	defer b.unlock()
	for len(b.in.open) > 0 {
		b.end(b.in.open[0])
	}
	b.dropped = append(b.dropped, b.program...)
	b.program, b.bytes, b.fds = nil, 0, 0
}

// await waits until take, called with the inbox's lock, answers true, and reads
// what comes meanwhile.
func (c *Conn) await(ctx context.Context, op string, take func() bool) error {
	b := &c.inbox
	for {
		b.mu.Lock()
		ok := take()
		changed, full := b.changed, b.full()
		b.mu.Unlock()
		switch {
		case ok:
			return nil
		case c.isOver():
			return c.ended(op)
		}
		receiving := c.receiving
		if full {
			receiving = nil // somebody must take what there is
		}
		select {
		case receiving <- struct{}{}:
		case <-changed:
			continue
		case <-ctx.Done():
			return waitError(ctx, op, "", "try again: nothing was lost")
		case <-c.over:
			return c.ended(op)
		}
		// Whoever had the slot before may have brought it.
		b.mu.Lock()
		ok = take()
		b.mu.Unlock()
		if ok {
			c.receiving.give()
			return nil
		}
		err := c.read(ctx, op)
		c.receiving.give()
		if err != nil {
			return err
		}
	}
}

// read reads one message and sorts it in. A warning is one: a peer may say that
// and nothing more, so whoever waits for more waits within its own limit. The
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
		if err := c.inbox.put(*m); err != nil {
			return c.fail(err)
		}
		if m.Kind == soonKind && c.warned && canPoll() {
			c.warning.poll(c.sock.Ready)
		}
		return nil
	}
}

// drain reads what has come already, as far as there is room for it.
func (c *Conn) drain(ctx context.Context, op string) error {
	for range waitingMessages {
		c.inbox.mu.Lock()
		full := c.inbox.full()
		c.inbox.mu.Unlock()
		if full || !c.receiving.try() {
			return nil // then somebody else reads
		}
		var err error
		ready := c.sock.Ready()
		if ready {
			err = c.read(ctx, op)
		}
		c.receiving.give()
		if err != nil || !ready {
			return err
		}
	}
	return nil
}

// awaitOwed waits for the next of what the peer owes within the connection's
// limit.
func (c *Conn) awaitOwed(ctx context.Context, op, what string, from *[]Message, p *poller) (m Message, err error) {
	limited, cancel := context.WithTimeout(ctx, c.limits.Timeout)
	defer cancel()
	if canPoll() {
		p.poll(func() bool {
			c.inbox.mu.Lock()
			came := len(*from) > 0
			c.inbox.mu.Unlock()
			return came || c.sock.Ready()
		})
	}
	err = c.await(limited, op, func() (ok bool) {
		if ok = len(*from) > 0; ok {
			m, *from = (*from)[0], (*from)[1:]
		}
		return ok
	})
	if errors.Is(err, ErrTimeout) && ctx.Err() == nil {
		err = failure(op, ErrTimeout, fmt.Sprintf("no %s of the peer in %v", what, c.limits.Timeout),
			"see what it waits for, or raise Options.Timeout").because(context.DeadlineExceeded)
	}
	return m, err
}
