//go:build linux

package handles

import (
	"context"
	"testing"
	"time"

	"github.com/cuvmm/cuvmm/cuda"
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
	require.Eventually(t, func() bool { return f.page.fd.Use(func(int) error { return nil }) != nil }, Guard, time.Millisecond)
	require.Equal(t, slot, f.slot)
	require.NoError(t, f.file.Use(func(int) error { return nil }))
	require.NoError(t, f.file.Close())
}

// To unregister a page waits for all work of its context and holds up what is
// submitted meanwhile. So children that leave cause that for many pages at once.
func TestChildrenThatLeaveHoldNobodyUp(t *testing.T) {
	v := newVictim(t, ServerOptions{}, Options{})
	s, err := v.dev.NewStream(cuda.StreamOptions{})
	require.NoError(t, err)
	defer func() { require.NoError(t, s.Close()) }()
	given := func() int {
		v.server.pages.mu.Lock()
		defer v.server.pages.mu.Unlock()
		return len(v.server.pages.spent)
	}
	leave := func() {
		near, far := linked(t)
		over := make(chan error, 1)
		go func() { over <- v.server.ServeConn(context.Background(), near) }()
		_, _, fds := v.joined(far)
		require.NoError(t, closeAll(fds))
		require.NoError(t, far.Close())
		require.NoError(t, <-over)
	}
	v.machine.ResetCounts()
	v.machine.Hold(s.Handle())
	require.NoError(t, s.Memset(v.array.Ptr(), 0, 4))
	leave()
	require.Eventually(t, func() bool { return given() == 1 }, Guard, time.Millisecond)
	other, err := v.dev.NewStream(cuda.StreamOptions{})
	require.NoError(t, err)
	defer func() { require.NoError(t, other.Close()) }()
	require.NoError(t, other.Memset(v.array.Ptr()+4, 0, 4), "the GPU takes work")
	require.Zero(t, v.machine.Count("cuMemHostUnregister"))

	for range mostSpent - 2 {
		leave()
	}
	require.Eventually(t, func() bool { return given() == mostSpent-1 }, Guard, time.Millisecond)
	require.Zero(t, v.machine.Count("cuMemHostUnregister"))
	leave()
	require.Eventually(t, func() bool { return v.machine.Count("cuMemHostUnregister") > 0 }, Guard, time.Millisecond)
	require.Zero(t, given())
	require.NoError(t, v.dev.System().Drain(moment(t)), "the reclaimer does not wait for it")
	v.machine.Release(s.Handle())
	require.Eventually(t, func() bool { return v.machine.Count("cuMemHostUnregister") == mostSpent }, Guard, time.Millisecond)
	v.served()
}
