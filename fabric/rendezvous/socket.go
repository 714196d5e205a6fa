package rendezvous

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"time"

	"github.com/cuvmm/cuvmm/cuda"
	"github.com/cuvmm/cuvmm/handles"
)

// Join enters the group of a host process (Host) as one of its ranks, from 1 on.
// The path is the host's. It waits until the host has taken it in, at most for
// Options.Timeout. A rank that another process has, or has had, is
// cuda.ErrInUse, another size than the host's ErrDisagree. The caller closes the
// group.
func Join(ctx context.Context, path string, rank, size int, o Options) (*Group, error) {
	const op = "rendezvous.Join"
	if err := checkRank(op, rank, size); err != nil {
		return nil, err
	}
	o = o.withDefaults()
	ctx, cancel := context.WithTimeout(ctx, o.Timeout)
	defer cancel()
	conn, err := handles.Dial(ctx, path, handles.Options{Timeout: o.Timeout})
	if err != nil {
		return nil, fmt.Errorf("%s: %w", op, err)
	}
	b := &memberBoard{rank: rank, size: size, conn: conn, queue: newQueue(), ended: make(chan struct{})}
	if err := b.enter(ctx); err != nil {
		_ = conn.Close()
		return nil, fmt.Errorf("%s: %w", op, err)
	}
	go b.receive()
	return New(b, o), nil
}

func checkRank(op string, rank, size int) error {
	if size < 1 || size > MaxSize || rank < 0 || rank >= size {
		return fmt.Errorf("%s: %w: rank %d of %d: a group has 1 to %d ranks, counted from 0", op, cuda.ErrInvalidArgument, rank, size, MaxSize)
	}
	return nil
}

// memberBoard is the side of a rank other than the host's.
type memberBoard struct {
	rank, size int
	conn       *handles.Conn
	queue      *queue
	once       sync.Once
	ended      chan struct{} // closed when receive has ended
}

func (b *memberBoard) Rank() int          { return b.rank }
func (b *memberBoard) Size() int          { return b.size }
func (b *memberBoard) CarriesFiles() bool { return true }

func (b *memberBoard) enter(ctx context.Context) error {
	me := hello{uint32(b.rank), uint32(b.size)}
	if err := b.conn.Send(ctx, me.message(kindHello)); err != nil {
		return err
	}
	m, err := b.conn.Receive(ctx)
	if err != nil {
		return err
	}
	defer func() { _ = m.Close() }()
	switch h, err := readHello(m); {
	case err != nil:
		return err
	case m.Kind == kindWelcome && h == me:
		return nil
	case m.Kind == kindTaken:
		return fmt.Errorf("%w: another process has joined as rank %d; give each a rank of its own, and make a new group where one has ended", cuda.ErrInUse, b.rank)
	case m.Kind == kindOtherSize:
		return fmt.Errorf("%w: a group of size %d, where the host's has %d; name the same size in all processes", ErrDisagree, b.size, h.Size)
	}
	return fmt.Errorf("%w: the host's answer is no welcome", handles.ErrProtocol)
}

// receive hands on what the host sends, until the connection ends.
func (b *memberBoard) receive() {
	defer close(b.ended)
	for {
		m, err := b.conn.Receive(context.Background())
		if err != nil {
			b.queue.put(Event{Kind: Ended, Rank: 0, Reason: "the host's process is gone: " + err.Error()})
			return
		}
		e, err := readEvent(m)
		if err != nil {
			_ = m.Close()
			_ = b.conn.Close()
			b.queue.put(Event{Kind: Ended, Rank: 0, Reason: "the host sent what no host sends: " + err.Error()})
			return
		}
		b.queue.put(e)
	}
}

func (b *memberBoard) Post(ctx context.Context, s Step, p Parcel) error {
	return b.send(ctx, Event{Kind: Posted, Rank: b.rank, Step: s, Parcel: p})
}

func (b *memberBoard) Fail(ctx context.Context, s Step, reason string) error {
	return b.send(ctx, Event{Kind: Failed, Rank: b.rank, Step: s, Reason: reason})
}

func (b *memberBoard) send(ctx context.Context, e Event) error {
	const deaf = "the host's process does not take messages"
	began := time.Now()
	err := b.conn.Send(ctx, e.message())
	switch {
	case err == nil || errors.Is(err, cuda.ErrClosed):
		return err
	case ctx.Err() != nil:
		e := late(ctx, e.Step, []int{0}, time.Since(began))
		e.Reason = deaf
		return e
	}
	// What the host had to say before it went is still read, and explains it.
	select {
	case <-b.ended:
	case <-ctx.Done():
	}
	return &Error{Step: e.Step, Ranks: []int{0}, kind: handles.ErrGone, Reason: deaf, cause: err}
}

func (b *memberBoard) Next(ctx context.Context) (Event, error) { return b.queue.take(ctx) }

func (b *memberBoard) Close() (err error) {
	b.once.Do(func() {
		b.queue.close()
		ctx, cancel := context.WithTimeout(context.Background(), farewell)
		_ = b.conn.Send(ctx, handles.Message{Kind: kindDone}) // else it counts as lost
		cancel()
		err = b.conn.Close()
		<-b.ended
	})
	return err
}
