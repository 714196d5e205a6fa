//go:build linux

package handles

import (
	"errors"
	"testing"

	"github.com/cuvmm/cuvmm/cuda"
	"github.com/cuvmm/cuvmm/cuda/sim"
	"github.com/cuvmm/cuvmm/handles/peer"
	"github.com/cuvmm/cuvmm/internal/link"
	"github.com/cuvmm/cuvmm/internal/test/peertest"
	"github.com/cuvmm/cuvmm/vmm"
	"github.com/stretchr/testify/require"
)

// A file whose close takes as long as its sender likes, in place of memory, holds up
// nothing.
func TestFilesThatAreLongInClosing(t *testing.T) {
	h := newHostile(t, peertest.Guard)
	f, err := peer.NewFD(peertest.Lingering(t))
	require.NoError(t, err)
	d := h.honest
	d.Chunks, d.Length = d.Chunks[:1], 1
	h.offer(d, []*peer.FD{f})
	link.Of(f).SetForeign(true) // this end's own must not wait either
	require.NoError(t, f.Close())
	peertest.InTime(t, "ReceiveBuffer", func() error {
		_, err := ReceiveBuffer(peertest.Context(t), h.far, h.d, ImportOptions{})
		if errors.Is(err, ErrNotMemory) {
			err = nil
		}
		return err
	})
}

// An offer that lacks a file is refused, and so is one with a closed one.
func TestOffersWithoutTheirFiles(t *testing.T) {
	_, sys := sim.Open(t)
	d := sys.Devices()[0]
	b, err := vmm.NewBuffer(d, vmm.BufferOptions{Reserve: 4 << 20})
	require.NoError(t, err)
	defer func() { require.NoError(t, b.Close()) }()
	_, err = b.AppendUndefined(1000)
	require.NoError(t, err)
	l, err := LeaseBuffer(b, LeaseOptions{Handle: vmm.PosixFD})
	require.NoError(t, err)
	defer func() { require.NoError(t, l.Close()) }()
	closed := peertest.NullFD(t)
	require.NoError(t, closed.Close())
	for f, want := range map[*peer.FD]error{nil: cuda.ErrInvalidArgument, {}: cuda.ErrInvalidArgument, closed: cuda.ErrClosed} {
		o := l.Offer()
		o.Files = []*peer.FD{f}
		_, err = ImportBuffer(d, o, ImportOptions{})
		require.ErrorIs(t, err, want)
	}
	require.Equal(t, "no file descriptor", (*peer.FD)(nil).String())
	_, err = (*peer.FD)(nil).Dup()
	require.ErrorIs(t, err, cuda.ErrInvalidArgument)
	_, err = (&peer.FD{}).File("x")
	require.ErrorIs(t, err, cuda.ErrInvalidArgument)
	require.NoError(t, (&peer.FD{}).Close())
	m := peer.Message{FDs: []*peer.FD{nil}}
	require.NoError(t, m.Close())
}
