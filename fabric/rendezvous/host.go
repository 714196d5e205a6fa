package rendezvous

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"time"

	"github.com/cuvmm/cuvmm/cuda"
	"github.com/cuvmm/cuvmm/handles/peer"
	"github.com/cuvmm/cuvmm/internal/link"
	"github.com/cuvmm/cuvmm/internal/wire"
)

// Host makes a group of processes of one host, of which this one is rank 0, and
// returns the path at which the others [Join]: a socket in a directory that only
// this user may enter (see peer.Listen; an empty name is replaced by a random one). It does
// not wait for them: the first step does. The caller closes the group.
//
// All messages go through this process, which decides the outcome of each step,
// so the group ends with it.
func Host(dir, name string, size int, o Options) (g *Group, path string, err error) {
	const op = "rendezvous.Host"
	if err := check(op, 0, size, o); err != nil {
		return nil, "", err
	}
	o = o.withDefaults()
	l, err := peer.Listen(dir, name, peer.Options{Timeout: o.Timeout, MaxFDs: MaxFiles})
	if err != nil {
		return nil, "", fmt.Errorf("%s: %w", op, err)
	}
	t := &hostTransport{listener: l, timeout: o.Timeout, queue: newQueue(), members: make([]*member, size), state: newState(size)}
	t.work.Go(t.accept)
	return New(t, o), l.Path(), nil
}

// hostTransport is the side of rank 0, and the group's sequencer: it decides the
// order of the events, and relays the ones that count.
type hostTransport struct {
	listener *peer.Listener
	timeout  time.Duration
	queue    *queue
	once     sync.Once
	work     sync.WaitGroup

	mu      sync.Mutex
	closed  bool
	state   *state
	members []*member // by rank; nil for rank 0 and ranks that have not joined
	// before are the events so far, for ranks that have yet to join. No rank
	// passes the first step without them, so they are few.
	before []Event
	// unidentified are connections that have not said their rank.
	unidentified []*peer.Conn
	// dropped are events to be released without the lock: to close a file that a rank
	// chose may take long.
	dropped []Event
}

// member is a rank that joined.
type member struct {
	rank int
	conn *peer.Conn
	out  *queue
	sent chan struct{} // closed when nothing is sent any more
}

func (t *hostTransport) Rank() int          { return 0 }
func (t *hostTransport) Size() int          { return len(t.members) }
func (t *hostTransport) CarriesFiles() bool { return true }

// mostUnidentified bounds the processes that join at once; one more displaces
// the oldest.
func (t *hostTransport) mostUnidentified() int { return t.Size() + 64 }

func (t *hostTransport) accept() {
	for {
		conn, err := t.listener.Accept(context.Background())
		if errors.Is(err, cuda.ErrClosed) {
			return
		}
		if err != nil { // too many open files, for example, which may be temporary
			time.Sleep(10 * time.Millisecond)
			continue
		}
		t.mu.Lock()
		if t.closed {
			t.mu.Unlock()
			_ = conn.Close()
			return
		}
		if len(t.unidentified) == t.mostUnidentified() {
			oldest := t.unidentified[0]
			t.work.Go(func() { _ = oldest.Close() }) // which may wait for files that lie unread
			t.unidentified = t.unidentified[1:]
		}
		t.unidentified = append(t.unidentified, conn)
		t.work.Go(func() { t.serve(conn) })
		t.mu.Unlock()
	}
}

// serve admits a process as a rank, and sequences what it sends.
func (t *hostTransport) serve(conn *peer.Conn) {
	defer func() { _ = conn.Close() }()
	m := t.admit(conn)
	if m == nil {
		t.mu.Lock()
		t.identified(conn)
		t.mu.Unlock()
		return
	}
	t.work.Go(m.send)
	defer m.out.close()
	for {
		msg, err := conn.Receive(context.Background())
		switch {
		case err != nil:
			t.tell(Event{Kind: Lost, Rank: m.rank, Reason: "its process is gone: " + err.Error()})
			return
		case msg.Kind == wire.Left:
			_ = msg.Close()
			t.tell(Event{Kind: Left, Rank: m.rank})
			return
		}
		e, err := readEvent(msg)
		if err == nil && e.Kind != Posted && e.Kind != Failed && e.Kind != Late {
			err = fmt.Errorf("%w: an event %q", peer.ErrProtocol, e.Kind)
		}
		if err != nil {
			_ = msg.Close()
			t.tell(Event{Kind: Lost, Rank: m.rank, Reason: "it sent what no rank sends: " + err.Error()})
			return
		}
		e.Rank = m.rank // a rank speaks for itself alone
		if !t.tell(e) {
			return
		}
	}
}

// identified removes a connection from the unidentified.
// The caller holds mu.
func (t *hostTransport) identified(conn *peer.Conn) {
	t.unidentified = slices.DeleteFunc(t.unidentified, func(c *peer.Conn) bool { return c == conn })
}

// admit does the handshake. It refuses a process that is not one of the group's ranks
// with the reason, and returns nil.
func (t *hostTransport) admit(conn *peer.Conn) *member {
	ctx, cancel := context.WithTimeout(context.Background(), t.timeout)
	defer cancel()
	limits := link.Of(conn).Limits()
	limits.NoFDs = true // or those of a message that never ends would fill this process's table
	msg, err := conn.Receive(ctx)
	if err != nil {
		return nil
	}
	h, err := readHello(msg)
	if err != nil || h.Rank == 0 || h.Rank >= h.Size {
		return nil
	}
	if int(h.Size) != t.Size() {
		_ = conn.Send(ctx, otherSize(t.Size()))
		return nil
	}
	m := &member{rank: int(h.Rank), conn: conn, out: newQueue(), sent: make(chan struct{})}
	taken, closed := t.enter(m)
	switch {
	case closed:
		return nil // the end of the connection says so
	case taken:
		_ = conn.Send(ctx, peer.Message{Kind: wire.RankTaken})
		return nil
	}
	limits.NoFDs = false
	if err := conn.Send(ctx, peer.Message{Kind: wire.Welcome}); err != nil {
		m.out.close()
		close(m.sent)
		t.tell(Event{Kind: Lost, Rank: m.rank, Reason: "its process ended while it joined: " + err.Error()})
		return nil
	}
	return m
}

