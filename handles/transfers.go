package handles

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"

	"github.com/cuvmm/cuvmm/handles/peer"
	"github.com/cuvmm/cuvmm/internal/exchange"
	"github.com/cuvmm/cuvmm/internal/link"
	"github.com/cuvmm/cuvmm/internal/peererr"
	"github.com/cuvmm/cuvmm/internal/wait"
	"github.com/cuvmm/cuvmm/internal/wire"
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
// by declined, both with the reason. So neither side keeps what the other believes to
// have failed, unless the connection ends in between. What of an ended transfer
// is still under way is dropped on arrival, and the connection goes on.

// chunkWindow is how many messages with chunks may be on their way: the exports of
// one overlap with the imports of the one before.
const chunkWindow = 4

// transfers is what this package keeps for a connection: the transfers that are under
// way, and what came before. It sorts the messages of reserved kinds.
type transfers struct {
	// offering and taking let one transfer of each direction run at a time.
	offering, taking wait.Slot
	imports          imports
	carried          carried

	mu sync.Mutex
	// in is the transfer that the peer sends, out the one that this side sends.
	in  incoming
	out outgoing
	// dropped are messages that nothing takes, to be closed without the lock: to
	// close a file that the peer chose may take long.
	dropped []peer.Message
}

var _ link.Inbox[peer.Message] = (*transfers)(nil)

func newTransfers() *transfers {
	exchange.Warm.Enter()
	return &transfers{offering: wait.NewSlot(), taking: wait.NewSlot()}
}

func init() { link.SetInbox(func() link.Inbox[peer.Message] { return newTransfers() }) }

// conn is a connection with its transfers.
type conn struct {
	link.Conn[peer.Message]
	*transfers
}

// connOf looks inside a connection, and keeps it open until Release.
func connOf(op string, c *peer.Conn) (conn, error) {
	var in link.Conn[peer.Message]
	if c != nil {
		in = link.Of(c)
	}
	if in == nil {
		return conn{}, peererr.Invalid(op, "a nil connection", "make one with Dial, Accept, Pair or Inherit")
	}
	if !in.Acquire() {
		return conn{}, peererr.Closed(op, "connection")
	}
	return conn{in, in.Inbox().(*transfers)}, nil
}

// turn takes one of the transfers' slots.
func (c conn) turn(ctx context.Context, op string, s wait.Slot) error {
	if s.Take(ctx, c.Over()) {
		return nil
	}
	select {
	case <-c.Over():
		return c.Ended(op)
	default:
		return peererr.Wait(ctx, op, "another goroutine was at it", "try again")
	}
}

// unlock gives the lock back and closes what was dropped under it.
func (b *transfers) unlock() {
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
	open    []*transfer
	spinner wait.Spinner // of the goroutine that takes
}

// transfer is one that the peer sends.
type transfer struct {
	number uint32
	offer  peer.Message
	// parts came behind the offer and were not looked at yet.
	parts []peer.Message
	// taken: a caller receives it. mapped: the sender may confirm it. last: the
	// peer has ended it.
	taken, mapped, last bool
	// by is how the memory came, once it did.
	by handleNegotiation
	// spent are descriptors that were imported, to be closed.
	spent []*peer.FD
}

// outgoing is the sender's side of transfers.
type outgoing struct {
	begun, ended uint32
	answers      []peer.Message
	spinner      wait.Spinner // of the goroutine that offers
}

