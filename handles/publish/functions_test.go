//go:build linux

package publish

import (
	"context"
	"log/slog"
	"runtime"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/cuvmm/cuvmm/cuda"
	"github.com/cuvmm/cuvmm/handles/peer"
	"github.com/cuvmm/cuvmm/internal/peertest"
	"github.com/cuvmm/cuvmm/internal/testlog"
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

// A goroutine may close its stream while another announces what it appended there.
func TestAnAnnouncementBesideStreamsThatClose(t *testing.T) {
	v := newVictim(t, ServerOptions{}, peer.Options{})
	for range 100 {
		var all sync.WaitGroup
		for range 4 {
			all.Go(func() {
				s, err := v.dev.NewStream(cuda.StreamOptions{})
				if err != nil {
					t.Error(err)
					return
				}
				if _, err := v.array.Append(s, []uint32{1, 2, 3}); err != nil {
					t.Error(err)
				}
				if err := s.Close(); err != nil {
					t.Error(err)
				}
			})
			all.Go(func() {
				if err := v.p.AnnounceAppended(peertest.Context(t)); err != nil {
					t.Error(err)
				}
			})
		}
		all.Wait()
	}
	require.NoError(t, v.p.AnnounceAppended(peertest.Context(t)))
	for v.honest.Len() < v.array.Len() {
		require.NoError(t, v.honest.Next(peertest.Context(t)))
	}
}

// It waits for a stream whose Close waits for its work, no longer than its context.
func TestAnAnnouncementWaitsForAStreamThatCloses(t *testing.T) {
	v := newVictim(t, ServerOptions{}, peer.Options{})
	s, err := v.dev.NewStream(cuda.StreamOptions{})
	require.NoError(t, err)
	goOn := v.stand(s)
	_, err = v.array.Append(s, []uint32{1, 2, 3})
	require.NoError(t, err)
	closed, announced := make(chan error, 1), make(chan error, 1)
	go func() { closed <- s.Close() }()
	require.Eventually(t, func() bool { _, err := s.Done(); return err != nil }, time.Minute, time.Millisecond)
	short, cancel := context.WithTimeout(context.Background(), time.Second)
	defer cancel()
	err = v.p.AnnounceAppended(short)
	require.ErrorIs(t, err, context.DeadlineExceeded)
	require.ErrorContains(t, err, "closing")
	go func() { announced <- v.p.AnnounceAppended(peertest.Context(t)) }()
	goOn()
	require.NoError(t, <-announced)
	require.NoError(t, <-closed)
	for v.honest.Len() < v.array.Len() {
		require.NoError(t, v.honest.Next(peertest.Context(t)))
	}
}
