package peer

import (
	"context"
	"time"

	"github.com/cuvmm/cuvmm/internal/link"
	"github.com/cuvmm/cuvmm/internal/sock"
)

// inner is a connection as the packages above use it: see link.Conn.
type inner struct{ c *Conn }

var _ link.Conn[Message] = inner{}

func (i inner) Send(ctx context.Context, op string, m Message) error {
	return i.c.transmit(ctx, op, m, 0)
}
func (i inner) SendWithin(ctx context.Context, op string, m Message, timeout time.Duration) error {
	return i.c.transmit(ctx, op, m, timeout)
}
func (i inner) Warn() { i.c.warn() }
func (i inner) Await(ctx context.Context, op string, take func() bool) error {
	return i.c.await(ctx, op, take)
}
func (i inner) Drain(ctx context.Context, op string) error { return i.c.drain(ctx, op) }
func (i inner) Fail(err error) error                       { return i.c.fail(err) }
func (i inner) Over() <-chan struct{}                      { return i.c.over }
func (i inner) Ended(op string) error                      { return i.c.ended(op) }
func (i inner) Acquire() bool                              { return i.c.closer.Acquire() }
func (i inner) Release()                                   { i.c.closer.Release() }
func (i inner) Inbox() link.Inbox[Message]                 { return i.c.mailbox.inbox }
func (i inner) Limits() *link.Limits                       { return &i.c.limits }
func (i inner) Socket() *sock.Conn                         { return i.c.sock }
