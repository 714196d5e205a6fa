//go:build linux

package publish

import (
	"testing"

	"github.com/cuvmm/cuvmm/handles/peer"
	"github.com/cuvmm/cuvmm/internal/peertest"
	"github.com/stretchr/testify/require"
)

// A goroutine that reads while another one calls Next finds elements wherever Len says.
func TestTheArrayHasWhatLenSaysBesideNext(t *testing.T) {
	v := newVictim(t, ServerOptions{}, peer.Options{})
	f := v.honest
	done := make(chan struct{})
	read := make(chan error, 1)
	go func() {
		for {
			n := f.Len()
			if _, err := f.Array().Slice(0, n); err != nil {
				read <- err
				return
			}
			select {
			case <-done:
				read <- nil
				return
			default:
			}
		}
	}()
	for range 500 {
		v.announce(8)
		require.NoError(t, f.Next(peertest.Context(t)))
	}
	close(done)
	require.NoError(t, <-read)
}
