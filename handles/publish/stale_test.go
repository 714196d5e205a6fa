//go:build linux

package publish

import (
	"testing"
	"time"

	"github.com/cuvmm/cuvmm/cuda"
	"github.com/cuvmm/cuvmm/cuda/sim"
	"github.com/cuvmm/cuvmm/handles/peer"
	"github.com/cuvmm/cuvmm/internal/core"
	"github.com/cuvmm/cuvmm/internal/driver"
	"github.com/cuvmm/cuvmm/internal/test/peertest"
	"github.com/cuvmm/cuvmm/vmm"
	"github.com/cuvmm/cuvmm/vmm/pool"
	"github.com/stretchr/testify/require"
)

// A follower whose publisher is gone keeps memory: an allocation that finds none says how
// much, and of what, and CloseStale gives it back, whether or not the client comes back.
func TestStaleFollowersGiveTheirMemoryBack(t *testing.T) {
	for what, o := range map[string]DialOptions{"that end": {}, "that would come back": {ComeBack: &ComeBack{First: time.Hour, Most: time.Hour}}} {
		t.Run(what, func(t *testing.T) {
			v := newVictim(t, ServerOptions{}, peer.Options{})
			ctx := peertest.Context(t)
			k, err := Dial(ctx, v.path, o)
			require.NoError(t, err)
			defer func() { require.NoError(t, k.Close()) }()
			f, err := Follow[uint32](ctx, k, v.dev, "numbers", FollowOptions{})
			require.NoError(t, err)
			require.NoError(t, f.Next(ctx))
			have := f.f.memory.Committed()
			s := newStream(t, v.dev)
			sys := core.SystemOf(v.dev)
			live, err := k.CloseStale(s)
			require.NoError(t, err)
			require.Zero(t, live, "its publisher lives")
			require.Empty(t, sys.Missing(0, core.Lack{}))

			require.NoError(t, v.server.Close())
			require.Eventually(t, func() bool { return f.State() != Live }, peertest.Guard, time.Millisecond)
			require.NoError(t, v.honest.Close())
			_, err = vmm.Create(v.dev, v.dev.TotalMemory(), vmm.Properties{})
			const says = `followers whose publishers are gone keep 2 MiB of "numbers": close them, or call publish.Client.CloseStale`
			require.ErrorContains(t, err, says)
			require.Empty(t, sys.Missing(1, core.Lack{}), "it is on another device")
			p, err := pool.New(v.dev, pool.Options{})
			require.NoError(t, err)
			defer func() { require.NoError(t, p.Close()) }()
			_, err = p.Alloc(pool.Request{Stream: s, Bytes: v.dev.TotalMemory() - 1<<20})
			require.ErrorContains(t, err, says)
			// If the device has the memory, no follower is to blame.
			heal := v.machine.Inject(sim.Fault{Call: "cuMemCreate", Result: cuda.Code(driver.OutOfMemory), Times: 1 << 20})
			_, created := vmm.Create(v.dev, 2<<20, vmm.Properties{})
			_, err = p.Alloc(pool.Request{Stream: s, Bytes: 2 << 20})
			heal()
			for _, err := range []error{created, err} {
				require.ErrorContains(t, err, "the software driver has that much")
				require.NotContains(t, err.Error(), "followers")
			}

			release := v.machine.Hold(s.Handle())
			require.NoError(t, s.Memset(f.Array().Ptr(), 0, 4))
			_, err = k.CloseStale()
			require.ErrorIs(t, err, cuda.ErrInvalidArgument)
			n, err := k.CloseStale(s)
			require.NoError(t, err)
			require.EqualValues(t, have, n)
			require.ErrorIs(t, f.Next(ctx), cuda.ErrClosed)
			select {
			case <-f.Released().Done():
				require.Fail(t, "the stream may use the memory")
			case <-time.After(10 * time.Millisecond):
			}
			n, err = k.CloseStale(s)
			require.NoError(t, err)
			require.Zero(t, n)
			release()
			require.NoError(t, f.Released().Wait(ctx))
			require.NotContains(t, sys.Missing(0, core.Lack{}), "followers")
		})
	}
}

// A follower that cannot be closed does not keep CloseStale from the others.
func TestCloseStaleGoesOn(t *testing.T) {
	v := newVictim(t, ServerOptions{}, peer.Options{})
	ctx := peertest.Context(t)
	k, err := Dial(ctx, v.path, DialOptions{})
	require.NoError(t, err)
	all := make([]*Follower[uint32], 3)
	for i := range all {
		all[i], err = Follow[uint32](ctx, k, v.dev, "numbers", FollowOptions{})
		require.NoError(t, err)
		require.NoError(t, all[i].Next(ctx))
	}
	require.NoError(t, k.Close())
	for _, f := range all {
		require.Eventually(t, func() bool { return f.State() == Ended }, peertest.Guard, time.Millisecond)
	}
	s := newStream(t, v.dev)
	// The fault is for CloseStale: the publisher's side of the end records events, too.
	require.Eventually(t, func() bool { return len(v.p.Stats().Followers) == 1 }, peertest.Guard, time.Millisecond)
	require.NoError(t, v.dev.System().Drain(ctx))
	v.machine.Inject(sim.Fault{Call: "cuEventRecord", Result: cuda.Code(driver.Unknown), Times: 1})
	n, err := k.CloseStale(s)
	require.Error(t, err)
	require.Equal(t, 2*int(all[0].f.memory.Committed()), n)
	n, err = k.CloseStale(s)
	require.NoError(t, err)
	require.Equal(t, 2<<20, n)
	for _, f := range all {
		require.NoError(t, f.Released().Wait(ctx))
	}
}

// TakeOver needs the follower that it was called for.
func TestCloseStaleLeavesWhatTakeOverWasCalledFor(t *testing.T) {
	o := newOrphans(t)
	ctx := peertest.Context(t)
	o.numbers.f.lengths <- struct{}{} // TakeOver goes no further
	server := NewServer(ServerOptions{})
	o.endPublisher()
	taken := make(chan error, 1)
	go func() {
		_, err := TakeOver(ctx, server, o.numbers, TakeOverOptions{})
		taken <- err
	}()
	require.Eventually(t, func() bool { return o.numbers.f.taking.Err() != nil && o.more.State() == Ended }, peertest.Guard, time.Millisecond)
	n, err := o.client.CloseStale(newStream(t, o.numbers.f.dev))
	require.NoError(t, err)
	require.EqualValues(t, o.more.f.memory.Committed(), n)
	o.numbers.f.lengths.Give()
	require.NoError(t, <-taken)
	require.NoError(t, server.Close())
	require.NoError(t, o.numbers.Array().Close())
}
