package handles

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"

	"github.com/cuvmm/cuvmm/handles/peer"
	"github.com/cuvmm/cuvmm/internal/errs"
	"github.com/cuvmm/cuvmm/internal/exchange"
	"github.com/cuvmm/cuvmm/internal/link"
	"github.com/cuvmm/cuvmm/internal/wait"
	"github.com/cuvmm/cuvmm/internal/wire"
)

// Messages of reserved kinds carry memory, beside the messages of the program. Each side
// numbers the transfers that it sends from 1.
//
//	sender                                 receiver
//	offer -------------------------------> checks
//	chunks, or fabric -------------------> imports     (as often as needed)
//	              <--- taken (chunks so far), for each of those but the last
//	              <--- mapped
//	confirmed ---------------------------> keeps it
//
// The sender exports while the receiver checks, and sends up to chunkWindow messages
// ahead.
//
// Chunks travel as descriptors if the memory has them, since both ends are on one host, and
// otherwise in fabric as fabric handles.
//
// Until then either side can end the transfer with a reason: the sender by withdrawn, the
// receiver by declined. A sender that fails before its offer sends withdrawn with the next
// number. A reason that comes before a receiver has taken the offer waits for the next
// receiver, ahead of a later offer; a later reason replaces it. So neither side keeps memory whose transfer failed for the
// other, unless the connection ends in between. Messages of an ended transfer that are
// still in flight are dropped on arrival, and the connection goes on.

// chunkWindow is how many messages with chunks may be unacknowledged, so that the exports
// of one overlap with the imports of the one before.
const chunkWindow = 4

// transfers is this package's state of a connection: the transfers in flight. It takes the messages of reserved kinds.
type transfers struct {
	// offering and taking let one transfer of each direction run at a time.
	offering, taking wait.Slot
	exports          exchange.Set

	mu sync.Mutex
	// in is the transfer that the peer sends, out the one that this side sends.
	in  incoming
	out outgoing
	// dropped are messages to be closed without the lock: closing a file that the peer
	// chose may take long.
	dropped []message
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
		return conn{}, errs.PeerInvalid(op, "a nil connection", "make one with Dial, Accept, Pair or Inherit")
	}
	if !in.Acquire() {
		return conn{}, errs.PeerClosed(op, "connection")
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
		return errs.PeerWait(ctx, op, "another goroutine was at it", "try again")
	}
}

// unlock releases mu, and then closes the messages dropped under it.
func (b *transfers) unlock() {
	dropped := b.dropped
	b.dropped = nil
	b.mu.Unlock()
	for _, m := range dropped {
		m.close()
	}
}

// incoming is the receiver's side of transfers.
type incoming struct {
	// offered is the number of the last offer.
	offered uint32
	// open are the transfers that have not ended: at most one that waits for a caller,
	// and at most one that a caller receives.
	open []*transfer
	// refused is the last transfer that was withdrawn before a caller received it, until
	// a caller learns the reason. It is older than the transfer of open that waits.
	refused *message
	spinner wait.Spinner // belongs to the goroutine that has the slot taking
}

// transfer is a transfer that the peer sends.
type transfer struct {
	number uint32
	offer  message
	// parts are the messages after the offer that are not processed yet.
	parts []message
	// taken: a caller receives it. mapped: the sender may confirm it. last: the
	// peer has ended it.
	taken, mapped, last bool
	// spent are imported descriptors that are not closed yet.
	spent []*peer.FD
}

// outgoing is the sender's side of transfers.
type outgoing struct {
	begun, ended uint32
	replies      []message
	spinner      wait.Spinner // belongs to the goroutine that has the slot offering
}

