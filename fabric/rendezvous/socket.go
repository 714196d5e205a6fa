package rendezvous

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"time"

	"github.com/cuvmm/cuvmm/cuda"
	"github.com/cuvmm/cuvmm/handles/peer"
	"github.com/cuvmm/cuvmm/internal/wire"
)

// Join enters the group of a host process ([Host]) as one of its ranks, from 1 on,
// at the host's path. It waits until the host listens there and has admitted it, at most
// for Options.Timeout, so all processes may start at the same time. A rank that another
// process has, or has had, is cuda.ErrInUse, and another size than the host's ErrDisagree.
// The caller closes the group.
func Join(ctx context.Context, path string, rank, size int, o Options) (*Group, error) {
	const op = "rendezvous.Join"
	if err := check(op, rank, size, o); err != nil {
		return nil, err
	}
	if rank == 0 {
		return nil, fmt.Errorf("%s: %w: rank 0 is the process that calls Host", op, cuda.ErrInvalidArgument)
	}
	o = o.withDefaults()
	ctx, cancel := context.WithTimeout(ctx, o.Timeout)
	defer cancel()
	conn, err := peer.DialWait(ctx, path, peer.Options{Timeout: o.Timeout, MaxFDs: MaxFiles})
	if err != nil {
		return nil, fmt.Errorf("%s: %w", op, err)
	}
	t := &memberTransport{rank: rank, size: size, conn: conn, queue: newQueue(), ended: make(chan struct{})}
	if err := t.enter(ctx); err != nil {
		_ = conn.Close()
		return nil, fmt.Errorf("%s: %w", op, err)
	}
	go t.receive()
	return New(t, o), nil
}

// check checks the arguments of Host and Join.
func check(op string, rank, size int, o Options) error {
	if size < 1 || size > MaxSize || rank < 0 || rank >= size {
		return fmt.Errorf("%s: %w: rank %d of %d: a group has 1 to %d ranks, counted from 0", op, cuda.ErrInvalidArgument, rank, size, MaxSize)
	}
	if err := o.Check(); err != nil {
		return fmt.Errorf("%s: %w", op, err)
	}
	return nil
}

// memberTransport is the side of a rank other than the host's.
type memberTransport struct {
	rank, size int
	conn       *peer.Conn
	queue      *queue
	once       sync.Once
	ended      chan struct{} // closed when receive has ended
	// violation is why receive closed the connection, if it did. It is read once receive has
	// ended.
	violation string
}

func (t *memberTransport) Rank() int          { return t.rank }
func (t *memberTransport) Size() int          { return t.size }
func (t *memberTransport) CarriesFiles() bool { return true }

// enter introduces this rank to the host, and returns why the host refuses it.
func (t *memberTransport) enter(ctx context.Context) error {
	if err := t.conn.Send(ctx, hello{uint32(t.rank), uint32(t.size)}.message()); err != nil {
		return err
	}
	reply, err := t.conn.Receive(ctx)
	if err != nil {
		return err
	}
	defer func() { _ = reply.Close() }()
	switch reply.Kind {
	case wire.RankTaken:
		return fmt.Errorf("%w: another process has joined as rank %d; give each a rank of its own, and make a new group after one has ended", cuda.ErrInUse, t.rank)
	case wire.OtherSize:
		size, err := readOtherSize(reply)
		if err != nil {
			return err
		}
		return fmt.Errorf("%w: a group of size %d, but the host's has %d; name the same size in all processes", ErrDisagree, t.size, size)
	}
	_, err = fixed(reply, wire.Welcome, 0)
	return err
}

// receive queues what the host sends, until the connection ends.
func (t *memberTransport) receive() {
	defer close(t.ended)
	for {
		m, err := t.conn.Receive(context.Background())
		if err != nil {
			reason := "the host's process is gone: " + err.Error()
			if errors.Is(err, peer.ErrTruncated) {
				reason = "the host's message did not fit into this process: " + err.Error()
			}
			t.queue.put(Event{Kind: Ended, Rank: 0, Reason: reason})
			return
		}
		e, err := readEvent(m)
		if err == nil && t.queue.put(e) > mostPending(t.size) {
			err = fmt.Errorf("%w: more events than a group has in flight", peer.ErrProtocol)
		} else if err != nil {
			_ = m.Close()
		}
		if err != nil {
			t.violation = "the host sent what no host sends: " + err.Error()
			_ = t.conn.Close()
			t.queue.put(Event{Kind: Ended, Rank: 0, Reason: t.violation})
			return
		}
	}
}

func (t *memberTransport) Post(ctx context.Context, s Step, c Contribution) error {
	return t.send(ctx, Event{Kind: Posted, Rank: t.rank, Step: s, Contribution: c})
}

func (t *memberTransport) Fail(ctx context.Context, e Event) error { return t.send(ctx, e) }

func (t *memberTransport) send(ctx context.Context, e Event) error {
	const deaf = "the host's process does not read messages"
	began := time.Now()
	err := t.conn.Send(ctx, e.message())
	switch {
	case err == nil:
		return nil
	case errors.Is(err, cuda.ErrClosed):
		select { // by this rank's Close or by receive, which ends then
		case <-t.ended:
			if t.violation != "" {
				return &Error{Step: e.Step, Ranks: []int{0}, kind: peer.ErrGone, Reason: t.violation, cause: err}
			}
		case <-ctx.Done():
		}
		return err
	case ctx.Err() != nil:
		e := late(ctx, e.Step, []int{0}, time.Since(began))
		e.Reason = deaf
		return e
	}
	// The host's last messages are still read, and explain its end.
	select {
	case <-t.ended:
	case <-ctx.Done():
	}
	return &Error{Step: e.Step, Ranks: []int{0}, kind: peer.ErrGone, Reason: deaf + ": " + err.Error(), cause: err}
}

func (t *memberTransport) Next(ctx context.Context) (Event, error) { return t.queue.pop(ctx) }

func (t *memberTransport) Close(*Event) (err error) {
	t.once.Do(func() {
		t.queue.close()
		ctx, cancel := context.WithTimeout(context.Background(), farewell)
		defer cancel()
		// Without it this rank would count as lost. The host ends the connection when it
		// has read it; if this side ended it first, the host could fail to send before.
		if t.conn.Send(ctx, peer.Message{Kind: wire.Left}) == nil {
			select {
			case <-t.ended:
			case <-ctx.Done():
			}
		}
		err = t.conn.Close()
		<-t.ended
	})
	return err
}
