//go:build linux

package handles_test

import (
	"fmt"
	"os"
	"path/filepath"
	"testing"

	"github.com/cuvmm/cuvmm/cuda"
	"github.com/cuvmm/cuvmm/handles"
	"github.com/cuvmm/cuvmm/handles/peer"
	"github.com/cuvmm/cuvmm/internal/test/gputest"
	"github.com/cuvmm/cuvmm/internal/test/peertest"
	"github.com/cuvmm/cuvmm/vmm"
	"github.com/stretchr/testify/require"
)

// The report of a suspension names the leases and the processes that have memory, and what was
// not shared goes.
func TestAReportNamesLeasesAndReceivers(t *testing.T) {
	gputest.Each(t, func(t *testing.T, d *cuda.Device) {
		b := filled(t, d, 4*mib, 1)
		rest := func() string {
			t.Helper()
			s, err := vmm.Suspend(t.Context(), vmm.SuspendOptions{}, b)
			require.NoError(t, err)
			r := s.Report()
			require.NoError(t, s.Resume(t.Context()))
			require.Equal(t, pattern(4*mib, 1), read(t, b))
			require.Len(t, r.Memory[0].Rest, 1, "%+v", r)
			require.Equal(t, 4*mib, r.Memory[0].Rest[0].Bytes)
			return r.Memory[0].Rest[0].Why
		}
		lease, err := handles.LeaseBuffer(b, handles.LeaseOptions{Handle: vmm.PosixFD, Receivers: 2})
		require.NoError(t, err)
		closeLater(t, lease)
		id := lease.Offer().Lease
		named := fmt.Sprintf("lease %x of a buffer of 4 MiB", id[:4])
		why := rest()
		require.Contains(t, why, "the "+named)
		require.Contains(t, why, "(imported by 0 of 2 receivers)")
		require.NotContains(t, why, "sent to")
		require.NoError(t, lease.Close())
		require.Contains(t, rest(), "it was offered by the "+named+", which ended at ")

		near, far := dialed(t)
		send := func() { require.NoError(t, passBuffer(t, near, far, b, d, handles.ImportOptions{}).Close()) }
		send()
		why = rest()
		require.Contains(t, why, named)
		require.Contains(t, why, fmt.Sprintf(", and sent to process %d at ", os.Getpid()))
		send()
		require.Contains(t, rest(), "and 2 times more, the last time sent to process ")
	})
}

// dialed is a connection between two that know whom they talk to.
func dialed(t *testing.T) (near, far *peer.Conn) {
	t.Helper()
	dir := filepath.Join(t.TempDir(), "private")
	require.NoError(t, os.Mkdir(dir, 0o700))
	l, err := peer.Listen(dir, "s", peer.Options{})
	require.NoError(t, err)
	closeLater(t, l)
	accepted := make(chan *peer.Conn, 1)
	go func() {
		c, err := l.Accept(peertest.Context(t))
		if err != nil {
			t.Error(err)
		}
		accepted <- c
	}()
	near, err = peer.Dial(peertest.Context(t), l.Path(), peer.Options{})
	require.NoError(t, err)
	closeLater(t, near)
	far = <-accepted
	closeLater(t, far)
	return near, far
}
