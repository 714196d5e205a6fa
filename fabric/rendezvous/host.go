package rendezvous

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"time"

	"github.com/cuvmm/cuvmm/cuda"
	"github.com/cuvmm/cuvmm/handles"
)

// Host makes a group of processes of one host, of which this one is rank 0, and
// answers the path at which the others Join: a socket in a directory that is
// this user's alone (see handles.Listen; an empty name is a random one). It does
// not wait for them: the first step does. The caller closes the group.
//
// All messages go through this process, so that its end is the group's end.
func Host(dir, name string, size int, o Options) (g *Group, path string, err error) {
	const op = "rendezvous.Host"
	if err := checkRank(op, 0, size); err != nil {
		return nil, "", err
	}
	o = o.withDefaults()
	l, err := handles.Listen(dir, name, handles.Options{Timeout: o.Timeout})
	if err != nil {
		return nil, "", fmt.Errorf("%s: %w", op, err)
	}
	b := &hostBoard{listener: l, timeout: o.Timeout, queue: newQueue(), members: make([]*member, size)}
	b.work.Go(b.accept)
	return New(b, o), l.Path(), nil
}

// hostBoard is the side of rank 0, and hands on what the others send.
type hostBoard struct {
	listener *handles.Listener
	timeout  time.Duration
	queue    *queue
	once     sync.Once
	work     sync.WaitGroup

	mu      sync.Mutex
	closed  bool
	members []*member // by rank; rank 0 has none, nor has one that has not joined
	// before are the events of before everybody had joined, for those that have
	// yet to: nobody passes the first step without them, so they are few.
	before []Event
	// strangers are connections that have not said who they are.
	strangers []*handles.Conn
}

// member is a rank that joined.
type member struct {
	rank int
	conn *handles.Conn
	out  *queue
	sent chan struct{} // closed when nothing is sent any more
}

func (b *hostBoard) Rank() int          { return 0 }
func (b *hostBoard) Size() int          { return len(b.members) }
func (b *hostBoard) CarriesFiles() bool { return true }

func (b *hostBoard) accept() {
	for {
		conn, err := b.listener.Accept(context.Background())
		if errors.Is(err, cuda.ErrClosed) {
			return
		}
		if err != nil { // too many open files, say: it may pass
			time.Sleep(10 * time.Millisecond)
			continue
		}
		b.mu.Lock()
		if b.closed {
			b.mu.Unlock()
			_ = conn.Close()
			return
		}
		b.strangers = append(b.strangers, conn)
		b.work.Go(func() { b.serve(conn) })
		b.mu.Unlock()
	}
}

// serve takes a process in as a rank, and hands on what it sends.
func (b *hostBoard) serve(conn *handles.Conn) {
	defer func() { _ = conn.Close() }()
	m := b.welcome(conn)
	if m == nil {
		b.mu.Lock()
		b.known(conn)
		b.mu.Unlock()
		return
	}
	b.work.Go(m.send)
	defer m.out.close()
	for {
		msg, err := conn.Receive(context.Background())
		switch {
		case err != nil:
			b.tell(Event{Kind: Lost, Rank: m.rank, Reason: "its process is gone: " + err.Error()})
			return
		case msg.Kind == kindDone:
			_ = msg.Close()
			b.tell(Event{Kind: Left, Rank: m.rank})
			return
		}
		e, err := readEvent(msg)
		if err == nil && e.Kind != Posted && e.Kind != Failed {
			err = fmt.Errorf("%w: an event %q", handles.ErrProtocol, e.Kind)
		}
		if err != nil {
			_ = msg.Close()
			b.tell(Event{Kind: Lost, Rank: m.rank, Reason: "it sent what no rank sends: " + err.Error()})
			return
		}
		e.Rank = m.rank // whatever it says
		b.tell(e)
		e.Parcel.Close()
	}
}

// known is a stranger no more. The caller holds mu.
func (b *hostBoard) known(conn *handles.Conn) {
	b.strangers = slices.DeleteFunc(b.strangers, func(c *handles.Conn) bool { return c == conn })
}

