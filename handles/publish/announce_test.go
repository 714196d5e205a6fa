//go:build linux

package publish

import (
	"context"
	"testing"
	"time"

	"github.com/cuvmm/cuvmm/cuda"
	"github.com/cuvmm/cuvmm/cuda/sim"
	"github.com/cuvmm/cuvmm/handles/peer"
	"github.com/cuvmm/cuvmm/internal/driver"
	"github.com/cuvmm/cuvmm/internal/exchange"
	"github.com/cuvmm/cuvmm/internal/test/gputest"
	"github.com/cuvmm/cuvmm/internal/test/peertest"
	"github.com/cuvmm/cuvmm/vmm"
	"github.com/stretchr/testify/require"
	"golang.org/x/sync/errgroup"
)

// A follower dies while an announcement is under way.
func TestAFollowerThatDiesDuringAnAnnouncement(t *testing.T) {
	v := newVictim(t, ServerOptions{}, peer.Options{})
	c := v.dial()
	to, u, fds := v.joined(c)
	require.NoError(t, peer.CloseAll(fds))
	require.NoError(t, c.Send(peertest.Context(t), pack(&done{to, u.serial, statusOK, 1, ""})))
	require.NoError(t, v.p.Settle(peertest.Context(t)))
	var ss *session
	for f := range v.p.followers {
		if f.token == to {
			ss = f.on
		}
	}
	require.NoError(t, v.array.Resize(nil, 1_000_000))
	// An announcement holds changes while it exports; the follower dies then.
	v.p.changes <- struct{}{}
	require.NoError(t, c.Close())
	require.Eventually(t, func() bool { // its goroutine is gone, and its drop waits
		ss.mu.Lock()
		defer ss.mu.Unlock()
		return len(ss.followers) == 0
	}, peertest.Guard, time.Millisecond)
	ss.replicating.Wait()
	mem, err := v.p.memory.View("test", 4_000_000)
	require.NoError(t, err)
	opened, err := v.p.announce("test", mem)
	require.NoError(t, err)
	old := v.p.mem
	v.p.show(view{generation: v.p.used, ordered: v.p.used, length: 1_000_000, chunks: v.p.chunksOf(mem)}, mem)
	require.NoError(t, old.Release())
	v.p.exports.Close(opened)
	v.p.changes.Give()
	require.Eventually(t, func() bool { return len(v.p.Stats().Followers) == 1 }, peertest.Guard, time.Millisecond)
	require.NoError(t, v.p.Settle(peertest.Context(t)))
	require.Eventually(t, func() bool { return exchange.Exports.Used() == 0 }, peertest.Guard, time.Millisecond, "descriptors stay open for ever")
}

// A buffer that changes while an announcement exports.
func TestABufferThatChangesDuringAnAnnouncement(t *testing.T) {
	v := newVictim(t, ServerOptions{}, peer.Options{})
	require.NoError(t, v.array.Resize(nil, 1_000_000)) // chunks 0 and 1
	exporting, goOn := make(chan struct{}), make(chan struct{})
	v.machine.OnCall(func(call string) {
		if call == "cuMemExportToShareableHandle" {
			close(exporting) // it has read the list of chunks
			<-goOn
		}
	})
	over := make(chan error, 1)
	go func() { over <- v.p.Announce(peertest.Context(t), 1_000_000, nil) }()
	<-exporting
	v.machine.OnCall(nil)
	require.NoError(t, v.array.Resize(nil, 1000))
	require.ErrorIs(t, v.array.Clip(), cuda.ErrInUse)
	require.NoError(t, v.array.Resize(nil, 1_000_000)) // another chunk 1
	close(goOn)
	require.NoError(t, <-over)
	require.NoError(t, v.honest.Next(peertest.Context(t)))
	s, err := v.dev.NewStream(cuda.StreamOptions{})
	require.NoError(t, err)
	defer s.Close()
	want := make([]uint32, 1_000_000)
	want[999_999] = 7
	require.NoError(t, v.array.All().CopyFrom(s, want))
	require.NoError(t, s.Synchronize())
	got := make([]uint32, 1_000_000)
	require.NoError(t, v.honest.Array().All().CopyTo(s, got))
	require.Equal(t, uint32(7), got[999_999], "the follower maps memory that the publisher gave back")
}

