//go:build linux

package publish

import (
	"log/slog"
	"runtime"
	"sync/atomic"
	"testing"

	"github.com/cuvmm/cuvmm/cuda"
	"github.com/cuvmm/cuvmm/handles/peer"
	"github.com/cuvmm/cuvmm/internal/test/peertest"
	"github.com/cuvmm/cuvmm/internal/test/testlog"
	"github.com/stretchr/testify/require"
)

// A policy that panics, or returns what is no access, grants nothing.
func TestAPolicyThatFailsGrantsNothing(t *testing.T) {
	var said testlog.Log
	var policy atomic.Pointer[func() Access] // the race detector does not know what a socket orders
	write := func() Access { return WriteAccess }
	policy.Store(&write)
	v := newVictim(t, ServerOptions{Log: slog.New(slog.NewTextHandler(&said, nil)),
		Authorize: func(peer.Credentials, bool, string) Access { return (*policy.Load())() }}, peer.Options{})
	for what, f := range map[string]func() Access{
		"panicked": func() Access { panic("a mistake") },
		"ended its goroutine": func() Access {
			runtime.Goexit()
			return WriteAccess
		},
		"returned": func() Access { return 77 },
	} {
		policy.Store(&f)
		k := NewClient(v.dial())
		all, err := k.List(peertest.Context(t))
		require.NoError(t, err)
		require.Empty(t, all)
		_, err = Follow[uint32](peertest.Context(t), k, v.dev, "numbers", FollowOptions{})
		require.ErrorIs(t, err, ErrUnknown)
		require.NoError(t, k.Close())
		require.Contains(t, said.String(), what)
	}
	require.NoError(t, v.honest.Err())
}

// Without a log a panic goes to the default one, and the memory is waited for as if the
// function had named no stream.
func TestAFailureOfQuiesceIsLogged(t *testing.T) {
	var said testlog.Log
	before := slog.Default()
	slog.SetDefault(slog.New(slog.NewTextHandler(&said, nil)))
	defer slog.SetDefault(before)
	v := newVictim(t, ServerOptions{}, peer.Options{})
	for _, mistake := range []func(){func() { panic("a mistake") }, runtime.Goexit} {
		before := said.String()
		f := v.second(FollowOptions{Quiesce: func(int) []*cuda.Stream { mistake(); return nil }})
		require.NoError(t, v.p.Shrink(v.array.Len()-10))
		require.NoError(t, v.p.Settle(peertest.Context(t)))
		require.NoError(t, f.Err())
		require.Contains(t, said.String()[len(before):], "publish.FollowOptions.Quiesce")
		require.NoError(t, f.Close())
	}
}

// A connection that ends while a function of the user runs leaves the state as it is:
// ended, or stale.
func TestTheStateWhenTheConnectionEndsInAFunction(t *testing.T) {
	v := newVictim(t, ServerOptions{}, peer.Options{})
	c := v.dial()
	k := NewClient(c)
	called, returns := make(chan struct{}), make(chan struct{})
	f, err := Follow[uint32](peertest.Context(t), k, v.dev, "numbers", FollowOptions{Quiesce: func(int) []*cuda.Stream {
		close(called)
		<-returns
		return nil
	}})
	require.NoError(t, err)
	require.NoError(t, f.Next(peertest.Context(t)))
	require.NoError(t, v.p.Shrink(10))
	<-called
	require.NoError(t, c.Close())
	<-f.f.ended
	require.Equal(t, Ended, f.State())
	close(returns)
	for err = nil; err == nil; {
		err = f.Next(peertest.Context(t))
	}
	require.ErrorIs(t, err, cuda.ErrClosed)
	require.Equal(t, Ended, f.State())
	require.NoError(t, f.Close())
	require.NoError(t, k.Close())
}
