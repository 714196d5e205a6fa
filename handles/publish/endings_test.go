//go:build linux

package publish

import (
	"context"
	"fmt"
	"testing"
	"time"

	"github.com/cuvmm/cuvmm/cuda"
	"github.com/cuvmm/cuvmm/cuda/sim"
	"github.com/cuvmm/cuvmm/handles/peer"
	"github.com/cuvmm/cuvmm/internal/driver"
	"github.com/cuvmm/cuvmm/internal/test/peertest"
	"github.com/cuvmm/cuvmm/vmm"
	"github.com/stretchr/testify/require"
)

func newStream(t *testing.T, d *cuda.Device) *cuda.Stream {
	s, err := d.NewStream(cuda.StreamOptions{})
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, s.Close()) })
	return s
}

// stand has a stream stand still until the test's end, or until it is released.
func (v *victim) stand(s *cuda.Stream) (release func()) {
	v.machine.Hold(s.Handle())
	require.NoError(v, s.Memset(v.array.Ptr()+cuda.Ptr(4*v.standing), 0, 4))
	v.standing++
	v.Cleanup(func() { v.machine.Release(s.Handle()) })
	return func() { v.machine.Release(s.Handle()) }
}

// second is another follower.
func (v *victim) second(o FollowOptions) *Follower[uint32] {
	k := NewClient(v.dial())
	v.Cleanup(func() { require.NoError(v, k.Close()) })
	f, err := Follow[uint32](peertest.Context(v), k, v.dev, "numbers", o)
	require.NoError(v, err)
	require.NoError(v, f.Next(peertest.Context(v)))
	return f
}

// CloseAfter waits for the streams that are named, and for no other.
func TestAFollowerClosesAfterItsStreams(t *testing.T) {
	v := newVictim(t, ServerOptions{}, peer.Options{})
	own, other := newStream(t, v.dev), newStream(t, v.dev)
	f := v.second(FollowOptions{})
	require.ErrorIs(t, f.CloseAfter(), cuda.ErrInvalidArgument)
	g, err := own.WithCapture(cuda.CaptureOptions{Mode: cuda.CaptureRelaxed}, func() error {
		require.ErrorIs(t, f.CloseAfter(own), cuda.ErrCapturing)
		return own.Memset(v.array.Ptr(), 0, 4)
	})
	require.NoError(t, err)
	require.NoError(t, g.Close())
	v.announce(10) // it goes on
	for f.Len() != v.array.Len() {
		require.NoError(t, f.Next(peertest.Context(t)))
	}

	mapped := v.machine.Live()[sim.KindMapping]
	goOn := v.stand(other)
	releaseOwn := v.stand(own)
	require.NoError(t, f.CloseAfter(own))
	require.NoError(t, f.CloseAfter(own), "once")
	require.ErrorIs(t, f.Next(peertest.Context(t)), cuda.ErrClosed)
	require.Eventually(t, func() bool { return len(v.p.Stats().Followers) == 1 }, peertest.Guard, time.Millisecond)
	require.Equal(t, mapped, v.machine.Live()[sim.KindMapping], "its stream is not done")
	releaseOwn()
	require.Eventually(t, func() bool { return v.machine.Live()[sim.KindMapping] < mapped }, peertest.Guard, time.Millisecond, "an unrelated stream is waited for")
	goOn()
	require.NoError(t, v.dev.System().Drain(peertest.Context(t)))
	require.NoError(t, f.Released().Wait(peertest.Context(t)))
	require.NoError(t, f.Close())
	v.served()
}

// A publication is released when it was withdrawn, the work behind its announcements is
// done, and nothing is being sent.
func TestAPublicationIsReleased(t *testing.T) {
	v := newVictim(t, ServerOptions{}, peer.Options{})
	released := v.p.Released()
	pending := func(why string) {
		t.Helper()
		select {
		case <-released.Done():
			require.FailNow(t, "released: "+why)
		default:
		}
	}
	s := newStream(t, v.dev)
	goOn := v.stand(s)
	require.NoError(t, v.p.Announce(peertest.Context(t), 1000, s))
	pending("it is published")
	require.NoError(t, v.p.Withdraw())
	require.Error(t, v.dev.System().Drain(canceled(t)), "its stream waits")
	pending("its last generation is not written")
	goOn()
	require.NoError(t, released.Wait(peertest.Context(t)))
	require.NoError(t, v.p.Withdraw())
	require.NoError(t, v.p.Released().Wait(peertest.Context(t)), "it stays released")
	require.Zero(t, v.p.users.Load())
}

