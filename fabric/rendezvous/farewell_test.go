//go:build linux

package rendezvous

import (
	"errors"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/require"
)

// A rank that has just joined receives the reason why the host gives up, even if the host
// closes its group at once.
func TestARankThatJustJoinedHearsWhy(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "private")
	for range 300 {
		host, path, err := Host(dir, "", 3, Options{})
		require.NoError(t, err)
		joined, heard := make(chan struct{}), make(chan error, 1)
		go func() {
			g, err := Join(t.Context(), path, 1, 3, Options{})
			close(joined)
			if err == nil {
				err = g.Barrier(t.Context(), "start")
				_ = g.Close()
			}
			heard <- err
		}()
		<-joined
		host.Fail(errors.New("the reason"))
		require.NoError(t, host.Close())
		require.ErrorContains(t, <-heard, "the reason")
	}
}
