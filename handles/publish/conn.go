package publish

import (
	"context"
	"time"

	"github.com/cuvmm/cuvmm/handles/peer"
	"github.com/cuvmm/cuvmm/internal/link"
	"github.com/cuvmm/cuvmm/internal/wait"
)

// conn is a connection that carries the messages of publications.
type conn struct {
	*peer.Conn
	in link.Conn[peer.Message]
}

func connOf(c *peer.Conn) conn { return conn{c, link.Of(c)} }

// writable waits until the peer has read. It returns false if the limit is reached
// first, or the connection ends.
func (c conn) writable(ctx context.Context, limit time.Time) bool {
	for backoff := (wait.Backoff{}); backoff.Sleep(ctx, limit); {
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
