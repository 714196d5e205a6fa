//go:build linux

package rendezvous

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/cuvmm/cuvmm/cuda"
	"github.com/cuvmm/cuvmm/handles/peer"
	"github.com/cuvmm/cuvmm/internal/wire"
	"github.com/stretchr/testify/require"
)

func TestWhoMayNotJoin(t *testing.T) {
	host, path, err := Host(filepath.Join(t.TempDir(), "private"), "", 3, Options{})
	require.NoError(t, err)
	defer func() { require.NoError(t, host.Close()) }()
	member, err := Join(t.Context(), path, 1, 3, Options{})
	require.NoError(t, err)
	for range 2 { // nor after its end: the other ranks count on it
		_, err = Join(t.Context(), path, 1, 3, Options{})
		require.ErrorIs(t, err, cuda.ErrInUse)
		require.ErrorContains(t, err, "rank 1")
		_, err = Join(t.Context(), path, 2, 4, Options{})
		require.ErrorIs(t, err, ErrDisagree)
		require.ErrorContains(t, err, "a group of size 4, but the host's has 3")
		require.NoError(t, member.Close())
	}
}

func TestRankZeroHosts(t *testing.T) {
	_, err := Join(t.Context(), "nowhere", 0, 2, Options{})
	require.ErrorIs(t, err, cuda.ErrInvalidArgument)
	require.ErrorContains(t, err, "rank 0 is the process that calls Host")
}

// A rank that joins while the host closes learns that it is gone, and not that
// another process has its rank.
func TestJoiningAHostThatCloses(t *testing.T) {
	host, path, err := Host(filepath.Join(t.TempDir(), "private"), "", 2, Options{})
	require.NoError(t, err)
	c, err := peer.Dial(t.Context(), path, peer.Options{})
	require.NoError(t, err)
	defer func() { require.NoError(t, c.Close()) }()
	m := &memberTransport{rank: 1, size: 2, conn: c}
	inside := host.transport.(*hostTransport)
	inside.mu.Lock()
	inside.closed = true
	inside.mu.Unlock()
	err = m.enter(t.Context())
	require.ErrorIs(t, err, peer.ErrGone)
	inside.mu.Lock()
	inside.closed = false // so that Close says it leaves
	inside.mu.Unlock()
	require.NoError(t, host.Close())
}

// aHost does a host's handshake, with admits to its end, and nothing else.
func aHost(t *testing.T, admits bool) (path string) {
	l, err := peer.Listen(filepath.Join(t.TempDir(), "private"), "", peer.Options{})
	require.NoError(t, err)
	over := make(chan struct{})
	done := make(chan struct{})
	go func() {
		defer close(done)
		c, err := l.Accept(context.Background())
		if err != nil {
			return
		}
		if _, err := c.Receive(context.Background()); err == nil && admits {
			_ = c.Send(context.Background(), peer.Message{Kind: wire.Welcome})
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

// enters does the handshake of a rank by hand, and returns the bare connection.
func enters(t *testing.T, path string, rank, size int) *peer.Conn {
	t.Helper()
	c, err := peer.Dial(t.Context(), path, peer.Options{})
	require.NoError(t, err)
	m := &memberTransport{rank: rank, size: size, conn: c}
	require.NoError(t, m.enter(t.Context()))
	return c
}

// Joining and arriving end in time though the host stands still, and name it.
func TestAHostThatStandsStill(t *testing.T) {
	const limit = 200 * time.Millisecond
	_, err := Join(context.Background(), aHost(t, false), 1, 2, Options{Timeout: limit})
	require.ErrorIs(t, err, peer.ErrTimeout)

	g, err := Join(t.Context(), aHost(t, true), 1, 2, Options{})
	require.NoError(t, err)
	g.timeout = limit
	_, err = g.AllGather(context.Background(), "much", make([]byte, MaxBody)) // more than a socket takes
	require.ErrorIs(t, err, peer.ErrTimeout)
	var e *Error
	require.ErrorAs(t, err, &e)
	require.Equal(t, []int{0}, e.Ranks)
	_ = g.Close()
}

// A rank that violates the protocol ends the group, the error names the rank, and its files
// are closed.
func TestAHostileMember(t *testing.T) {
	files := peer.OpenFDs()
	file := func() *peer.FD {
		f, err := os.Open(os.DevNull)
		require.NoError(t, err)
		defer f.Close()
		fd, err := duplicate(f)
		require.NoError(t, err)
		return fd
	}
	posted := func(step uint64, name string) peer.Message {
		return Event{Kind: Posted, Rank: 2, Step: Step{step, name}}.message() // the rank that it claims does not count
	}
	for name, row := range map[string]struct {
		sends []peer.Message
		says  string
	}{
		"another message":                {[]peer.Message{{Kind: 7, Body: []byte("hello")}}, "what no rank sends"},
		"a second greeting":              {[]peer.Message{hello{Rank: 1, Size: 3}.message()}, "what no rank sends"},
		"that another rank is lost":      {[]peer.Message{Event{Kind: Lost, Rank: 2}.message()}, "what no rank sends"},
		"that the group has ended":       {[]peer.Message{Event{Kind: Ended}.message()}, "what no rank sends"},
		"files with a failure":           {[]peer.Message{{Kind: wire.Event, Body: Event{Kind: Failed}.message().Body, FDs: []*peer.FD{file()}}}, "what no rank sends"},
		"a step twice":                   {[]peer.Message{posted(0, "go"), posted(0, "go")}, "arrived at step 0"},
		"steps that no rank has reached": {[]peer.Message{posted(2, "go")}, "arrived at step 2"},
		"files, and then another's step": {[]peer.Message{{Kind: wire.Event, Body: posted(0, "stop").Body, FDs: []*peer.FD{file()}}}, `at "stop"`},
		"nothing, and goes":              {nil, "its process is gone"},
	} {
		t.Run(name, func(t *testing.T) {
			host, path, err := Host(filepath.Join(t.TempDir(), "private"), "", 3, Options{})
			require.NoError(t, err)
			honest, err := Join(t.Context(), path, 2, 3, Options{})
			require.NoError(t, err)
			c := enters(t, path, 1, 3)
			for _, m := range row.sends {
				require.NoError(t, c.Send(t.Context(), m))
				require.NoError(t, m.Close())
			}
			if len(row.sends) == 0 {
				require.NoError(t, c.Close())
			}
			errs := together([]*Group{host, honest}, func(g *Group) error {
				// Its earlier arrival still counts, for one step.
				return errors.Join(g.Barrier(t.Context(), "go"), g.Barrier(t.Context(), "on"))
			})
			oneOutcome(t, errs)
			for r, err := range errs {
				require.ErrorContains(t, err, "rank 1", "rank %d", r)
				require.ErrorContains(t, err, row.says, "rank %d", r)
			}
			require.NoError(t, c.Close())
			require.NoError(t, honest.Close())
			require.NoError(t, host.Close())
		})
	}
	require.Equal(t, files, peer.OpenFDs())
}
