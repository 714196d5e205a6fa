//go:build linux

package handles_test

import (
	"context"
	"fmt"
	"io"
	"sync"
	"sync/atomic"
	"testing"

	"github.com/cuvmm/cuvmm/cuda"
	"github.com/cuvmm/cuvmm/cuda/sim"
	"github.com/cuvmm/cuvmm/handles"
	"github.com/cuvmm/cuvmm/handles/peer"
	"github.com/cuvmm/cuvmm/internal/driver"
	"github.com/cuvmm/cuvmm/internal/test/gputest"
	"github.com/cuvmm/cuvmm/internal/test/peertest"
	"github.com/cuvmm/cuvmm/vmm"
	"github.com/stretchr/testify/require"
	"golang.org/x/sync/errgroup"
)

// side is one of two processes: a machine of its own, with the same devices.
type side struct {
	m    *sim.Machine
	s    *cuda.System
	d, e *cuda.Device
	conn *peer.Conn
}

func newSide(t *testing.T, conn *peer.Conn) *side {
	device := sim.DeviceOptions{Granularity: 64 << 10, Memory: 64 * mib}
	m, s := sim.Open(t, sim.Options{Devices: []sim.DeviceOptions{device, device}})
	x := &side{m: m, s: s, d: s.Devices()[0], e: s.Devices()[1], conn: conn}
	for _, d := range s.Devices() {
		_, err := vmm.GranularityOf(d, vmm.Properties{})
		require.NoError(t, err)
	}
	return x
}

// atFirstMap has the other side do something while this one maps, in a goroutine of its own, since
// this one's has locks then.
func (x *side) atFirstMap(t *testing.T, do func() error) {
	var once sync.Once
	x.m.OnCall(func(call string) {
		if call == "cuMemMap" {
			once.Do(func() {
				done := make(chan error)
				go func() { done <- do() }()
				require.NoError(t, <-done)
			})
		}
	})
}

// Memory whose buffer was closed while it was sent is released by the sender's last
// step. If the driver refuses that, the transfer is no failure, and the reclaimer
// releases the memory.
func TestSentMemoryThatCannotBeReleased(t *testing.T) {
	near, far := peertest.Pair(t, peer.Options{})
	from, to := newSide(t, near), newSide(t, far)
	b, err := vmm.NewBuffer(from.d, vmm.BufferOptions{Reserve: 1 << 20, Chunks: vmm.FixedChunks(64 << 10)})
	require.NoError(t, err)
	require.NoError(t, gputest.Err(b.AppendUndefined(3*64<<10)))
	from.m.Inject(sim.Fault{Call: "cuMemRelease", Result: cuda.Code(driver.Unknown)})
	to.atFirstMap(t, b.Close) // before the sender learns of it
	var group errgroup.Group
	group.Go(func() error { return handles.SendBuffer(peertest.Context(t), near, b) })
	got, err := handles.ReceiveBuffer(peertest.Context(t), far, to.d, handles.ImportOptions{})
	require.NoError(t, err)
	require.NoError(t, group.Wait())
	require.NoError(t, from.s.Drain(t.Context()))
	require.Zero(t, from.s.Stats().Allocations)
	require.NoError(t, got.Close())
}

// sharings are the objects that the walk shares, in chunks of 64 KiB.
var sharings = []struct {
	name    string
	send    func(ctx context.Context, x *side, b *vmm.Buffer) error
	receive func(ctx context.Context, x *side) (io.Closer, error)
}{
	{"a buffer of many chunks", func(ctx context.Context, x *side, b *vmm.Buffer) error {
		return handles.SendBuffer(ctx, x.conn, b)
	}, func(ctx context.Context, x *side) (io.Closer, error) {
		return handles.ReceiveBuffer(ctx, x.conn, x.d, handles.ImportOptions{})
	}},
	{"an array for another device", func(ctx context.Context, x *side, b *vmm.Buffer) error {
		a, err := vmm.ArrayOf[uint32](b)
		if err != nil {
			return err
		}
		return handles.SendArray(ctx, x.conn, a)
	}, func(ctx context.Context, x *side) (io.Closer, error) {
		return handles.ReceiveArray[uint32](ctx, x.conn, x.e, handles.ImportOptions{ReadOnly: true})
	}},
}

