//go:build linux

package rendezvous

import (
	"context"
	"fmt"
	"path/filepath"
	"testing"
	"time"

	"github.com/cuvmm/cuvmm/handles/peer"
	"github.com/stretchr/testify/require"
)

// held returns how many events a host keeps for all its ranks.
func (t *hostTransport) held() (n int) {
	t.mu.Lock()
	defer t.mu.Unlock()
	queues := []*queue{t.queue}
	for _, m := range t.members {
		if m != nil {
			queues = append(queues, m.out)
		}
	}
	for _, q := range queues {
		q.mu.Lock()
		n += len(q.events)
		q.mu.Unlock()
	}
	return n + len(t.before)
}

// A rank that arrives again and again at a step is expelled at the second time:
// the host keeps one contribution of it, however late it is for the step itself.
func TestARankThatPostsWithoutEnd(t *testing.T) {
	host, path, err := Host(filepath.Join(t.TempDir(), "private"), "", 3, Options{})
	require.NoError(t, err)
	honest, err := Join(t.Context(), path, 2, 3, Options{})
	require.NoError(t, err)
	c := enters(t, path, 1, 3)
	post := Event{Kind: Posted, Step: Step{0, "go"}, Contribution: Contribution{Body: make([]byte, MaxBody)}}.message()
	for posts := 0; err == nil; posts++ {
		require.Less(t, posts, 100, "it is cut off")
		err = c.Send(t.Context(), post)
	}
	require.LessOrEqual(t, host.transport.(*hostTransport).held(), 6, "an arrival and a loss, for two ranks and those to come")
	errs := together([]*Group{host, honest}, func(g *Group) error {
		if err := g.Barrier(t.Context(), "go"); err != nil {
			return err
		}
		return g.Barrier(t.Context(), "on") // its first arrival counts
	})
	require.ErrorIs(t, errs[0], peer.ErrGone)
	oneOutcome(t, errs)
	require.NoError(t, c.Close())
	require.NoError(t, honest.Close())
	require.NoError(t, host.Close())
}

// A rank that arrives at every step and reads nothing is lost before the host
// keeps more for it than a correct group has in flight.
func TestARankThatReadsNothing(t *testing.T) {
	const size = 3
	host, path, err := Host(filepath.Join(t.TempDir(), "private"), "", size, Options{})
	require.NoError(t, err)
	honest, err := Join(t.Context(), path, 2, size, Options{})
	require.NoError(t, err)
	c := enters(t, path, 1, size)
	groups := []*Group{host, honest}
	errs := make([]error, 2)
	for i := 0; errs[0] == nil; i++ {
		require.Less(t, i, 100)
		name := fmt.Sprint("step ", i)
		_ = c.Send(context.Background(), Event{Kind: Posted, Step: Step{uint64(i), name}}.message())
		errs = together(groups, func(g *Group) error {
			_, err := g.AllGather(t.Context(), name, make([]byte, MaxBody)) // more than the socket takes
			return err
		})
		require.LessOrEqual(t, host.transport.(*hostTransport).held(), 2*mostPending(size))
	}
	require.ErrorIs(t, errs[0], peer.ErrGone)
	require.ErrorContains(t, errs[0], "rank 1")
	oneOutcome(t, errs)
	require.NoError(t, c.Close())
	require.NoError(t, honest.Close())
	require.NoError(t, host.Close())
}

// Processes that connect and say nothing take no place from a rank that joins.
func TestProcessesThatSayNothing(t *testing.T) {
	host, path, err := Host(filepath.Join(t.TempDir(), "private"), "", 2, Options{})
	require.NoError(t, err)
	h := host.transport.(*hostTransport)
	var silent []*peer.Conn
	for range h.mostUnidentified() + 40 {
		c, err := peer.Dial(t.Context(), path, peer.Options{})
		require.NoError(t, err)
		silent = append(silent, c)
	}
	member, err := Join(t.Context(), path, 1, 2, Options{})
	require.NoError(t, err)
	for _, err := range together([]*Group{host, member}, func(g *Group) error { return g.Barrier(t.Context(), "go") }) {
		require.NoError(t, err)
	}
	require.Eventually(t, func() bool {
		h.mu.Lock()
		defer h.mu.Unlock()
		return len(h.unidentified) <= h.mostUnidentified()
	}, time.Minute, time.Millisecond)
	for _, c := range silent {
		_ = c.Close()
	}
	require.NoError(t, member.Close())
	require.NoError(t, host.Close())
}

// A rank leaves a host that sends without end, and has kept a bounded part.
func TestAHostThatSendsWithoutEnd(t *testing.T) {
	m := &memberTransport{rank: 1, size: 2, queue: newQueue(), ended: make(chan struct{})}
	here, there, err := peer.Pair(peer.Options{})
	require.NoError(t, err)
	m.conn, err = peer.Inherit(there, peer.Options{})
	require.NoError(t, err)
	go m.receive()
	e := Event{Kind: Posted, Rank: 0, Step: Step{0, "go"}}
	for n := 0; here.Send(t.Context(), e.message()) == nil; n++ {
		require.Less(t, n, 100_000)
	}
	<-m.ended
	g := New(m, Options{})
	err = g.Barrier(t.Context(), "go")
	require.ErrorContains(t, err, "rank 0")
	require.LessOrEqual(t, len(m.queue.events), mostPending(2)+2)
	require.NoError(t, here.Close())
	require.NoError(t, g.Close())
}
