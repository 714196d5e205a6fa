//go:build linux

package publish_test

import (
	"bytes"
	"context"
	"os"
	"testing"
	"time"

	"github.com/cuvmm/cuvmm/cuda"
	"github.com/cuvmm/cuvmm/cuda/sim"
	"github.com/cuvmm/cuvmm/handles"
	"github.com/cuvmm/cuvmm/handles/peer"
	"github.com/cuvmm/cuvmm/handles/publish"
	"github.com/cuvmm/cuvmm/internal/test/gputest"
	"github.com/cuvmm/cuvmm/internal/test/peertest"
	"github.com/cuvmm/cuvmm/vmm"
	"github.com/stretchr/testify/require"
)

// Memory that another process made is published by one that kept its descriptors, and
// otherwise the error names that option.
func TestReceivedMemoryIsPublished(t *testing.T) {
	before, err := os.ReadDir("/proc/self/fd")
	require.NoError(t, err)
	t.Run("pass on", func(t *testing.T) {
		var devices []*cuda.Device
		folder := t.TempDir()
		for range 2 {
			_, s := sim.Open(t, sim.Options{Folder: folder})
			devices = append(devices, s.Devices()[0])
		}
		made, err := vmm.NewArray[byte](devices[0], vmm.BufferOptions{Reserve: 64 * mib, Chunks: vmm.FixedChunks(2 * mib)})
		require.NoError(t, err)
		want := bytes.Repeat([]byte("passed on"), 300_000)
		require.NoError(t, gputest.Err(made.Append(nil, want)))
		near, far := peertest.Pair(t, peer.Options{})
		receive := func(o handles.ImportOptions) *vmm.Array[byte] {
			sent := make(chan error, 1)
			go func() { sent <- handles.SendArray(t.Context(), near, made) }()
			got, err := handles.ReceiveArray[byte](t.Context(), far, devices[1], o)
			require.NoError(t, err)
			require.NoError(t, <-sent)
			closeLater(t, got)
			return got
		}
		server := publish.NewServer(publish.ServerOptions{})
		_, err = publish.Array(server, "without", receive(handles.ImportOptions{}))
		require.ErrorIs(t, err, cuda.ErrNotSupported)
		require.ErrorContains(t, err, "KeepDescriptors")

		b := receive(handles.ImportOptions{KeepDescriptors: true})
		closeLater(t, server) // before what it publishes
		require.NoError(t, made.Close())
		p, err := publish.Array(server, "bytes", b)
		require.NoError(t, err)
		require.NoError(t, p.Announce(peertest.Context(t), b.Len()))
		served, reads := peertest.Pair(t, peer.Options{})
		go func() { _ = server.ServeConn(context.Background(), served) }()
		client := publish.NewClient(reads)
		closeLater(t, client)
		f, err := publish.Follow[byte](peertest.Context(t), client, devices[1], "bytes", publish.FollowOptions{KeepDescriptors: true})
		require.NoError(t, err)
		closeLater(t, f)
		require.NoError(t, f.Next(peertest.Context(t)))
		holds := func(a *vmm.Array[byte]) {
			got := make([]byte, a.Len())
			require.NoError(t, a.All().CopyTo(nil, got))
			require.Equal(t, want, got)
		}
		holds(f.Array())

		// A follower's memory is sent, but published only when it is its own.
		_, err = publish.Array(server, "again", f.Array())
		require.ErrorIs(t, err, cuda.ErrNotPermitted)
		made = f.Array()
		holds(receive(handles.ImportOptions{}))
	})
	require.Eventually(t, func() bool {
		after, err := os.ReadDir("/proc/self/fd")
		return err == nil && len(after) <= len(before)
	}, peertest.Guard, time.Millisecond, "the descriptors end with the memory")
}