// undoing are the calls that give back what a transfer built.
var undoing = []string{"cuMemUnmap", "cuMemRelease", "cuMemAddressFree"}

// A buffer that is mapped when its sender goes has no user, so the System gives it back, even
// if the driver refuses that at first.
func TestReceivedMemoryWhoseSenderGoesIsGivenBack(t *testing.T) {
	for _, undo := range undoing {
		near, far := peertest.Pair(t, peer.Options{})
		from, to := newSide(t, near), newSide(t, far)
		b, err := vmm.NewBuffer(from.d, vmm.BufferOptions{Reserve: 1 << 20, Chunks: vmm.FixedChunks(64 << 10)})
		require.NoError(t, err)
		closeLater(t, b)
		require.NoError(t, gputest.Err(b.AppendUndefined(3*64<<10)))
		before := to.s.Stats()
		to.m.Inject(sim.Fault{Call: undo, Result: cuda.Code(driver.Unknown)})
		to.atFirstMap(t, near.Close)
		var group errgroup.Group
		group.Go(func() error { return handles.SendBuffer(peertest.Context(t), near, b) })
		_, err = handles.ReceiveBuffer(peertest.Context(t), far, to.d, handles.ImportOptions{})
		require.ErrorIs(t, err, peer.ErrGone)
		require.ErrorContains(t, err, undo)
		require.Error(t, group.Wait())
		to.m.ClearFaults()
		require.NoError(t, to.s.Drain(t.Context()))
		now := to.s.Stats()
		now.SharedReleased, now.SharedReleasedBytes = before.SharedReleased, before.SharedReleasedBytes
		require.Equal(t, before, now, undo)
	}
}

// Elements of the sender's size that Go cannot keep outside of its memory are refused once the
// memory is mapped, which nobody has then.
func TestMemoryThatNoArrayCanHaveIsGivenBack(t *testing.T) {
	type theirs struct{ _ uint64 }
	type mine struct{ _ *uint64 }
	near, far := peertest.Pair(t, peer.Options{})
	from, to := newSide(t, near), newSide(t, far)
	a, err := vmm.NewArray[theirs](from.d, vmm.BufferOptions{Reserve: 1 << 20, Chunks: vmm.FixedChunks(64 << 10)})
	require.NoError(t, err)
	closeLater(t, a)
	require.NoError(t, gputest.Err(a.Append(nil, make([]theirs, 20_000))))
	lease, err := handles.LeaseArray(a, handles.LeaseOptions{Handle: vmm.PosixFD})
	require.NoError(t, err)
	closeLater(t, lease)
	for name, receive := range map[string]func() error{
		"ImportArray": func() error {
			_, err := handles.ImportArray[mine](to.d, lease.Offer(), handles.ImportOptions{})
			return err
		},
		"ReceiveArray": func() error {
			var group errgroup.Group
			group.Go(func() error { return handles.SendArray(peertest.Context(t), near, a) })
			_, err := handles.ReceiveArray[mine](peertest.Context(t), far, to.d, handles.ImportOptions{})
			require.ErrorIs(t, group.Wait(), peer.ErrRefused)
			return err
		},
	} {
		for _, undo := range undoing {
			before := to.s.Stats()
			to.m.Inject(sim.Fault{Call: undo, Times: -1, Result: cuda.Code(driver.Unknown)})
			err := receive()
			require.ErrorIs(t, err, cuda.ErrInvalidArgument, name)
			require.ErrorContains(t, err, undo, name)
			require.NotEmpty(t, to.s.Leftovers(), name)
			to.m.ClearFaults()
			require.NoError(t, to.s.Drain(t.Context()))
			now := to.s.Stats()
			now.SharedReleased, now.SharedReleasedBytes = before.SharedReleased, before.SharedReleasedBytes
			require.Equal(t, before, now, "%s, %s", name, undo)
		}
	}
}

