//go:build linux

package handles_test

import (
	"testing"

	"github.com/cuvmm/cuvmm/cuda/sim"
	"github.com/cuvmm/cuvmm/handles"
	"github.com/cuvmm/cuvmm/handles/peer"
	"github.com/cuvmm/cuvmm/internal/test/peertest"
	"github.com/stretchr/testify/require"
)

// A receiver that refuses and closes at once is not only gone: its reason arrives, whichever
// message the sender was about to send.
func TestTheReasonOfAReceiverThatClosesAtOnce(t *testing.T) {
	_, sys := sim.Open(t)
	d := sys.Devices()[0]
	b := filled(t, d, 3*2<<20, 1)
	for range 100 {
		sender, receiver := peertest.Pair(t, peer.Options{})
		sent := make(chan error, 1)
		go func() { sent <- handles.SendBuffer(peertest.Context(t), sender, b) }()
		_, err := handles.ReceiveArray[uint32](peertest.Context(t), receiver, d, handles.ImportOptions{})
		require.ErrorIs(t, err, handles.ErrMismatch)
		require.NoError(t, receiver.Close())
		require.ErrorIs(t, <-sent, peer.ErrRefused)
		require.NoError(t, sender.Close())
	}
}
