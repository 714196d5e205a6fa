//go:build linux

package rendezvous

import (
	"context"
	"path/filepath"
	"testing"
	"time"

	"github.com/cuvmm/cuvmm/cuda"
	"github.com/cuvmm/cuvmm/handles"
	"github.com/stretchr/testify/require"
)

func TestWhoMayNotJoin(t *testing.T) {
	host, path, err := Host(filepath.Join(t.TempDir(), "private"), "", 3, Options{})
	require.NoError(t, err)
	defer func() { require.NoError(t, host.Close()) }()
	member, err := Join(t.Context(), path, 1, 3, Options{})
	require.NoError(t, err)
	for range 2 { // nor when it has gone: the others count on that one
		_, err = Join(t.Context(), path, 1, 3, Options{})
		require.ErrorIs(t, err, cuda.ErrInUse)
		require.ErrorContains(t, err, "rank 1")
		_, err = Join(t.Context(), path, 2, 4, Options{})
		require.ErrorIs(t, err, ErrDisagree)
		require.ErrorContains(t, err, "a group of 4 ranks, where the host's has 3")
		require.NoError(t, member.Close())
	}
}

// aHost answers a greeting like a host, and does nothing else.
func aHost(t *testing.T, answer func(h hello) handles.Message) (path string) {
	l, err := handles.Listen(filepath.Join(t.TempDir(), "private"), "", handles.Options{})
	require.NoError(t, err)
	over := make(chan struct{})
	done := make(chan struct{})
	go func() {
		defer close(done)
		c, err := l.Accept(context.Background())
		if err != nil {
			return
		}
		m, err := c.Receive(context.Background())
		if h, bad := readHello(m); err == nil && bad == nil && answer != nil {
			_ = c.Send(context.Background(), answer(h))
		}
		<-over
		_ = c.Close()
	}()
	t.Cleanup(func() {
		close(over)
		_ = l.Close()
		<-done
	})
	return l.Path()
}

// Joining and arriving end in time though the host stands still, and name it.
func TestAHostThatStandsStill(t *testing.T) {
	const limit = 200 * time.Millisecond
	_, err := Join(context.Background(), aHost(t, nil), 1, 2, Options{Timeout: limit})
	require.ErrorIs(t, err, handles.ErrTimeout)

	g, err := Join(t.Context(), aHost(t, func(h hello) handles.Message { return h.message(kindWelcome) }), 1, 2, Options{Timeout: limit})
	require.NoError(t, err)
	_, err = g.AllGather(context.Background(), "much", make([]byte, MaxBody)) // more than a socket takes
	require.ErrorIs(t, err, handles.ErrTimeout)
	var e *Error
	require.ErrorAs(t, err, &e)
	require.Equal(t, []int{0}, e.Ranks)
	_ = g.Close()
}