// Server.Close waits for a publication that another goroutine is withdrawing, too.
func TestCloseWaitsForAWithdrawal(t *testing.T) {
	v := newVictim(t, ServerOptions{}, peer.Options{})
	v.p.users.Add(1) // Withdraw, which has yet to release the memory
	require.NoError(t, v.p.Withdraw())
	over := make(chan error, 1)
	go func() { over <- v.server.Close() }()
	require.Eventually(t, func() bool { return v.p.users.Load() == 1 }, peertest.Guard, time.Millisecond)
	select {
	case err := <-over:
		t.Fatalf("%v, while the memory is not released", err)
	case <-time.After(20 * time.Millisecond):
	}
	v.p.drop()
	require.NoError(t, <-over)
}

// A follower's goroutine holds memory that it is sending: it is waited for.
func TestAPublicationThatIsBeingSentIsNotReleased(t *testing.T) {
	v := newVictim(t, ServerOptions{}, peer.Options{})
	require.EqualValues(t, 3, v.p.users.Load(), "the publication, its timeline and the follower")
	v.p.users.Add(1) // another follower, whose goroutine is sending
	require.NoError(t, v.p.Withdraw())
	require.NoError(t, v.dev.System().Drain(peertest.Context(t)))
	require.Eventually(t, func() bool { return v.p.users.Load() == 1 }, peertest.Guard, time.Millisecond)
	select {
	case <-v.p.Released().Done():
		require.FailNow(t, "memory is still being sent")
	default:
	}
	v.p.drop()
	require.NoError(t, v.p.Released().Wait(peertest.Context(t)))
}

// A stream that could not be closed is reported by Released, and closed by Server.Close.
func TestAPublicationWhoseStreamCannotBeClosed(t *testing.T) {
	v := newVictim(t, ServerOptions{}, peer.Options{})
	v.machine.Inject(sim.Fault{Call: "cuStreamDestroy", Result: 1, Times: 1})
	released := v.p.Released()
	require.NoError(t, v.p.Withdraw())
	require.Error(t, released.Wait(peertest.Context(t)))
	require.Error(t, v.dev.System().Drain(peertest.Context(t)))
	again := v.p.Released()
	require.NoError(t, v.server.Close())
	require.NoError(t, again.Wait(peertest.Context(t)), "the server has closed it")
	require.NoError(t, v.p.Released().Wait(peertest.Context(t)))
}

func canceled(t *testing.T) context.Context {
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	return ctx
}

// The teardown that CloseAfter leaves may fail, and is taken up by Close.
func TestATeardownThatFails(t *testing.T) {
	for _, call := range []string{"cuMemHostUnregister", "cuMemUnmap", "cuMemRelease", "cuMemAddressFree", "cuStreamDestroy"} {
		for what, again := range map[string]func(*Follower[uint32], *cuda.Stream) error{
			"Close":      func(f *Follower[uint32], _ *cuda.Stream) error { return f.Close() },
			"CloseAfter": func(f *Follower[uint32], s *cuda.Stream) error { return f.CloseAfter(s) },
		} {
			t.Run(call+", "+what, func(t *testing.T) {
				v := newVictim(t, ServerOptions{}, peer.Options{})
				own := newStream(t, v.dev)
				f := v.second(FollowOptions{})
				v.machine.Inject(sim.Fault{Call: call, Result: 999, Times: 1})
				require.NoError(t, f.CloseAfter(own))
				released := f.Released()
				require.Error(t, v.dev.System().Drain(peertest.Context(t)))
				require.Error(t, released.Wait(peertest.Context(t)))
				require.NoError(t, again(f, own))
				require.NoError(t, v.dev.System().Drain(peertest.Context(t)))
				require.NoError(t, f.Released().Wait(peertest.Context(t)))
				v.served()
			})
		}
	}
}

// A publisher that lives and never finishes holds up a follower that has a limit
// for no longer than that.
func TestAPublisherThatNeverFinishes(t *testing.T) {
	for what, cpu := range map[string]bool{"a stream": false, "the CPU": true} {
		t.Run(what, func(t *testing.T) {
			v := newVictim(t, ServerOptions{}, peer.Options{})
			writer, reader := newStream(t, v.dev), newStream(t, v.dev)
			f := v.second(FollowOptions{MaxWait: 50 * time.Millisecond})
			defer func() { require.NoError(t, f.Close()) }()
			goOn := v.stand(writer)
			require.NoError(t, v.array.Resize(nil, 2000))
			require.NoError(t, v.p.Announce(peertest.Context(t), 2000, writer))
			if cpu {
				_ = f.Next(peertest.Context(t))
			} else {
				require.NoError(t, f.Next(peertest.Context(t), reader))
				require.NoError(t, reader.Synchronize(), "it waits for ever")
				require.ErrorIs(t, f.Err(), ErrUnfinished)
			}
			err := f.Next(peertest.Context(t))
			require.ErrorIs(t, err, ErrStalled)
			require.ErrorIs(t, f.Err(), ErrStalled)
			require.ErrorContains(t, err, "MaxWait")
			require.Equal(t, 1000, f.Len(), "what was complete")
			require.Eventually(t, func() bool { return len(v.p.Stats().Followers) == 1 }, peertest.Guard, time.Millisecond, "it has left")
			goOn()
			v.served()
			require.Equal(t, 1000, f.Len())
			require.NoError(t, f.Order(reader))
			require.NoError(t, reader.Synchronize())
		})
	}
}

