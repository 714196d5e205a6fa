//go:build linux

package handles

import (
	"testing"

	"github.com/stretchr/testify/require"
)

func TestPollingInVainRests(t *testing.T) {
	var p poller
	polls := 0
	occasions := func(n int, came bool) {
		for range n {
			asked := false
			p.poll(func() bool { asked = true; return came })
			if asked {
				polls++
			}
		}
	}
	occasions(10, true)
	require.Equal(t, 10, polls)
	polls = 0
	occasions(1+2+1+4+1+8+1, false) // each time twice as many are left out
	require.Equal(t, 4, polls)
	polls = 0
	occasions(16+1, true)
	require.Equal(t, 1, polls)
	occasions(5, true)
	require.Equal(t, 6, polls, "it came, so it is polled for again")
}

func linked(t *testing.T) (near, far *Conn) {
	near, file, err := Pair(Options{})
	require.NoError(t, err)
	far, err = Inherit(file, Options{})
	require.NoError(t, err)
	t.Cleanup(func() {
		require.NoError(t, near.Close())
		require.NoError(t, far.Close())
	})
	require.NoError(t, near.greet(moment(t), "test"))
	return near, far
}

// Nobody sees a warning, it never waits, and one that was not sent is not missed.
func TestWarnings(t *testing.T) {
	for _, warned := range []bool{false, true} {
		near, far := linked(t)
		far.warned = warned
		for range 10_000 { // more than a socket holds
			near.soon()
		}
		sent := make(chan error, 1)
		go func() { sent <- near.Send(moment(t), Message{Kind: 7, Body: []byte("text")}) }()
		m, err := far.Receive(moment(t))
		require.NoError(t, err)
		require.Equal(t, "text", string(m.Body))
		require.NoError(t, <-sent)
		near.sending <- struct{}{} // another message is on its way
		near.soon()
		near.sending.give()
		require.NoError(t, near.Send(moment(t), Message{Kind: 7}))
		_, err = far.Receive(moment(t))
		require.NoError(t, err)
	}
}

func TestAWarningHasNothingInIt(t *testing.T) {
	near, far := linked(t)
	far.warned = true
	require.NoError(t, near.transmit(moment(t), "test", Message{Kind: soonKind, Body: []byte("x")}))
	_, err := far.Receive(moment(t))
	require.ErrorIs(t, err, ErrProtocol)
}

// A follower takes what it was warned of, and what it was not.
func TestFollowersAreWarned(t *testing.T) {
	v := newVictim(t, ServerOptions{}, Options{})
	for range 3 {
		v.p.warn()
		v.announce(1 << 19) // one chunk
		for v.honest.Len() != v.array.Len() {
			require.NoError(t, v.honest.Next(moment(t)))
		}
	}
	v.served()
}