// The context of Announce bounds its wait for another change.
func TestAnnounceWaitsWithinItsContext(t *testing.T) {
	v := newVictim(t, ServerOptions{}, peer.Options{})
	v.p.changes <- struct{}{} // as a Shrink that waits for the GPU does
	ctx, cancel := context.WithTimeout(context.Background(), 50*time.Millisecond)
	defer cancel()
	over := make(chan error, 1)
	go func() { over <- v.p.Announce(ctx, 1000, nil) }()
	select {
	case err := <-over:
		v.p.changes.Give()
		require.ErrorIs(t, err, peer.ErrTimeout)
	case <-time.After(peertest.Guard):
		v.p.changes.Give()
		<-over
		t.Error("the context ended long ago")
	}
}

// Two publications of one buffer: what one shows the other does not take away,
// nor hides it for a moment.
func TestTwoPublicationsOfOneBuffer(t *testing.T) {
	v := newVictim(t, ServerOptions{}, peer.Options{})
	v.announce(1_000_000)
	n := v.array.Len()
	other, err := Array(v.server, "other", v.array)
	require.NoError(t, err)
	require.NoError(t, other.Announce(peertest.Context(t), n, nil))
	s, err := v.dev.NewStream(cuda.StreamOptions{})
	require.NoError(t, err)
	defer s.Close()
	stop, least := make(chan struct{}), make(chan int)
	go func() {
		low := n
		for {
			select {
			case <-stop:
				least <- low
				return
			default:
				low = min(low, v.array.Len())
			}
		}
	}()
	for range 200 {
		require.ErrorIs(t, v.p.Shrink(n-1), cuda.ErrInUse, "no whole chunk")
		require.ErrorIs(t, v.p.Shrink(10), cuda.ErrInUse)
		require.ErrorIs(t, v.p.Shrink(10, s), cuda.ErrInUse)
	}
	close(stop)
	require.Equal(t, n, <-least)
	require.NoError(t, other.Withdraw())
	require.NoError(t, v.p.Shrink(10))
	require.Equal(t, 10, v.array.Len())
}

// What several goroutines append and announce is shown in whole, in its order, and
// behind the work of all, whoever announces first.
func TestGoroutinesThatAppendAndAnnounce(t *testing.T) {
	v := newVictim(t, ServerOptions{}, peer.Options{})
	require.NoError(t, v.p.Shrink(0))
	require.NoError(t, v.p.Settle(peertest.Context(t))) // or the follower has the old elements for a moment
	const writers, rounds = 4, 25
	var all errgroup.Group
	for range writers {
		s := newStream(t, v.dev)
		all.Go(func() error {
			for i := range rounds {
				data := make([]uint32, 1+i*997%1500)
				at, err := v.array.AppendUndefined(len(data))
				if err != nil {
					return err
				}
				for n := range data {
					data[n] = uint32(at + n)
				}
				part, err := v.array.Slice(at, at+len(data))
				if err == nil {
					err = part.CopyFrom(s, data)
				}
				if err == nil {
					err = v.p.AnnounceRange(peertest.Context(t), at, at+len(data), s)
				}
				if err != nil {
					return err
				}
			}
			return nil
		})
	}
	reader := newStream(t, v.dev)
	written := make(chan error, 1)
	go func() { written <- all.Wait() }()
	for over := false; !over; {
		select {
		case err := <-written:
			require.NoError(t, err)
			over = true
		default:
		}
		ctx, cancel := context.WithTimeout(t.Context(), time.Millisecond)
		err := v.honest.Next(ctx, reader)
		cancel()
		if over {
			for v.honest.Len() < v.array.Len() {
				require.NoError(t, v.honest.Next(peertest.Context(t), reader))
			}
		} else if err != nil {
			require.ErrorIs(t, err, peer.ErrTimeout)
		}
		got := make([]uint32, v.honest.Len())
		if len(got) == 0 {
			continue
		}
		require.NoError(t, v.honest.Array().All().CopyTo(reader, got))
		require.NoError(t, reader.Synchronize())
		for i, x := range got {
			require.EqualValues(t, i, x)
		}
	}
	require.Equal(t, v.array.Len(), v.p.Stats().Length)
	require.Empty(t, v.p.written)
}