// enter gives a process its rank and the earlier events, unless another
// process has or had the rank, or the group is closed.
func (t *hostTransport) enter(m *member) (taken, closed bool) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.closed || t.members[m.rank] != nil {
		return !t.closed, t.closed
	}
	t.identified(m.conn) // Close ends those at once, but lets members read the rest
	t.members[m.rank] = m
	for _, e := range t.before {
		m.out.put(e.use())
	}
	return false, false
}

// tell takes ownership of an event, sequences it, and reports whether its rank is
// still of the group.
func (t *hostTransport) tell(e Event) bool {
	own := e.echo()
	if e.Rank != 0 {
		// Copied before the event is in the order, so that either all ranks have
		// the files or none does.
		c, err := e.Contribution.dup()
		if err != nil {
			e.Contribution.Close()
			e = Event{Kind: Failed, Rank: e.Rank, Step: e.Step, Reason: "the host could not take its files: " + err.Error()}
			own = e
		}
		own.Contribution = c
	}
	t.mu.Lock()
	defer t.unlock()
	t.sequence(e, own)
	_, gone := t.state.gone[e.Rank]
	return !gone
}

// unlock releases mu, and then the events that were dropped under it.
func (t *hostTransport) unlock() {
	dropped := t.dropped
	t.dropped = nil
	t.mu.Unlock()
	for i := range dropped {
		dropped[i].release()
	}
}

// sequence enters an event into the order and relays it, to rank 0 as own. The
// caller holds mu, and releases it by unlock.
func (t *hostTransport) sequence(e, own Event) {
	came := e
	e.Contribution = Contribution{} // apply would close that of a rank that it expels
	if t.closed || !t.state.apply(&e) {
		t.dropped = append(t.dropped, came, own)
		return
	}
	if e.Kind == came.Kind {
		e.Contribution = came.Contribution
	} else { // the rank was expelled
		t.dropped = append(t.dropped, came, own)
		own = e
	}
	e.share()
	t.queue.put(own)
	waiting := false
	var deaf []*member
	for r, m := range t.members {
		switch {
		case r == 0:
			continue
		case m == nil:
			waiting = true
			continue
		}
		relayed := e.echo()
		if r != e.Rank {
			relayed = e.use()
		}
		if _, gone := t.state.gone[r]; !gone && m.out.put(relayed) <= mostPending(t.Size()) {
			continue
		} else if gone {
			relayed.release()
			continue
		}
		deaf = append(deaf, m)
	}
	if waiting {
		t.before = append(t.before, e.use())
	} else {
		t.forget()
	}
	t.dropped = append(t.dropped, e)
	for _, m := range deaf {
		t.work.Go(func() {
			m.out.close()
			_ = m.conn.Close()
		})
		lost := Event{Kind: Lost, Rank: m.rank, Reason: "it arrives at steps without reading the other ranks' contributions"}
		t.sequence(lost, lost)
	}
}

// forget drops the events for ranks that have yet to join. The caller holds mu, and
// releases it by unlock.
func (t *hostTransport) forget() {
	t.dropped = append(t.dropped, t.before...)
	t.before = nil
}

// send sends a member its events, until it is gone.
func (m *member) send() {
	defer close(m.sent)
	for {
		e, err := m.out.pop(context.Background())
		if err != nil {
			return
		}
		err = m.conn.Send(context.Background(), e.message())
		e.release()
		if errors.Is(err, peer.ErrGone) {
			return // serve reads what it sent before, and then its end
		}
		if err != nil {
			_ = link.Of(m.conn).Fail(err) // serve notices
			return
		}
	}
}

func (t *hostTransport) Post(_ context.Context, s Step, c Contribution) error {
	shared, err := c.dup()
	if err != nil {
		return err
	}
	t.tell(Event{Kind: Posted, Step: s, Contribution: shared})
	return nil
}

func (t *hostTransport) Fail(_ context.Context, e Event) error {
	t.tell(e)
	return nil
}

func (t *hostTransport) Next(ctx context.Context) (Event, error) { return t.queue.pop(ctx) }

func (t *hostTransport) Close(*Event) (err error) {
	t.once.Do(func() {
		err = t.listener.Close()
		t.tell(Event{Kind: Left})
		t.mu.Lock()
		t.closed = true
		t.forget()
		members := slices.DeleteFunc(slices.Clone(t.members), func(m *member) bool { return m == nil })
		unidentified := slices.Clone(t.unidentified)
		t.unlock()
		t.queue.close()
		for _, c := range unidentified {
			t.work.Go(func() { _ = c.Close() })
		}
		// Earlier events still reach the members that read.
		timeout := time.NewTimer(farewell)
		defer timeout.Stop()
		for _, m := range members {
			m.out.finish()
		}
		for _, m := range members {
			select {
			case <-m.sent:
			case <-timeout.C:
				timeout.Reset(0)
			}
			t.work.Go(func() { _ = m.conn.Close() })
		}
		t.work.Wait()
	})
	return err
}
