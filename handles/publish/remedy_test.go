//go:build linux

package publish

import (
	"context"
	"testing"
	"time"

	"github.com/cuvmm/cuvmm/cuda"
	"github.com/cuvmm/cuvmm/handles"
	"github.com/cuvmm/cuvmm/handles/peer"
	"github.com/cuvmm/cuvmm/internal/test/peertest"
	"github.com/cuvmm/cuvmm/vmm"
	"github.com/stretchr/testify/require"
)

// Errors of publications name the remedy that helps, and count elements.
func TestRemediesOfPublishing(t *testing.T) {
	v := newVictim(t, ServerOptions{}, peer.Options{}, func(l *limits) { l.followers = 1 })
	t.Run("more than the array has", func(t *testing.T) {
		err := v.p.Announce(t.Context(), 2000)
		require.ErrorIs(t, err, cuda.ErrOutOfRange)
		require.ErrorContains(t, err, "a length of 2000, where 1000 are in use")
	})
	t.Run("a follower's array", func(t *testing.T) {
		err := v.honest.Array().Close()
		require.ErrorIs(t, err, cuda.ErrInUse)
		require.ErrorContains(t, err, `memory of the follower of publication "numbers"`)
		require.ErrorContains(t, err, "close the follower")
	})
	t.Run("too many followers", func(t *testing.T) {
		k := NewClient(v.dial())
		_, err := Follow[uint32](peertest.Context(t), k, v.dev, "letters", FollowOptions{})
		require.ErrorIs(t, err, ErrUnknown)
		require.ErrorContains(t, err, "List returns what is published")
		f, err := Follow[uint32](peertest.Context(t), k, v.dev, "numbers", FollowOptions{})
		require.NoError(t, err)
		_, err = Follow[uint32](peertest.Context(t), k, v.dev, "numbers", FollowOptions{})
		require.ErrorIs(t, err, peer.ErrTooLarge)
		require.ErrorContains(t, err, "close followers that are not needed")
		require.NoError(t, f.Close())
		require.NoError(t, k.Close())
	})
	t.Run("a context that has ended", func(t *testing.T) {
		ended, cancel := context.WithCancel(t.Context())
		cancel()
		for _, err := range []error{v.p.Rewrite(ended, RewriteOptions{}), v.p.Announce(ended, 1000)} {
			require.ErrorIs(t, err, context.Canceled)
			require.ErrorContains(t, err, `publication "numbers", which was not changed`)
			require.NotContains(t, err.Error(), "another change")
		}
	})
	t.Run("a manifest that none can have", func(t *testing.T) {
		_, err := Follow[uint32](peertest.Context(t), NewClient(v.dial()), v.dev, "numbers", FollowOptions{Expect: &handles.Manifest{Bytes: -1}})
		require.ErrorIs(t, err, cuda.ErrInvalidArgument)
		require.ErrorIs(t, err, handles.ErrManifest)
		require.ErrorContains(t, err, "FollowOptions.Expect")
	})
	t.Run("what Open waits for", func(t *testing.T) {
		opens := func() error {
			k := NewClient(v.dial())
			defer func() { require.NoError(t, k.Close()) }()
			briefly, cancel := context.WithTimeout(peertest.Context(t), 50*time.Millisecond)
			defer cancel()
			_, err := Open[uint32](briefly, k, v.dev, "numbers", handles.ImportOptions{})
			require.ErrorIs(t, err, peer.ErrTimeout)
			return err
		}
		require.NoError(t, v.honest.Release())
		require.NoError(t, v.p.Rewrite(peertest.Context(t), RewriteOptions{}))
		require.ErrorContains(t, opens(), "the publisher rewrites the elements")
		require.NoError(t, v.p.Announce(peertest.Context(t), 1000))
		s, err := vmm.Suspend(peertest.Context(t), vmm.SuspendOptions{}, v.array)
		require.NoError(t, err)
		require.ErrorContains(t, opens(), "the publisher has suspended the memory")
		require.NoError(t, s.Resume(peertest.Context(t)))
		require.NoError(t, v.honest.Next(peertest.Context(t)))
	})
	t.Run("what was withdrawn", func(t *testing.T) {
		p, err := Array(v.server, "more", v.array)
		require.NoError(t, err)
		require.NoError(t, p.Withdraw())
		for _, err := range []error{p.Announce(t.Context(), 1000), p.Settle(t.Context())} {
			require.ErrorIs(t, err, cuda.ErrClosed)
			require.ErrorContains(t, err, `publication "more", which was withdrawn`)
			require.NotContains(t, err.Error(), "Close")
		}
	})
	t.Run("a list of a publisher that is gone", func(t *testing.T) {
		k, err := Dial(peertest.Context(t), v.path, DialOptions{ComeBack: &ComeBack{}})
		require.NoError(t, err)
		defer func() { require.NoError(t, k.Close()) }()
		once := NewClient(v.dial())
		require.NoError(t, v.server.Close())
		err = once.Await(peertest.Context(t), "numbers")
		require.ErrorIs(t, err, peer.ErrGone)
		require.ErrorContains(t, err, "publish.Client.Await: ")
		require.NoError(t, once.Close())
		require.Eventually(t, func() bool { _, err = k.List(t.Context()); return err != nil }, peertest.Guard, time.Millisecond)
		require.ErrorIs(t, err, peer.ErrGone)
		require.ErrorContains(t, err, "connects again by itself")
	})
}

// Options that can never be are refused before the server is asked, and a reason of the
// server's is quoted once.
func TestOptionsAreCheckedFirst(t *testing.T) {
	v := newVictim(t, ServerOptions{}, peer.Options{})
	ctx := peertest.Context(t)
	k := NewClient(v.dial())
	defer func() { require.NoError(t, k.Close()) }()
	for _, o := range []FollowOptions{{Align: 3}, {Align: -1}, {MaxChunks: -1}, {Reserve: -1}, {MaxWait: -1}} {
		_, err := Follow[uint32](ctx, k, v.dev, "nothing", o)
		require.ErrorIs(t, err, cuda.ErrInvalidArgument)
	}
	for _, o := range []handles.ImportOptions{{Align: 3}, {Align: -1}, {MaxChunks: -1}, {MaxBytes: -1}} {
		_, err := Open[uint32](ctx, k, v.dev, "nothing", o)
		require.ErrorIs(t, err, cuda.ErrInvalidArgument)
	}
	_, err := Follow[uint32](ctx, k, v.dev, "nothing", FollowOptions{})
	require.ErrorIs(t, err, ErrUnknown)
	require.ErrorContains(t, err, `no publication of the name "nothing"`)
	require.NotContains(t, err.Error(), `\"`)
}
