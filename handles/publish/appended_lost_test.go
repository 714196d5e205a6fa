//go:build linux

package publish

import (
	"context"
	"errors"
	"testing"
	"time"

	"github.com/cuvmm/cuvmm/cuda"
	"github.com/cuvmm/cuvmm/cuda/sim"
	"github.com/cuvmm/cuvmm/handles/peer"
	"github.com/cuvmm/cuvmm/internal/driver"
	"github.com/cuvmm/cuvmm/internal/gputest"
	"github.com/cuvmm/cuvmm/internal/peertest"
	"github.com/cuvmm/cuvmm/vmm"
	"github.com/stretchr/testify/require"
)

// appending is a publication on the first of two devices, and a stream of the second,
// which may write its memory.
func appending(t *testing.T) (m *sim.Machine, a *vmm.Array[uint32], p *Publication, far *cuda.Stream) {
	m, sys := sim.Open(t, sim.Options{Devices: make([]sim.DeviceOptions, 2)})
	d := sys.Devices()
	server := NewServer(ServerOptions{})
	a, err := vmm.NewArray[uint32](d[0], vmm.BufferOptions{Reserve: 64 << 20, Access: []vmm.Access{{Location: d[1].Location(), Mode: vmm.ReadWrite}}})
	require.NoError(t, err)
	p, err = Array(server, "numbers", a)
	require.NoError(t, err)
	t.Cleanup(func() {
		require.NoError(t, server.Close())
		require.NoError(t, a.Close())
	})
	far, err = d[1].NewStream(cuda.StreamOptions{})
	require.NoError(t, err)
	return m, a, p, far
}

// lose loses the device of a stream whose work is not done.
func lose(t *testing.T, m *sim.Machine, s *cuda.Stream) {
	m.Inject(sim.Fault{Call: "cuEventSynchronize", Result: cuda.Code(driver.IllegalAddress), Times: 1})
	require.ErrorIs(t, s.Synchronize(), cuda.ErrDeviceLost)
}

// An append on a device that was lost may never have happened: it is not announced, even
// if its stream was closed since and others append.
func TestAnAppendOfALostDeviceIsNotAnnounced(t *testing.T) {
	m, a, p, far := appending(t)
	near := newStream(t, p.timeline.dev)
	release := m.Hold(far.Handle())
	defer release()
	require.NoError(t, gputest.Err(a.Append(far, []uint32{1, 2, 3})))
	lose(t, m, far)
	require.ErrorIs(t, p.AnnounceAppended(peertest.Context(t)), cuda.ErrDeviceLost)
	require.NoError(t, far.Close())
	require.ErrorIs(t, p.AnnounceAppended(peertest.Context(t)), cuda.ErrDeviceLost)
	require.NoError(t, gputest.Err(a.Append(near, []uint32{4, 5, 6})))
	require.ErrorIs(t, p.AnnounceAppended(peertest.Context(t)), cuda.ErrDeviceLost)
	require.Zero(t, p.Stats().Length)
	require.NoError(t, a.All().CopyFrom(near, []uint32{1, 2, 3, 4, 5, 6}))
	require.NoError(t, p.Announce(peertest.Context(t), 6, near))
}

// What was done before the stream was closed is announced, although its device is lost
// afterwards.
func TestAnAppendBeforeALossIsAnnounced(t *testing.T) {
	m, a, p, far := appending(t)
	second, err := far.Device().NewStream(cuda.StreamOptions{})
	require.NoError(t, err)
	require.NoError(t, gputest.Err(a.Append(far, []uint32{1, 2, 3})))
	require.NoError(t, far.Close())
	lose(t, m, second)
	require.NoError(t, p.AnnounceAppended(peertest.Context(t)))
	require.Equal(t, 3, p.Stats().Length)
	require.NoError(t, second.Close())
}

// A device may be lost between the event behind a stream's work and the wait for it.
func TestADeviceThatIsLostDuringAnAnnouncement(t *testing.T) {
	m, a, p, far := appending(t)
	require.NoError(t, gputest.Err(a.Append(far, []uint32{1, 2, 3})))
	// The third query follows the event's record.
	m.Inject(sim.Fault{Call: "cuStreamIsCapturing", After: 2, Result: cuda.Code(driver.IllegalAddress), Times: 1})
	require.ErrorIs(t, p.AnnounceAppended(peertest.Context(t)), cuda.ErrDeviceLost)
	require.Zero(t, p.Stats().Length)
	require.NoError(t, far.Close())
}

// A stream whose Close failed is named at once, with what to do.
func TestAnAppendOnAStreamThatCouldNotBeClosed(t *testing.T) {
	m, a, p, far := appending(t)
	require.NoError(t, gputest.Err(a.Append(far, []uint32{1, 2, 3})))
	m.Inject(sim.Fault{Call: "cuEventRecord", Result: cuda.Code(driver.Unknown), Times: 1})
	failed := far.Close()
	require.Error(t, failed)
	for range 2 {
		err := p.AnnounceAppended(peertest.Context(t))
		require.ErrorIs(t, err, failed)
		require.ErrorContains(t, err, "close the stream again")
	}
	require.Zero(t, p.Stats().Length)
	require.NoError(t, far.Close())
	require.NoError(t, p.AnnounceAppended(peertest.Context(t)))
	require.Equal(t, 3, p.Stats().Length)
}

// The wait for a stream that is closing delays no other change, and ends with the
// publication.
func TestNothingWaitsWithAnAnnouncementThatWaitsForAClose(t *testing.T) {
	m, a, p, far := appending(t)
	require.NoError(t, a.Resize(nil, 1000))
	release := m.Hold(far.Handle())
	defer release()
	require.NoError(t, gputest.Err(a.Append(far, []uint32{1, 2, 3})))
	closed, announced := make(chan error, 1), make(chan error, 1)
	go func() { closed <- far.Close() }()
	require.Eventually(t, func() bool { return errors.Is(gputest.Err(far.Done()), cuda.ErrClosed) }, peertest.Guard, time.Millisecond)
	go func() { announced <- p.AnnounceAppended(peertest.Context(t)) }()
	require.NoError(t, p.Announce(peertest.Context(t), 1000))
	short, cancel := context.WithTimeout(t.Context(), 50*time.Millisecond)
	defer cancel()
	err := p.AnnounceAppended(short)
	require.ErrorIs(t, err, peer.ErrTimeout)
	require.ErrorContains(t, err, "closing")
	require.NoError(t, p.Announce(peertest.Context(t), 1000))
	require.NoError(t, p.Withdraw())
	require.ErrorIs(t, <-announced, cuda.ErrClosed)
	release()
	require.NoError(t, <-closed)
}
