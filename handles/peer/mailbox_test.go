//go:build linux

package peer

import (
	"testing"

	"github.com/stretchr/testify/require"
)

func full(b *mailbox) bool {
	_, full := b.state()
	return full
}

func TestTheProgramsMessagesAreBounded(t *testing.T) {
	for _, c := range []struct {
		m    func() Message
		most int
	}{
		{func() Message { return Message{Kind: 1} }, waitingMessages},
		{func() Message { return Message{Kind: 1, Body: make([]byte, MaxBody)} }, waitingBytes / MaxBody},
		{func() Message { return Message{Kind: 1, FDs: someFDs(t, 32)} }, waitingFDs / 32},
	} {
		b := &mailbox{changed: make(chan struct{})}
		n := 0
		for ; !full(b); n++ {
			require.NoError(t, b.put(c.m()))
		}
		require.Equal(t, c.most, n)
		m, ok := b.takeProgram()
		require.True(t, ok)
		require.NoError(t, m.Close())
		require.False(t, full(b))
		b.discard()
		require.False(t, full(b))
		_, ok = b.takeProgram()
		require.False(t, ok)
	}
}
