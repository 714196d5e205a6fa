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

// What a follower is told of its page stays so, whatever becomes of the page
// before it is told.
func TestAPageThatIsGivenBackBeforeTheFollowerHearsOfIt(t *testing.T) {
	v := newVictim(t, ServerOptions{}, Options{})
	near, file, err := Pair(Options{})
	require.NoError(t, err)
	defer near.Close()
	require.NoError(t, file.Close())
	ss := &session{server: v.server, conn: near, followers: map[token]*subscriber{}}
	f, err := v.p.join(moment(t), ss, 0)
	require.NoError(t, err)
	v.server.telling.Done() // it is never told
	slot := f.slot
	require.NoError(t, v.p.Withdraw())
	require.Eventually(t, func() bool { return f.page.fd.Use(func(int) error { return nil }) != nil }, 10*time.Second, time.Millisecond)
	require.Equal(t, slot, f.slot)
	require.NoError(t, f.file.Use(func(int) error { return nil }))
	require.NoError(t, f.file.Close())
}
