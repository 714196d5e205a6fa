package vmm_test

import (
	"bytes"
	"testing"
	"time"

	"github.com/cuvmm/cuvmm/cuda"
	"github.com/cuvmm/cuvmm/cuda/sim"
	"github.com/cuvmm/cuvmm/internal/driver"
	"github.com/cuvmm/cuvmm/internal/test/gputest"
	"github.com/cuvmm/cuvmm/vmm"
	"github.com/stretchr/testify/require"
)

func TestClipAfterKeepsTheMemoryUntilTheStreamHasPassed(t *testing.T) {
	m, d := open(t)
	b, err := vmm.NewBuffer(d, vmm.BufferOptions{Chunks: vmm.FixedChunks(2 * mib)})
	require.NoError(t, err)
	closed(t, b)
	s := stream(t, d)
	require.NoError(t, gputest.Err(b.AppendUndefined(20*mib)))
	free, _ := m.Memory(0)
	m.Hold(s.Handle())
	require.NoError(t, b.Resize(nil, 3*mib))
	require.NoError(t, s.Memset(b.Ptr()+10*mib, 7, mib), "work on what is clipped")
	require.NoError(t, b.ClipAfter(s))
	st := b.Stats()
	require.Equal(t, []int{4 * mib, 16 * mib, 2}, []int{st.Committed, st.Clipped, st.Chunks})
	now, _ := m.Memory(0)
	require.Equal(t, free, now)
	require.NoError(t, gputest.Err(b.Append(nil, pattern(mib, 1))), "what needs no clipped chunk goes on")

	m.Release(s.Handle())
	require.NoError(t, s.Synchronize(), "the work found its memory")
	require.NoError(t, d.System().Drain(t.Context()))
	now, _ = m.Memory(0)
	require.Equal(t, free+16*mib, now)
	require.Zero(t, b.Stats().Clipped)
}

func TestGrowingAgainTakesClippedChunksBack(t *testing.T) {
	m, d := open(t)
	b, err := vmm.NewBuffer(d, vmm.BufferOptions{Chunks: vmm.FixedChunks(2 * mib)})
	require.NoError(t, err)
	closed(t, b)
	s, other := stream(t, d), stream(t, d)
	require.NoError(t, gputest.Err(b.AppendUndefined(12*mib)))
	require.NoError(t, b.Resize(nil, 7*mib))
	m.Hold(s.Handle())
	m.Hold(other.Handle())
	require.NoError(t, s.Memset(b.Ptr(), 1, 1))
	require.NoError(t, b.ClipAfter(s)) // 8 to 12
	require.NoError(t, b.Resize(nil, mib))
	require.NoError(t, other.Memset(b.Ptr()+1, 1, 1))
	require.NoError(t, b.ClipAfter(other)) // 2 to 8
	require.Equal(t, 10*mib, b.Stats().Clipped)

	// The higher one has passed, the lower one not: growing waits for it.
	m.Release(s.Handle())
	require.NoError(t, s.Synchronize())
	creates := m.Count("cuMemCreate")
	grown := make(chan error)
	go func() { grown <- gputest.Err(b.Append(nil, pattern(4*mib, 2))) }()
	select {
	case err := <-grown:
		t.Fatalf("grew into memory that the GPU may still use: %v", err)
	case <-time.After(20 * time.Millisecond):
	}
	m.Release(other.Handle())
	require.NoError(t, <-grown)
	require.Equal(t, 5*mib, b.Len())
	require.LessOrEqual(t, m.Count("cuMemCreate")-creates, 2)
	part, err := b.Slice(mib, 5*mib)
	require.NoError(t, err)
	got := make([]byte, 4*mib)
	require.NoError(t, part.CopyTo(nil, got))
	require.True(t, bytes.Equal(pattern(4*mib, 2), got))
	require.NoError(t, d.System().Drain(t.Context()))
	require.NoError(t, gputest.Err(b.AppendUndefined(30*mib)), "beyond what was clipped")
	require.Zero(t, b.Stats().Clipped)
}

func TestCloseWaitsForWhatWasClipped(t *testing.T) {
	m, d := open(t)
	b, err := vmm.NewBuffer(d, vmm.BufferOptions{})
	require.NoError(t, err)
	s, other := stream(t, d), stream(t, d)
	require.NoError(t, gputest.Err(b.AppendUndefined(8*mib)))
	require.NoError(t, b.Resize(nil, 0))
	m.Hold(s.Handle())
	require.NoError(t, s.Memset(b.Ptr(), 1, 1))
	require.NoError(t, b.ClipAfter(s))
	require.NoError(t, b.CloseAfter(other))
	time.Sleep(10 * time.Millisecond)
	require.Equal(t, 1, d.System().Stats().Reservations, "the clip's stream has not passed")
	m.Release(s.Handle())
	require.NoError(t, d.System().Drain(t.Context()))
	require.Zero(t, d.System().Stats().Reservations)
}

