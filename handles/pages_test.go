//go:build linux

package handles

import (
	"context"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// A child gets no page that another had.
func TestChildrenDoNotSharePages(t *testing.T) {
	v := newVictim(t, ServerOptions{}, Options{})
	var was []*page
	for range 2 {
		near, file, err := Pair(Options{})
		require.NoError(t, err)
		far, err := Inherit(file, Options{})
		require.NoError(t, err)
		over := make(chan error, 1)
		go func() { over <- v.server.ServeConn(context.Background(), near) }()
		to, _, fds := v.joined(far)
		require.NoError(t, closeAll(fds))
		v.p.mu.Lock()
		for s := range v.p.followers {
			if s.token == to {
				was = append(was, s.page)
			}
		}
		v.p.mu.Unlock()
		require.NoError(t, far.Close())
		require.NoError(t, <-over)
		time.Sleep(100 * time.Millisecond)
	}
	require.NotSame(t, was[0], was[1])
}
