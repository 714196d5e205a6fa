//go:build linux

package peer

import (
	"testing"

	"github.com/cuvmm/cuvmm/internal/wire"
	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"
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

// A peer whose greeting does not take warnings, such as one that is older than they are,
// is sent none: it would refuse them.
func TestWarningsAreNegotiated(t *testing.T) {
	near, file, err := Pair(Options{})
	require.NoError(t, err)
	defer near.Close()
	defer file.Close()
	far := int(file.Fd())
	old := greeting(sender, ownVersions)[packetHeader:][:greetingBytes]
	require.NoError(t, unix.Send(far, rawPacket(header{allBytes: greetingBytes}, string(old)), 0))
	require.NoError(t, near.greet(moment(t), "test"))
	near.warn()
	require.NoError(t, near.Send(moment(t), Message{Kind: 7, Body: []byte("text")}))
	buf := make([]byte, packetHeader+packetBody)
	for _, want := range []header{{version: firstVersion, kind: wire.Greeting}, {version: latestVersion, kind: 7}} {
		n, err := unix.Read(far, buf)
		require.NoError(t, err)
		h, err := parseHeader(buf[:n], 0, false, want.version)
		require.NoError(t, err)
		require.Equal(t, want.kind, h.kind)
	}
}

func TestAWarningHasNothingInIt(t *testing.T) {
	near, far := linkedPair(t)
	far.limits.Warned = true
	require.NoError(t, near.transmit(moment(t), "test", Message{Kind: wire.Warning, Body: []byte("x")}, 0))
	_, err := far.Receive(moment(t))
	require.ErrorIs(t, err, ErrProtocol)
}