func TestClipAfterRefusals(t *testing.T) {
	_, d := open(t)
	b, err := vmm.NewBuffer(d, vmm.BufferOptions{})
	require.NoError(t, err)
	closed(t, b)
	s := stream(t, d)
	require.NoError(t, gputest.Err(b.AppendUndefined(8*mib)))
	require.NoError(t, b.ClipAfter(s), "nothing to clip")
	require.NoError(t, b.Resize(nil, 0))
	require.ErrorIs(t, b.ClipAfter(), cuda.ErrInvalidArgument)
	require.Zero(t, b.Stats().Clipped)
}

func twoDevices(t *testing.T) (*sim.Machine, *cuda.Device, *cuda.Device) {
	t.Helper()
	m, d := open(t, sim.Options{Devices: make([]sim.DeviceOptions, 2)})
	other, err := d.System().Device(1)
	require.NoError(t, err)
	return m, d, other
}

func TestAccessOfAPeerIsGrantedAndRevoked(t *testing.T) {
	m, d, peer := twoDevices(t)
	b, err := vmm.NewBuffer(d, vmm.BufferOptions{Chunks: vmm.FixedChunks(2 * mib)})
	require.NoError(t, err)
	closed(t, b)
	s, far := stream(t, d), stream(t, peer)
	require.NoError(t, gputest.Err(b.Append(nil, pattern(5*mib, 1))))
	require.ErrorIs(t, gputest.Err(b.Append(far, []byte{1})), cuda.ErrNotPermitted)

	grants := m.Count("cuMemSetAccess")
	require.NoError(t, b.SetAccess(vmm.Access{Location: peer.Location(), Mode: vmm.ReadOnly}))
	require.Equal(t, grants+1, m.Count("cuMemSetAccess"), "the whole run in one call")
	require.ErrorIs(t, gputest.Err(b.Append(far, []byte{1})), cuda.ErrNotPermitted, "reading is not writing")
	all, err := b.Slice(0, b.Len())
	require.NoError(t, err)
	got := make([]byte, b.Len())
	require.NoError(t, all.CopyTo(far, got))
	require.True(t, bytes.Equal(pattern(5*mib, 1), got))
	require.NoError(t, b.SetAccess(vmm.Access{Location: peer.Location(), Mode: vmm.ReadWrite}))
	require.NoError(t, gputest.Err(b.Append(far, pattern(3*mib, 2))), "and memory that is grown later is granted too")
	require.NoError(t, far.Synchronize())

	require.NoError(t, b.SetAccess(vmm.Access{Location: peer.Location()}))
	require.ErrorIs(t, gputest.Err(b.Append(far, []byte{1})), cuda.ErrNotPermitted)
	flags, r := driver.Of(m).MemGetAccess(driver.Location{Type: driver.LocationDevice, ID: 1}, driver.Ptr(b.Ptr()))
	require.Equal(t, driver.Success, r)
	require.Equal(t, driver.AccessNone, flags)
	require.NoError(t, gputest.Err(b.Append(s, []byte{1})), "the device itself keeps its access")
}

func TestMappingAccess(t *testing.T) {
	_, d, peer := twoDevices(t)
	a, err := vmm.Create(d, 2*mib, vmm.Properties{})
	require.NoError(t, err)
	closed(t, a)
	r, err := vmm.Reserve(d, 4*mib, vmm.ReserveOptions{})
	require.NoError(t, err)
	closed(t, r)
	mp, err := r.Map(0, a)
	require.NoError(t, err)
	closed(t, mp)
	mode := func(dev *cuda.Device) vmm.AccessMode {
		got, err := mp.Access(dev.Location())
		require.NoError(t, err)
		return got
	}
	require.Equal(t, vmm.NoAccess, mode(d))
	require.NoError(t, mp.SetAccess(vmm.Access{Location: d.Location(), Mode: vmm.ReadWrite}, vmm.Access{Location: peer.Location(), Mode: vmm.ReadOnly}))
	require.Equal(t, vmm.ReadWrite, mode(d))
	require.Equal(t, vmm.ReadOnly, mode(peer))
	require.NoError(t, mp.SetAccess(vmm.Access{Location: peer.Location(), Mode: vmm.NoAccess}))
	require.Equal(t, vmm.NoAccess, mode(peer))
	require.Equal(t, vmm.ReadWrite, mode(d), "a place that is not named keeps its access")
}
