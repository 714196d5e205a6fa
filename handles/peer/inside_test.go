//go:build linux

package peer

import (
	"context"
	"runtime"
	"sync"
	"testing"
	"time"

	"github.com/cuvmm/cuvmm/internal/link"
	"github.com/stretchr/testify/require"
)

// guard is peertest.Guard, which tests of this package's inside cannot import.
const guard = 2 * time.Minute

func init() { link.DefaultTimeout = guard }

func moment(t testing.TB) context.Context {
	ctx, cancel := context.WithTimeout(context.Background(), guard)
	t.Cleanup(cancel)
	return ctx
}

func linkedPair(t *testing.T) (near, far *Conn) {
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

// A connection may fail while another goroutine reads the greeting: for the race
// detector.
func TestFailingWhileThePeerGreets(t *testing.T) {
	for range 200 {
		near, file, err := Pair(Options{})
		require.NoError(t, err)
		far, err := Inherit(file, Options{})
		require.NoError(t, err)
		var reader sync.WaitGroup
		reader.Go(func() { _, _ = near.Receive(moment(t)) })
		runtime.Gosched()
		require.ErrorIs(t, near.fail(ErrTimeout), ErrTimeout)
		reader.Wait()
		_, err = far.Receive(moment(t))
		require.ErrorIs(t, err, ErrRefused)
		require.NoError(t, near.Close())
		require.NoError(t, far.Close())
	}
}

// What another goroutine reads just before the connection ends is received, whichever of the two is noticed first.
func TestWhatArrivesBeforeTheEndIsReceived(t *testing.T) {
	for range 100 {
		near, _ := linkedPair(t)
		looked := false
		require.NoError(t, near.await(moment(t), "test", func() bool {
			if !looked { // and found nothing: now it comes, and the end right behind it
				looked = true
				require.NoError(t, near.mailbox.put(Message{Kind: 1}))
				_ = near.fail(ErrGone)
				return false
			}
			_, ok := near.mailbox.takeProgram()
			return ok
		}))
	}
}
