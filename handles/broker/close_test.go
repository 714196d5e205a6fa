//go:build linux

package broker_test

import (
	"testing"
	"time"

	"github.com/cuvmm/cuvmm/cuda"
	"github.com/cuvmm/cuvmm/handles/broker"
	"github.com/cuvmm/cuvmm/handles/peer"
	"github.com/cuvmm/cuvmm/internal/test/gputest"
	"github.com/cuvmm/cuvmm/internal/test/peertest"
	"github.com/stretchr/testify/require"
)

// Close ends the calls that wait, and what they were to get is given back.
func TestCloseEndsCallsThatWait(t *testing.T) {
	peertest.NoLeak(t)
	d := gputest.Software(t)
	h := newHouse(t, d, broker.Options{})
	k := h.dial()
	ctx := peertest.Context(t)
	w := keep(t, k, d, mib)
	v, err := k.Create(ctx, d, "written", broker.CreateOptions{Bytes: mib})
	require.NoError(t, err)
	for i := range 10 {
		other := h.dial()
		ended := make(chan error, 2)
		go func() {
			_, err := other.Keep(ctx, d, "weights", broker.KeepOptions{Bytes: mib, Wait: true})
			ended <- err
		}()
		go func() {
			_, err := other.Attach(ctx, d, "written", broker.AttachOptions{Wait: true})
			ended <- err
		}()
		time.Sleep(time.Duration(i) * 200 * time.Microsecond)
		require.NoError(t, other.Close())
		require.ErrorIs(t, <-ended, cuda.ErrClosed)
		require.ErrorIs(t, <-ended, cuda.ErrClosed)
	}
	closed(t, w, v)
	require.NoError(t, k.Remove(ctx, "weights", 0))
	_, _, err = d.MemoryInfo() // the software driver closes what others held until now
	require.NoError(t, err)
}

// What a call was getting when Close ended it is another client's at once.
func TestWhatIsOnItsWayAtCloseIsGivenBack(t *testing.T) {
	peertest.NoLeak(t)
	d := gputest.Software(t)
	h := newHouse(t, d, broker.Options{})
	k := h.dial()
	ctx := peertest.Context(t)
	for i := range 20 {
		other := h.dial()
		ended := make(chan error, 1)
		var w *broker.Kept
		go func() {
			var err error
			w, err = other.Keep(ctx, d, "weights", broker.KeepOptions{Bytes: mib, Wait: true})
			ended <- err
		}()
		time.Sleep(time.Duration(i) * 100 * time.Microsecond)
		err := other.Close()
		if got := <-ended; got == nil {
			if err != nil {
				require.ErrorIs(t, err, cuda.ErrInUse)
			}
			closed(t, w)
		} else {
			require.ErrorIs(t, got, cuda.ErrClosed)
			require.NoError(t, err)
		}
		closed(t, other, keep(t, k, d, mib))
	}
	require.NoError(t, k.Remove(ctx, "weights", 0))
	_, _, err := d.MemoryInfo()
	require.NoError(t, err)
}

func TestCloseDoesNotWaitForABrokerThatDoesNotReply(t *testing.T) {
	peertest.NoLeak(t)
	d := gputest.Software(t)
	near, far := peertest.Pair(t, peer.Options{})
	k, err := broker.NewClient(peertest.Context(t), near)
	require.NoError(t, err)
	ended := make(chan error, 1)
	go func() {
		_, err := k.Attach(peertest.Context(t), d, "object", broker.AttachOptions{})
		ended <- err
	}()
	for range 2 { // the number of the client, and the request
		_, err = far.Receive(peertest.Context(t))
		require.NoError(t, err)
	}
	require.NoError(t, k.Close())
	require.ErrorIs(t, <-ended, cuda.ErrClosed)
	closed(t, far)
}

// What was closed while no broker served is told to the next one, if that comes within a moment.
func TestCloseTellsTheNextBroker(t *testing.T) {
	peertest.NoLeak(t)
	d := gputest.Software(t)
	h := newHouse(t, d, broker.Options{})
	k := h.dial()
	w := keep(t, k, d, mib)
	h.end()
	closed(t, w)
	ended := make(chan error, 1)
	go func() { ended <- k.Close() }()
	h.start()
	require.NoError(t, <-ended)
	other, ctx := h.dial(), peertest.Context(t)
	w, err := other.Keep(ctx, d, "weights", broker.KeepOptions{Bytes: mib})
	require.NoError(t, err)
	closed(t, w)
	require.NoError(t, other.Remove(ctx, "weights", 0))
	_, _, err = d.MemoryInfo()
	require.NoError(t, err)
}

// An object that is closed while its client closes is released, unless Close refused.
func TestAnObjectIsClosedBesideItsClient(t *testing.T) {
	peertest.NoLeak(t)
	d := gputest.Software(t)
	h := newHouse(t, d, broker.Options{})
	other, ctx := h.dial(), peertest.Context(t)
	o := write(t, other, d, "o", 1, 1, broker.CreateOptions{})
	for range 300 {
		k := h.dial()
		mine := attach(t, k, d, "o", broker.AttachOptions{})
		ended := make(chan error, 1)
		go func() { ended <- mine.Close() }()
		for err := k.Close(); err != nil; err = k.Close() {
			require.ErrorIs(t, err, cuda.ErrInUse)
		}
		require.NoError(t, <-ended)
		all, err := other.List(ctx)
		require.NoError(t, err)
		require.Equal(t, 1, all[0].Holders)
	}
	closed(t, o)
	require.NoError(t, other.Remove(ctx, "o", 0))
}