// A gap holds back what lies behind it, whatever else is announced.
func TestAnnouncementsBehindAGap(t *testing.T) {
	v := newVictim(t, ServerOptions{}, peer.Options{})
	slow, quick := newStream(t, v.dev), newStream(t, v.dev)
	require.NoError(t, v.array.Resize(nil, 1300))
	before := v.p.Stats().Generation
	goOn := v.stand(slow)
	require.NoError(t, v.p.AnnounceRange(peertest.Context(t), 1200, 1300, slow))
	require.NoError(t, v.p.AnnounceRange(peertest.Context(t), 1100, 1150))
	require.Equal(t, 1000, v.p.Stats().Length)
	require.Equal(t, before, v.p.Stats().Generation)
	require.NoError(t, v.p.AnnounceRange(peertest.Context(t), 1000, 1100, quick, nil))
	require.Equal(t, 1150, v.p.Stats().Length)
	require.NoError(t, v.p.AnnounceRange(peertest.Context(t), 500, 600), "new contents")
	require.Equal(t, 1150, v.p.Stats().Length)
	require.NoError(t, v.p.AnnounceRange(peertest.Context(t), 1150, 1200))
	require.Equal(t, 1300, v.p.Stats().Length)
	ctx, cancel := context.WithTimeout(t.Context(), 20*time.Millisecond)
	defer cancel()
	require.ErrorIs(t, v.honest.Next(ctx), peer.ErrTimeout, "the slow stream's work is not done")
	goOn()
	for v.honest.Len() < 1300 {
		require.NoError(t, v.honest.Next(peertest.Context(t)))
	}
	for _, bad := range [][2]int{{-1, 5}, {9, 8}} {
		require.ErrorIs(t, v.p.AnnounceRange(peertest.Context(t), bad[0], bad[1]), cuda.ErrInvalidArgument)
	}
	require.ErrorIs(t, v.p.AnnounceRange(peertest.Context(t), 0, 1301), cuda.ErrOutOfRange)
	require.NoError(t, v.array.Resize(nil, 1500))
	require.NoError(t, v.p.AnnounceRange(peertest.Context(t), 1400, 1500))
	require.NoError(t, v.p.Shrink(1000), "which forgets them")
	require.Empty(t, v.p.written)
	v.served()
}

// An announcement that fails forgets nothing: the next shows all.
func TestAnAnnouncementThatFailsForgetsNothing(t *testing.T) {
	v := newVictim(t, ServerOptions{}, peer.Options{})
	require.NoError(t, v.array.Resize(nil, 1_000_000))
	require.NoError(t, v.p.AnnounceRange(peertest.Context(t), 2000, 1_000_000))
	v.machine.Inject(sim.Fault{Call: "cuMemExportToShareableHandle", Result: 1})
	require.Error(t, v.p.AnnounceRange(peertest.Context(t), 1000, 2000))
	v.machine.ClearFaults()
	require.Equal(t, 1000, v.p.Stats().Length)
	require.NoError(t, v.p.AnnounceRange(peertest.Context(t), 1000, 2000))
	require.Equal(t, 1_000_000, v.p.Stats().Length)
	v.served()
}

// A device may be lost between the event behind a stream's work and the wait for it.
func TestADeviceThatIsLostDuringAnAnnouncement(t *testing.T) {
	m, sys := sim.Open(t, sim.Options{Devices: make([]sim.DeviceOptions, 2)})
	d := sys.Devices()
	server := NewServer(ServerOptions{})
	a, err := vmm.NewArray[uint32](d[0], vmm.BufferOptions{Reserve: 64 << 20, Access: []vmm.Access{{Location: d[1].Location(), Mode: vmm.ReadWrite}}})
	require.NoError(t, err)
	p, err := Array(server, "numbers", a)
	require.NoError(t, err)
	far := newStream(t, d[1])
	require.NoError(t, gputest.Err(a.Append(far, []uint32{1, 2, 3})))
	// The third query follows the event's record.
	m.Inject(sim.Fault{Call: "cuStreamIsCapturing", After: 2, Result: cuda.Code(driver.IllegalAddress), Times: 1})
	require.ErrorIs(t, p.Announce(peertest.Context(t), 3, far), cuda.ErrDeviceLost)
	require.Zero(t, p.Stats().Length)
	require.NoError(t, server.Close())
	require.NoError(t, a.Close())
}