// Sort sorts a message in: see link.Inbox.
func (b *transfers) Sort(m peer.Message) (keep bool, err error) {
	t, err := transferOf(m)
	if err != nil {
		return false, err
	}
	b.mu.Lock()
	defer b.unlock()
	switch m.Kind {
	case wire.Offer:
		if n := len(b.in.open); t != b.in.offered+1 || n > 0 && !b.in.open[n-1].last {
			return false, peererr.Violation("offer %d behind %d, which has not ended", t, b.in.offered)
		}
		b.in.offered = t
		b.in.open = append(b.in.open, &transfer{number: t, offer: m})
		return true, nil
	case wire.Chunks, wire.Fabric, wire.Withdrawn, wire.Confirmed:
		if t > b.in.offered {
			return false, peererr.Violation("part of transfer %d, which was not offered", t)
		}
		for _, tr := range b.in.open {
			if tr.number == t {
				return b.part(tr, m)
			}
		}
		return false, nil // ended, and the peer did not know yet
	default: // a reply
		switch {
		case t > b.out.begun:
			return false, peererr.Violation("an answer to transfer %d, of %d", t, b.out.begun)
		case t != b.out.begun || b.out.begun == b.out.ended:
			return false, nil
		case len(b.out.answers) > 2*chunkWindow:
			return false, peererr.Violation("more than %d answers to the same transfer under way", 2*chunkWindow)
		}
		b.out.answers = append(b.out.answers, m)
		return true, nil
	}
}

// part sorts in a part of an open transfer.
func (b *transfers) part(tr *transfer, m peer.Message) (keep bool, err error) {
	switch {
	case tr.last:
		return false, peererr.Violation("more of transfer %d, which the peer has ended", tr.number)
	case m.Kind == wire.Confirmed && !tr.mapped:
		return false, peererr.Violation("transfer %d confirmed before it was mapped", tr.number)
	case m.Kind == wire.Withdrawn && !tr.taken:
		b.end(tr) // nothing has seen it
		return false, nil
	case len(tr.parts) > chunkWindow:
		return false, peererr.Violation("more than %d parts of a transfer under way", chunkWindow)
	}
	tr.last = m.Kind != wire.Chunks && m.Kind != wire.Fabric
	tr.parts = append(tr.parts, m)
	return true, nil
}

// end ends a transfer that the peer sends, and drops what came of it. The caller
// has the lock, and gives it back by unlock.
func (b *transfers) end(tr *transfer) {
	b.dropped = append(append(b.dropped, tr.offer), tr.parts...)
	tr.parts = nil
	b.in.open = slices.DeleteFunc(b.in.open, func(o *transfer) bool { return o == tr })
}

// waiting reports whether a transfer waits to be taken.
func (b *transfers) waiting() bool {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.offered() != nil
}

// offered is the transfer that waits to be taken, or nil. The caller has the lock.
func (b *transfers) offered() *transfer {
	if n := len(b.in.open); n > 0 && !b.in.open[n-1].taken {
		return b.in.open[n-1]
	}
	return nil
}

// Discard closes what nothing has taken.
func (b *transfers) Discard() {
	b.mu.Lock()
	for len(b.in.open) > 0 {
		b.end(b.in.open[0])
	}
	b.unlock()
	exchange.Warm.Leave()
}

// awaitOwed waits for the next of what the peer owes within the connection's
// limit.
func (c conn) awaitOwed(ctx context.Context, op, what string, from *[]peer.Message, s *wait.Spinner) (m peer.Message, err error) {
	timeout := c.Limits().Timeout
	limited, cancel := context.WithTimeout(ctx, timeout)
	defer cancel()
	if wait.CanSpin() {
		s.Spin(func() bool {
			c.mu.Lock()
			came := len(*from) > 0
			c.mu.Unlock()
			return came || c.Socket().Ready()
		})
	}
	err = c.Await(limited, op, func() (ok bool) {
		c.mu.Lock()
		defer c.mu.Unlock()
		if ok = len(*from) > 0; ok {
			m, *from = (*from)[0], (*from)[1:]
		}
		return ok
	})
	if errors.Is(err, peer.ErrTimeout) && ctx.Err() == nil {
		err = peererr.Wrap(context.DeadlineExceeded, op, peer.ErrTimeout, fmt.Sprintf("no %s of the peer in %v", what, timeout),
			"see what it waits for, or raise Options.Timeout")
	}
	return m, err
}
