package vmm_test

import (
	"bytes"
	"testing"
	"time"

	"github.com/cuvmm/cuvmm/cuda"
	"github.com/cuvmm/cuvmm/internal/test/gputest"
	"github.com/cuvmm/cuvmm/vmm"
	"github.com/stretchr/testify/require"
)

func TestMemoryOfOneDeviceIsUsedFromAnother(t *testing.T) {
	gputest.EachPair(t, func(t *testing.T, d, peer *cuda.Device) {
		b, err := vmm.NewBuffer(d, vmm.BufferOptions{
			Reserve: 256 * mib,
			Chunks:  vmm.FixedChunks(2 * mib),
			Access:  []vmm.Access{{Location: peer.Location(), Mode: vmm.ReadWrite}},
		})
		require.NoError(t, err)
		closed(t, b)
		far := stream(t, peer)
		want := pattern(9*mib+5, 1)
		require.NoError(t, gputest.Err(b.Append(far, want)), "written by the peer")
		require.NoError(t, far.Synchronize())
		all, err := b.Slice(0, len(want))
		require.NoError(t, err)
		got := make([]byte, len(want))
		require.NoError(t, all.CopyTo(nil, got), "read by the owner")
		require.True(t, bytes.Equal(want, got))

		require.NoError(t, b.SetAccess(vmm.Access{Location: peer.Location()}))
		require.ErrorIs(t, gputest.Err(b.Append(far, want)), cuda.ErrNotPermitted)
		require.NoError(t, b.SetAccess(vmm.Access{Location: peer.Location(), Mode: vmm.ReadOnly}))
		clear(got)
		require.NoError(t, all.CopyTo(far, got), "read by the peer")
		require.True(t, bytes.Equal(want, got))
	})
}

func TestOneRangeStripedOverTwoDevices(t *testing.T) {
	gputest.EachPair(t, func(t *testing.T, d, peer *cuda.Device) {
		const chunk, n = 2 * mib, 6
		r, err := vmm.Reserve(d, n*chunk, vmm.ReserveOptions{})
		require.NoError(t, err)
		closed(t, r)
		for i := range n {
			on := d
			if i%2 == 1 {
				on = peer
			}
			a, err := vmm.Create(on, chunk, vmm.Properties{})
			require.NoError(t, err)
			m, err := r.Map(i*chunk, a)
			require.NoError(t, err)
			closed(t, m)
			require.NoError(t, a.Close())
		}
		require.NoError(t, r.SetAccess(0, n*chunk,
			vmm.Access{Location: d.Location(), Mode: vmm.ReadWrite},
			vmm.Access{Location: peer.Location(), Mode: vmm.ReadWrite}))
		s, far := stream(t, d), stream(t, peer)
		want := pattern(n*chunk, 3)
		require.NoError(t, s.Upload(r.Ptr(), want[:n*chunk/2]))
		require.NoError(t, far.Upload(r.Ptr()+n*chunk/2, want[n*chunk/2:]))
		require.NoError(t, s.Synchronize())
		require.NoError(t, far.Synchronize())
		for _, by := range []*cuda.Stream{s, far} {
			got := make([]byte, n*chunk)
			require.NoError(t, by.Download(got, r.Ptr()))
			require.True(t, bytes.Equal(want, got), "every device reads all of it")
		}
	})
}

