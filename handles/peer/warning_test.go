//go:build linux

package peer

import (
	"testing"

	"github.com/cuvmm/cuvmm/internal/wire"
	"github.com/stretchr/testify/require"
)

// No caller sees a warning, it never waits, and one that was not sent is not missed.
func TestWarnings(t *testing.T) {
	for _, warned := range []bool{false, true} {
		near, far := linkedPair(t)
		far.limits.Warned = warned
		for range 10_000 { // more than a socket holds
			near.warn()
		}
		sent := make(chan error, 1)
		go func() { sent <- near.Send(moment(t), Message{Kind: 7, Body: []byte("text")}) }()
		m, err := far.Receive(moment(t))
		require.NoError(t, err)
		require.Equal(t, "text", string(m.Body))
		require.NoError(t, <-sent)
		near.sending <- struct{}{} // another message is on its way
		near.warn()
		near.sending.Give()
		require.NoError(t, near.Send(moment(t), Message{Kind: 7}))
		_, err = far.Receive(moment(t))
		require.NoError(t, err)
	}
}

func TestAWarningHasNothingInIt(t *testing.T) {
	near, far := linkedPair(t)
	far.limits.Warned = true
	require.NoError(t, near.transmit(moment(t), "test", Message{Kind: wire.Warning, Body: []byte("x")}, 0))
	_, err := far.Receive(moment(t))
	require.ErrorIs(t, err, ErrProtocol)
}