// A publisher within the limit is never cut off.
func TestAWaitWithinItsLimit(t *testing.T) {
	v := newVictim(t, ServerOptions{}, peer.Options{})
	writer, reader := newStream(t, v.dev), newStream(t, v.dev)
	f := v.second(FollowOptions{MaxWait: peertest.Guard})
	defer func() { require.NoError(t, f.Close()) }()
	for range 5 {
		goOn := v.stand(writer)
		require.NoError(t, v.array.Resize(nil, v.array.Len()+10))
		require.NoError(t, v.p.Announce(peertest.Context(t), v.array.Len(), writer))
		require.NoError(t, f.Next(peertest.Context(t), reader))
		goOn()
		require.NoError(t, reader.Synchronize())
	}
	require.NoError(t, f.Err())
	v.served()
}

// Withdraw waits neither for an announcement that waits for the GPU nor, where the
// end cannot be marked, for the stream.
func TestWithdrawWaitsForNothing(t *testing.T) {
	t.Run("an announcement", func(t *testing.T) {
		m, sys := sim.Open(t, sim.Options{Devices: []sim.DeviceOptions{{Attributes: map[int]int{int(driver.AttrStreamMemOps64): 0}}}})
		d := sys.Devices()[0]
		server := NewServer(ServerOptions{})
		a, err := vmm.NewArray[uint32](d, vmm.BufferOptions{Reserve: 8 << 20})
		require.NoError(t, err)
		require.NoError(t, a.Resize(nil, 1000))
		p, err := Array(server, "x", a)
		require.NoError(t, err)
		s := newStream(t, d)
		release := m.Hold(s.Handle())
		require.NoError(t, s.Memset(a.Ptr(), 0, 4))
		over := make(chan error, 1)
		go func() { over <- p.Announce(context.Background(), 1000, s) }()
		require.Eventually(t, func() bool { return len(p.changes) == 1 }, peertest.Guard, time.Millisecond)
		peertest.InTime(t, "Withdraw", p.Withdraw)
		require.ErrorIs(t, <-over, cuda.ErrClosed)
		release()
		require.NoError(t, server.Close())
		require.NoError(t, a.Close())
	})
	t.Run("its own stream", func(t *testing.T) {
		v := newVictim(t, ServerOptions{}, peer.Options{})
		own := newStream(t, v.dev)
		goOn := v.stand(own)
		require.NoError(t, v.p.Announce(peertest.Context(t), 1000, own))
		v.machine.Inject(sim.Fault{Call: "cuEventRecord", Result: 1})
		over := make(chan error, 1)
		go func() { over <- v.p.Withdraw() }()
		select {
		case err := <-over:
			require.Error(t, err)
		case <-time.After(peertest.Guard):
			require.FailNow(t, "Withdraw waits for the GPU")
		}
		v.machine.ClearFaults()
		goOn()
	})
}

// After a Resize to less than what is shown, Announce refuses.
func TestAnnounceShowsNoLess(t *testing.T) {
	for _, n := range []int{10, 1 << 20} { // one chunk, and two
		t.Run(fmt.Sprint(n), func(t *testing.T) {
			v := newVictim(t, ServerOptions{}, peer.Options{})
			require.NoError(t, v.array.Resize(nil, n))
			if n < 1000 {
				require.NoError(t, v.p.Shrink(n))
			}
			require.NoError(t, v.p.Announce(peertest.Context(t), n))
			require.NoError(t, v.array.Resize(nil, 5))
			err := v.p.Announce(peertest.Context(t), 5)
			require.ErrorIs(t, err, cuda.ErrInvalidArgument)
			require.ErrorContains(t, err, "use Shrink")
			require.Equal(t, n, v.p.Stats().Length)
			require.NoError(t, v.p.Shrink(5))
			require.NoError(t, v.array.Resize(nil, 7))
			require.NoError(t, v.p.Announce(peertest.Context(t), 7))
			require.Equal(t, 7, v.p.Stats().Length)
		})
	}
}
