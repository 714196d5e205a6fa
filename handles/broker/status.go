package broker

import (
	"context"
	"time"

	"github.com/cuvmm/cuvmm/internal/core"
	"github.com/cuvmm/cuvmm/internal/wire"
)

// Status is how a broker is. Counts are of this broker, and not of those before it.
type Status struct {
	// Ready: clients of an earlier broker have had their time to come back (Options.Return), or there were
	// none. Requests are served before that, too.
	Ready bool
	// Since is when the broker began.
	Since time.Time
	// Clients are connected, or hold something although they are not.
	Clients int
	// Objects are committed, Publications are kept, and Writing are being written. Bytes is what counts, also of
	// objects that ended and are held yet; Limit bounds it, and is 0 without one.
	Objects, Publications, Writing, Bytes, Limit int
	// Commits, Attaches and Refusals are how many there have been.
	Commits, Attaches, Refusals int
	// Warning is what is wrong with the broker's configuration (Options.Warning), such as a policy that cannot be
	// read. Empty is nothing.
	Warning string
}

func (s *Status) numbers() []*int {
	return []*int{&s.Clients, &s.Objects, &s.Publications, &s.Writing, &s.Bytes, &s.Limit, &s.Commits, &s.Attaches, &s.Refusals}
}

func (s *Status) encode(e *wire.Encoder) {
	e.Bool(s.Ready)
	e.Uint64(uint64(s.Since.UnixNano()))
	for _, n := range s.numbers() {
		e.Uint64(uint64(*n))
	}
	e.Text(wire.Clip(s.Warning, wire.MaxReason), wire.MaxReason)
}

func (s *Status) decode(d *wire.Decoder) {
	s.Ready, s.Since = d.Bool(), time.Unix(0, int64(d.Uint64()))
	for _, n := range s.numbers() {
		*n = int(d.Uint64())
	}
	s.Warning = d.Text(wire.MaxReason)
}

// status describes the broker.
func (b *Broker) status() (s Status) {
	warning := ""
	if b.o.Warning != nil {
		core.Hook(b.o.Log, "broker.Options.Warning", func() { warning = b.o.Warning() })
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	s = b.counted
	s.Warning = warning
	s.Ready, s.Clients, s.Limit = !b.books.returning, b.sessions, b.o.Limit
	for _, o := range b.books.objects {
		s.Bytes += o.bytes
		switch {
		case o.State == sealed:
			s.Objects++
		case o.State == kept:
			s.Publications++
		case o.State == writing && !o.isDraft():
			s.Writing++
		}
	}
	return s
}

// Status returns how the broker is. Any client may ask.
func (k *Client) Status(ctx context.Context) (s Status, err error) {
	const op = "broker.Client.Status"
	err = k.on(ctx, op, func(ctx context.Context, l *line) error {
		r, err := l.do(ctx, op, request{kind: wire.BrokerAsk})
		s = r.health
		return err
	})
	return s, err
}