// Sort takes a message: see link.Inbox.
func (b *transfers) Sort(p peer.Message) (keep bool, err error) {
	m, err := parse(p)
	if err != nil {
		return false, err
	}
	t := m.transfer
	b.mu.Lock()
	defer b.unlock()
	switch m.kind {
	case wire.Offer:
		if !b.nextLocked(t) {
			return false, errs.Violation("offer %d behind %d, which has not ended", t, b.in.offered)
		}
		b.in.offered = t
		b.in.open = append(b.in.open, &transfer{number: t, offer: m})
		return true, nil
	case wire.Chunks, wire.Fabric, wire.Withdrawn, wire.Confirmed:
		if m.kind == wire.Withdrawn && b.nextLocked(t) {
			b.in.offered = t
			b.refuseLocked(m)
			return true, nil
		}
		if t > b.in.offered {
			return false, errs.Violation("part of transfer %d, which was not offered", t)
		}
		for _, tr := range b.in.open {
			if tr.number == t {
				return b.part(tr, m)
			}
		}
		return false, nil // the transfer has ended, which the peer did not know yet
	default: // a reply
		switch {
		case t > b.out.begun:
			return false, errs.Violation("a reply to transfer %d, of %d", t, b.out.begun)
		case t != b.out.begun || b.out.begun == b.out.ended:
			return false, nil
		case len(b.out.replies) > 2*chunkWindow:
			return false, errs.Violation("more than %d replies to one transfer in flight", 2*chunkWindow)
		}
		b.out.replies = append(b.out.replies, m)
		return true, nil
	}
}

// nextLocked reports whether t is the number of the peer's next transfer, and the one before has ended.
func (b *transfers) nextLocked(t uint32) bool {
	n := len(b.in.open)
	return t == b.in.offered+1 && (n == 0 || b.in.open[n-1].last)
}

// refuseLocked keeps the reason of a transfer that no caller has received. It replaces an older
// one, so a peer that withdraws without end takes no memory.
func (b *transfers) refuseLocked(withdrawn message) { b.in.refused = &withdrawn }

// part takes a part of an open transfer.
func (b *transfers) part(tr *transfer, m message) (keep bool, err error) {
	switch {
	case tr.last:
		return false, errs.Violation("more of transfer %d, which the peer has ended", tr.number)
	case m.kind == wire.Confirmed && !tr.mapped:
		return false, errs.Violation("transfer %d confirmed before it was mapped", tr.number)
	case m.kind == wire.Withdrawn && !tr.taken:
		b.endLocked(tr)
		b.refuseLocked(m)
		return true, nil
	case len(tr.parts) > chunkWindow:
		return false, errs.Violation("more than %d parts of a transfer in flight", chunkWindow)
	}
	tr.last = m.kind != wire.Chunks && m.kind != wire.Fabric
	tr.parts = append(tr.parts, m)
	return true, nil
}

// endLocked ends a transfer that the peer sends, and drops its messages. The caller
// releases mu by unlock.
func (b *transfers) endLocked(tr *transfer) {
	b.dropped = append(append(b.dropped, tr.offer), tr.parts...)
	tr.parts = nil
	b.in.open = slices.DeleteFunc(b.in.open, func(o *transfer) bool { return o == tr })
}

// waiting reports whether a transfer, or the reason of one that was withdrawn, waits for a caller.
func (b *transfers) waiting() bool {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.in.refused != nil || b.offeredLocked() != nil
}

// offeredLocked returns the transfer that waits for a caller, or nil.
func (b *transfers) offeredLocked() *transfer {
	if n := len(b.in.open); n > 0 && !b.in.open[n-1].taken {
		return b.in.open[n-1]
	}
	return nil
}

// Discard closes the messages that no caller has taken.
func (b *transfers) Discard() {
	b.mu.Lock()
	for len(b.in.open) > 0 {
		b.endLocked(b.in.open[0])
	}
	b.unlock()
	exchange.Warm.Leave()
}

// awaitOwed waits for the next message that the peer owes, at most for the connection's
// timeout.
func (c conn) awaitOwed(ctx context.Context, op, what string, from *[]message, s *wait.Spinner) (m message, err error) {
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
		err = errs.PeerCause(context.DeadlineExceeded, op, peer.ErrTimeout, fmt.Sprintf("no %s from the peer within %v", what, timeout),
			"see what the peer waits for, or raise Options.Timeout")
	}
	return m, err
}
