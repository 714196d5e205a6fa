//go:build linux

package publish

import (
	"testing"
	"time"

	"github.com/cuvmm/cuvmm/cuda"
	"github.com/cuvmm/cuvmm/cuda/sim"
	"github.com/cuvmm/cuvmm/handles/peer"
	"github.com/cuvmm/cuvmm/internal/test/peertest"
	"github.com/cuvmm/cuvmm/vmm"
	"github.com/stretchr/testify/require"
)

// A follower's own limit of chunks is its error alone.
func TestALimitOfChunksIsTheFollowersErrorAlone(t *testing.T) {
	v := newVictim(t, ServerOptions{}, peer.Options{})
	k := NewClient(v.dial())
	defer func() { require.NoError(t, k.Close()) }()
	a, err := Follow[uint32](peertest.Context(t), k, v.dev, "numbers", FollowOptions{MaxChunks: 1})
	require.NoError(t, err)
	defer func() { require.NoError(t, a.Close()) }()
	b, err := Follow[uint32](peertest.Context(t), k, v.dev, "numbers", FollowOptions{})
	require.NoError(t, err)
	defer func() { require.NoError(t, b.Close()) }()
	require.NoError(t, a.Next(peertest.Context(t)))
	require.NoError(t, b.Next(peertest.Context(t)))
	v.announce(1_000_000)
	require.ErrorIs(t, a.Next(peertest.Context(t)), peer.ErrTooLarge)
	require.NoError(t, b.Next(peertest.Context(t)), "the other follower of the same client")
	require.NoError(t, b.Err())
}

// A follower's own limit holds, whatever the server sends.
func TestARangeBeyondTheCap(t *testing.T) {
	k, d := fake(t, func(c *peer.Conn, d *cuda.Device, n uint32) {
		_ = c.Send(peertest.Context(t), pack(&accepted{number: n, token: token{1}, reserved: 1 << 40, about: about(d)}, memoryFile(t, 4096, sealed)))
	})
	f, err := Follow[uint32](peertest.Context(t), k, d, "numbers", FollowOptions{Reserve: 2 << 20})
	if err == nil {
		defer f.Close()
	}
	require.ErrorIs(t, err, peer.ErrProtocol)
}

// A follower that acknowledges that memory is given back maps it nowhere.
func TestFollowedMemoryIsNotMoved(t *testing.T) {
	v := newVictim(t, ServerOptions{}, peer.Options{})
	v.announce(1_000_000)
	require.NoError(t, v.honest.Next(peertest.Context(t)))
	b, err := v.honest.Array().Buffer().Move(vmm.MoveOptions{Reserve: 64 << 20})
	if err == nil {
		defer b.Close()
		require.NoError(t, v.p.Shrink(1000))
		require.NoError(t, v.p.Settle(peertest.Context(t)))
		require.Equal(t, 2<<20, b.Stats().Committed, "the publisher was told that no follower has it")
	}
	require.ErrorIs(t, err, cuda.ErrNotPermitted)
}

// A wait that comes after the publisher's end was dealt with goes on, and so does
// one where the driver fails to say whether it has.
func TestWaitsAfterTheEnd(t *testing.T) {
	v := newVictim(t, ServerOptions{}, peer.Options{})
	m, f := v.machine, v.honest.f
	mark, err := f.mark("test", 1<<40)
	require.NoError(t, err)
	mark.Release()
	m.Inject(sim.Fault{Call: "cuStreamQuery", Result: 400, Times: 3})
	f.letGo()
	m.ClearFaults()
	done, err := f.stream.Done()
	require.NoError(t, err)
	require.True(t, done)
	f.slot.word(completeWord).Store(1) // a last write of the publisher's
	f.mu.Lock()
	f.sub.phase = phaseEnded
	f.mu.Unlock()
	mark, err = f.mark("test", 1<<41)
	require.NoError(t, err)
	mark.Release()
	require.Eventually(t, func() bool { done, err := f.stream.Done(); return err == nil && done }, peertest.Guard, time.Millisecond)
	f.mu.Lock()
	f.sub.phase = phaseFollowing
	f.mu.Unlock()
}