// A striped run is mapped and granted in one go.
func TestARunOfTwoDevicesIsMappedAtOnce(t *testing.T) {
	m, d, peer := twoDevices(t)
	r, err := vmm.Reserve(d, 8*mib, vmm.ReserveOptions{})
	require.NoError(t, err)
	closed(t, r)
	var memory []vmm.Physical
	for _, on := range []*cuda.Device{d, peer, d} {
		a, err := vmm.Create(on, 2*mib, vmm.Properties{})
		require.NoError(t, err)
		closed(t, a)
		memory = append(memory, a)
	}
	all := []vmm.Access{{Location: d.Location(), Mode: vmm.ReadWrite}, {Location: peer.Location(), Mode: vmm.ReadOnly}}
	grants := m.Count("cuMemSetAccess")
	made, err := r.MapRun(2*mib, all, memory...)
	require.NoError(t, err)
	require.Equal(t, grants+1, m.Count("cuMemSetAccess"))
	require.Len(t, made, 3)
	for i, mp := range made {
		closed(t, mp)
		require.Equal(t, r.Ptr()+cuda.Ptr((i+1)*2*mib), mp.Ptr())
		mode, err := mp.Access(peer.Location())
		require.NoError(t, err)
		require.Equal(t, vmm.ReadOnly, mode)
	}
	s := stream(t, d)
	require.NoError(t, s.Memset(made[0].Ptr(), 7, 6*mib))
	require.NoError(t, s.Synchronize())

	_, err = r.MapRun(0, nil)
	require.ErrorIs(t, err, cuda.ErrInvalidArgument)
	_, err = r.MapRun(0, nil, memory...)
	require.ErrorIs(t, err, cuda.ErrInUse, "the second would lie over the first")
	_, err = r.MapRun(1, nil, memory[0])
	require.ErrorIs(t, err, cuda.ErrInvalidArgument)
	_, err = r.MapRun(-2*mib, nil, memory[0])
	require.ErrorIs(t, err, cuda.ErrOutOfRange)
	_, err = r.MapRun(0, nil, memory[0], nil)
	require.ErrorIs(t, err, cuda.ErrInvalidArgument)
	_, err = r.MapRun(0, []vmm.Access{{Location: cuda.OnHost(), Mode: vmm.ReadWrite}}, memory[0])
	require.ErrorIs(t, err, cuda.ErrNotSupported)
	require.Equal(t, 3, d.System().Stats().Mappings)
	alone, err := r.MapRun(0, []vmm.Access{{Location: d.Location(), Mode: vmm.ReadWrite}, {Location: peer.Location(), Mode: vmm.NoAccess}}, memory[0])
	require.NoError(t, err)
	closed(t, alone[0])
}

// BenchmarkPeerGrant grants a peer 64 chunks of 16 MiB: all in one call, as a
// buffer does, and chunk by chunk.
func BenchmarkPeerGrant(b *testing.B) {
	d, peer := gputest.RealPair(b)
	const chunk, n = 16 * mib, 64
	grant := vmm.Access{Location: peer.Location(), Mode: vmm.ReadWrite}
	revoke := vmm.Access{Location: peer.Location(), Mode: vmm.NoAccess}
	r, err := vmm.Reserve(d, n*chunk, vmm.ReserveOptions{})
	must(b, err)
	b.Cleanup(func() { must(b, r.Close()) })
	for i := range n {
		a, err := vmm.Create(d, chunk, vmm.Properties{})
		must(b, err)
		m, err := r.Map(i*chunk, a)
		must(b, err)
		b.Cleanup(func() { must(b, m.Close()) })
		must(b, a.Close())
	}
	must(b, r.SetAccess(0, n*chunk, vmm.Access{Location: d.Location(), Mode: vmm.ReadWrite}))
	var run, single []time.Duration
	for b.Loop() {
		start := time.Now()
		must(b, r.SetAccess(0, n*chunk, grant))
		run = append(run, time.Since(start)/n)
		must(b, r.SetAccess(0, n*chunk, revoke))
		start = time.Now()
		for i := range n {
			must(b, r.SetAccess(i*chunk, chunk, grant))
		}
		single = append(single, time.Since(start)/n)
		must(b, r.SetAccess(0, n*chunk, revoke))
	}
	b.ReportMetric(float64(median(run).Nanoseconds())/1e3, "run-us/chunk")
	b.ReportMetric(float64(median(single).Nanoseconds())/1e3, "single-us/chunk")
	b.ReportMetric(float64(median(single))/float64(median(run)), "single/run")
}