// welcome reads a greeting and answers it. It is nil where the process is none
// of the group's ranks, which it is told.
func (b *hostBoard) welcome(conn *handles.Conn) *member {
	ctx, cancel := context.WithTimeout(context.Background(), b.timeout)
	defer cancel()
	msg, err := conn.Receive(ctx)
	if err != nil {
		return nil
	}
	defer func() { _ = msg.Close() }()
	h, err := readHello(msg)
	switch {
	case err != nil || msg.Kind != kindHello || h.Rank == 0 || h.Rank >= h.Size:
		return nil
	case int(h.Size) != len(b.members):
		_ = conn.Send(ctx, hello{0, uint32(len(b.members))}.message(kindOtherSize))
		return nil
	}
	m := &member{rank: int(h.Rank), conn: conn, out: newQueue(), sent: make(chan struct{})}
	b.mu.Lock()
	free := !b.closed && b.members[h.Rank] == nil
	if free {
		b.known(conn) // Close ends strangers at once, and hears members out
		b.members[h.Rank] = m
		for _, e := range b.before {
			m.out.putCopy(e)
		}
	}
	b.mu.Unlock()
	if !free {
		_ = conn.Send(ctx, h.message(kindTaken))
		return nil
	}
	if err := conn.Send(ctx, h.message(kindWelcome)); err != nil {
		m.out.close()
		close(m.sent)
		b.tell(Event{Kind: Lost, Rank: m.rank, Reason: "its process went as it joined: " + err.Error()})
		return nil
	}
	return m
}

// tell hands an event to everybody but its rank. The event stays the caller's.
func (b *hostBoard) tell(e Event) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.closed {
		return
	}
	if e.Rank != 0 {
		b.queue.putCopy(e)
	}
	waiting := false
	for r, m := range b.members[1:] {
		switch {
		case m == nil:
			waiting = true
		case r+1 != e.Rank:
			m.out.putCopy(e)
		}
	}
	if waiting {
		b.before = append(b.before, e.copied())
	} else {
		b.forget()
	}
}

// forget drops the events of before everybody had joined. The caller holds mu.
func (b *hostBoard) forget() {
	for _, e := range b.before {
		e.Parcel.Close()
	}
	b.before = nil
}

// send sends a member what there is for it, until it is gone.
func (m *member) send() {
	defer close(m.sent)
	for {
		e, err := m.out.take(context.Background())
		if err != nil {
			return
		}
		err = m.conn.Send(context.Background(), e.message())
		e.Parcel.Close()
		if err != nil {
			_ = m.conn.Close() // serve sees it
			return
		}
	}
}

func (b *hostBoard) Post(_ context.Context, s Step, p Parcel) error {
	b.tell(Event{Kind: Posted, Step: s, Parcel: p})
	return nil
}

func (b *hostBoard) Fail(_ context.Context, s Step, reason string) error {
	b.tell(Event{Kind: Failed, Step: s, Reason: reason})
	return nil
}

func (b *hostBoard) Next(ctx context.Context) (Event, error) { return b.queue.take(ctx) }

func (b *hostBoard) Close() (err error) {
	b.once.Do(func() {
		err = b.listener.Close()
		b.tell(Event{Kind: Left})
		b.mu.Lock()
		b.closed = true
		b.forget()
		members := slices.DeleteFunc(slices.Clone(b.members), func(m *member) bool { return m == nil })
		strangers := slices.Clone(b.strangers)
		b.mu.Unlock()
		b.queue.close()
		for _, c := range strangers {
			_ = c.Close()
		}
		// What was said before reaches those that listen.
		patience := time.NewTimer(farewell)
		defer patience.Stop()
		for _, m := range members {
			m.out.finish()
		}
		for _, m := range members {
			select {
			case <-m.sent:
			case <-patience.C:
				patience.Reset(0)
			}
			_ = m.conn.Close()
		}
		b.work.Wait()
	})
	return err
}
