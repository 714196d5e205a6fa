package publish

import (
	"context"
	"time"

	"github.com/cuvmm/cuvmm/handles/peer"
	"github.com/cuvmm/cuvmm/internal/link"
	"github.com/cuvmm/cuvmm/internal/wait"
)

// conn is a connection that carries nothing else.
type conn struct {
	*peer.Conn
	in link.Conn[peer.Message]
}

func connOf(c *peer.Conn) conn { return conn{c, link.Of(c)} }

// writable waits until the peer has read, and returns false if the limit was reached
// before, or the connection ended.
func (c conn) writable(ctx context.Context, limit time.Time) bool {
	for moment := 5 * time.Millisecond; wait.SleepUntil(ctx, moment, limit); moment = min(2*moment, 50*time.Millisecond) {
		select {
		case <-c.in.Over():
			return false
		default:
		}
		if c.in.Socket().Writable() {
			return true
		}
	}
	return false
}
