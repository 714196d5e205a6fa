package broker

import (
	"context"
	"sync"

	"github.com/cuvmm/cuvmm/handles/broker/keeper"
	"github.com/cuvmm/cuvmm/handles/peer"
	"github.com/cuvmm/cuvmm/internal/errs"
	"github.com/cuvmm/cuvmm/internal/link"
	"github.com/cuvmm/cuvmm/internal/wait"
	"github.com/cuvmm/cuvmm/internal/wire"
)

// line is a client's side of a connection: it numbers the requests, and brings each its replies.
type line struct {
	c *peer.Conn
	// giving is taken by the request whose memory is on its way, since transfers have no number of a
	// request.
	giving wait.Slot
	// over is closed when nothing is received any more.
	over chan struct{}
	// broker names the broker in errors.
	broker string
	// wanted is called with objects whose memory the broker asks for.
	wanted func(keeper.Key)

	mu      sync.Mutex
	last    uint32
	replies map[uint32]chan reply
}

// mostReplies bounds the replies to a request: the messages of a listing of all that there can be.
const mostReplies = 1 + (1<<16)/maxListing

func newLine(c *peer.Conn, broker string, wanted func(keeper.Key)) *line {
	l := &line{c: c, giving: wait.NewSlot(), over: make(chan struct{}), broker: broker, wanted: wanted, replies: map[uint32]chan reply{}}
	go l.read()
	return l
}

// read brings replies to who waits for them, until the connection ends.
func (l *line) read() {
	defer close(l.over)
	for {
		m, err := l.c.Receive(context.Background())
		if err != nil {
			return
		}
		r, err := parseReply(m)
		if err == nil && r.kind == wire.BrokerWanted {
			l.wanted(r.key)
			continue
		}
		if err == nil && !l.deliver(r) {
			err = errs.Violation("a reply of kind %#x to request %d, which has none outstanding", r.kind, r.number)
		}
		if err != nil {
			_ = m.Close()
			_ = link.Of(l.c).Fail(err)
			return
		}
	}
}

// deliver brings a reply to its request. It returns false if there is none.
func (l *line) deliver(r reply) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	to, there := l.replies[r.number]
	if !there {
		return false
	}
	if r.kind != wire.BrokerListing || r.last {
		delete(l.replies, r.number)
	}
	if to == nil { // abandoned
		if r.beside != nil {
			_ = r.beside.Close()
		}
		return true
	}
	select {
	case to <- r:
		return true
	default:
		return false
	}
}

// request sends a request. A caller that does not wait for its last reply abandons it.
func (l *line) request(ctx context.Context, op string, r request) (number uint32, replies chan reply, err error) {
	replies = make(chan reply, mostReplies)
	l.mu.Lock()
	l.last++
	r.number = l.last
	l.replies[r.number] = replies
	l.mu.Unlock()
	if err := l.c.Send(ctx, r.pack()); err != nil { // nothing was sent, or the connection ends
		l.mu.Lock()
		delete(l.replies, r.number)
		l.mu.Unlock()
		if ctx.Err() != nil {
			err = l.late(ctx, op, "was not asked")
		}
		return 0, nil, err
	}
	return r.number, replies, nil
}

// abandon has the replies that are still to come dropped.
func (l *line) abandon(number uint32) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if _, there := l.replies[number]; there {
		l.replies[number] = nil
	}
}

// next waits for the next reply to a request. One that came before the connection or the context ended counts.
func (l *line) next(ctx context.Context, op string, replies chan reply) (reply, error) {
	var ended error
	select {
	case r := <-replies:
		return r, r.denied(op)
	case <-l.over:
		ended = link.Of(l.c).Ended(op)
	case <-ctx.Done():
		ended = l.late(ctx, op, "has not replied")
	}
	select {
	case r := <-replies:
		return r, r.denied(op)
	default:
		return reply{}, ended
	}
}

// denied returns the error of a reply that refuses the request.
func (r *reply) denied(op string) error {
	if r.kind == wire.BrokerDenied {
		return r.err(op)
	}
	return nil
}

// late is the error of a request whose context has ended.
func (l *line) late(ctx context.Context, op, what string) error {
	return errs.PeerWait(ctx, op, l.broker+" "+what, "see what the broker's process does")
}
