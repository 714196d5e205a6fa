//go:build linux

package handles_test

import (
	"testing"

	"github.com/cuvmm/cuvmm/cuda"
	"github.com/cuvmm/cuvmm/cuda/sim"
	"github.com/cuvmm/cuvmm/handles"
	"github.com/cuvmm/cuvmm/handles/peer"
	"github.com/cuvmm/cuvmm/internal/test/peertest"
	"github.com/cuvmm/cuvmm/vmm"
	"github.com/stretchr/testify/require"
)

// Errors of shared memory name the remedy that helps.
func TestRemediesOfSharing(t *testing.T) {
	_, sys := sim.Open(t)
	d := sys.Devices()[0]
	b := filled(t, d, 1<<16, 1)
	t.Cleanup(func() { require.NoError(t, b.Close()) })
	lease := func(t *testing.T) *handles.Lease {
		l, err := handles.LeaseBuffer(b, handles.LeaseOptions{Handle: vmm.PosixFD})
		require.NoError(t, err)
		closeLater(t, l)
		return l
	}
	t.Run("an alignment that is none", func(t *testing.T) {
		l := lease(t)
		near, far := peertest.Pair(t, peer.Options{})
		for _, align := range []int{-1, 3} {
			o := handles.ImportOptions{Align: align}
			_, err := handles.ImportBuffer(d, l.Offer(), o)
			require.ErrorIs(t, err, cuda.ErrInvalidArgument)
			require.ErrorContains(t, err, "use a power of two")
			sent := make(chan error, 1)
			go func() { sent <- handles.SendBuffer(t.Context(), near, b) }()
			_, err = handles.ReceiveBuffer(t.Context(), far, d, o)
			require.ErrorIs(t, err, cuda.ErrInvalidArgument)
			got, err := handles.ReceiveBuffer(t.Context(), far, d, handles.ImportOptions{}) // it is offered still
			require.NoError(t, err)
			require.NoError(t, <-sent)
			require.NoError(t, got.Close())
		}
	})
	t.Run("an alignment beyond the address space", func(t *testing.T) {
		_, err := handles.ImportBuffer(d, lease(t).Offer(), handles.ImportOptions{Align: 1 << 62})
		require.ErrorContains(t, err, "a smaller alignment")
	})
	t.Run("a write to memory that was imported for reading", func(t *testing.T) {
		i, err := handles.ImportBuffer(d, lease(t).Offer(), handles.ImportOptions{ReadOnly: true})
		require.NoError(t, err)
		closeLater(t, i)
		s, err := i.Slice(0, 8)
		require.NoError(t, err)
		err = s.CopyFrom(nil, make([]byte, 8))
		require.ErrorIs(t, err, cuda.ErrNotPermitted)
		require.ErrorContains(t, err, "without the option ReadOnly")
	})
	t.Run("a lease by fabric of ordinary memory", func(t *testing.T) {
		_, err := handles.LeaseBuffer(b, handles.LeaseOptions{Handle: vmm.Fabric})
		require.ErrorIs(t, err, cuda.ErrNotSupported)
		require.ErrorContains(t, err, "within one host share it by descriptor (vmm.PosixFD)")
	})
	t.Run("an import after the lease", func(t *testing.T) {
		l := lease(t)
		require.NoError(t, l.Close())
		_, err := handles.ImportBuffer(d, l.Offer(), handles.ImportOptions{})
		require.ErrorIs(t, err, cuda.ErrClosed)
		require.ErrorContains(t, err, "LeaseOptions.Timeout")
	})
}