// TestEveryFailureOfSharing has every driver call of either side fail, alone, with a call
// behind it, and with all that undo: both sides learn of it, nothing is left on either once
// the driver takes everything again, and the connection goes on.
func TestEveryFailureOfSharing(t *testing.T) {
	peertest.NoLeak(t)
	near, far := peertest.Pair(t, peer.Options{})
	from, to := newSide(t, near), newSide(t, far)
	b, err := vmm.NewBuffer(from.d, vmm.BufferOptions{Reserve: 16 * mib, Chunks: vmm.FixedChunks(64 << 10)})
	require.NoError(t, err)
	closeLater(t, b)
	// More chunks than a message carries.
	require.NoError(t, gputest.Err(b.Append(nil, pattern(66*64<<10, 1))))
	for _, c := range sharings {
		for _, struck := range []*side{from, to} {
			t.Run(fmt.Sprintf("%s, at the sender's %v", c.name, struck == from), func(t *testing.T) {
				before := [2]cuda.Stats{from.s.Stats(), to.s.Stats()}
				calls := 0
				run := func(faults ...sim.Fault) (sent, received error) {
					var count atomic.Int64
					struck.m.OnCall(func(string) { count.Add(1) })
					for _, f := range faults {
						struck.m.Inject(f)
					}
					ctx, cancel := context.WithTimeout(t.Context(), peertest.Guard)
					defer cancel()
					var group errgroup.Group
					group.Go(func() error { return c.send(ctx, from, b) })
					got, received := c.receive(ctx, to)
					sent = group.Wait()
					struck.m.ClearFaults()
					struck.m.OnCall(nil)
					calls = int(count.Load())
					at := fmt.Sprintf("%v: sent %v, received %v", faults, sent, received)
					require.Equal(t, sent == nil, received == nil, "both sides agree: %s", at)
					if received == nil {
						require.NoError(t, got.Close(), at)
					}
					for i, x := range []*side{from, to} {
						_ = x.s.Drain(t.Context()) // reports what the undo could not release at once
						now := x.s.Stats()
						now.SharedReleased, now.SharedReleasedBytes = before[i].SharedReleased, before[i].SharedReleasedBytes
						require.Equal(t, before[i], now, at)
						require.Empty(t, x.s.Leftovers(), at)
						require.Equal(t, now.Allocations, x.m.Live()[sim.KindAllocation], at)
						require.Equal(t, now.Mappings, x.m.Live()[sim.KindMapping], at)
						require.Equal(t, now.Reservations, x.m.Live()[sim.KindReservation], at)
					}
					return sent, received
				}
				sent, received := run()
				require.NoError(t, sent)
				require.NoError(t, received)
				clean := calls
				require.NotZero(t, clean)
				// Of the many alike chunks the first and the last ones do.
				interesting := func(k int) bool { return k < 12 || k > clean-12 || k%37 == 0 }
				failed := 0
				for k := range clean {
					if !interesting(k) {
						continue
					}
					first := sim.Fault{After: k, Result: cuda.Code(driver.Unknown)}
					sent, received := run(first)
					if sent != nil {
						failed++
						struckSide, other := sent, received
						if struck == to {
							struckSide, other = received, sent
						}
						require.NotErrorIs(t, struckSide, peer.ErrRefused)
						require.ErrorIs(t, other, peer.ErrRefused)
					}
					for j := 0; j < 6 && calls > k+1+j; j++ {
						run(first, sim.Fault{After: k + j, Result: cuda.Code(driver.Unknown)})
					}
					for _, undo := range undoing {
						run(first, sim.Fault{Call: undo, Times: -1, Result: cuda.Code(driver.Unknown)})
					}
				}
				require.NotZero(t, failed)
				sent, received = run()
				require.NoError(t, sent)
				require.NoError(t, received)
			})
		}
	}
}
