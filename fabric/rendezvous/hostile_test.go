//go:build linux

package rendezvous

import (
	"errors"
	"path/filepath"
	"strings"
	"testing"

	"github.com/cuvmm/cuvmm/handles/peer"
	"github.com/cuvmm/cuvmm/internal/test/peertest"
	"github.com/stretchr/testify/require"
)

// A host that sends what no host sends ends its member's group, and nothing more.
func TestEventsThatNoHostSends(t *testing.T) {
	for name, c := range map[string]struct {
		event Event
		want  error
		says  string
	}{
		"an arrival of a rank outside the group": {Event{Kind: Posted, Rank: 7, Step: Step{0, "go"}}, peer.ErrProtocol, "an event of rank 7 in a group of 2"},
		"a loss of a rank outside the group":     {Event{Kind: Lost, Rank: 2}, peer.ErrProtocol, "an event of rank 2 in a group of 2"},
		"the end":                                {Event{Kind: Ended}, peer.ErrGone, "sent what no host sends"},
	} {
		t.Run(name, func(t *testing.T) {
			peertest.NoLeak(t)
			here, there := peertest.Pair(t, peer.Options{})
			m := &memberTransport{rank: 1, size: 2, conn: there, queue: newQueue(), ended: make(chan struct{})}
			go m.receive()
			sent := c.event.message()
			if c.event.Kind == Posted {
				sent.FDs = []*peer.FD{peertest.NullFD(t)}
			}
			require.NoError(t, here.Send(peertest.Context(t), sent))
			g := New(m, Options{})
			err := g.Barrier(t.Context(), "go")
			require.ErrorIs(t, err, c.want)
			require.ErrorContains(t, err, c.says)
			require.NoError(t, here.Close())
			require.NoError(t, g.Close())
		})
	}
}

// A rank that brings files whose close takes as long as it likes, and is expelled,
// holds up neither the other ranks nor the host's end.
func TestARankWithFilesThatAreLongInClosing(t *testing.T) {
	host, path, err := Host(filepath.Join(t.TempDir(), "private"), "", 3, Options{})
	require.NoError(t, err)
	honest, err := Join(t.Context(), path, 2, 3, Options{})
	require.NoError(t, err)
	c := enters(t, path, 1, 3)
	inside := host.transport.(*hostTransport)
	inside.mu.Lock() // so that the host closes the file last
	peertest.SendLingering(t, c, Event{Kind: Posted, Step: Step{5, "out of turn"}}.message())
	inside.mu.Unlock()
	var errs []error
	peertest.InTime(t, "Barrier", func() error {
		errs = together([]*Group{host, honest}, func(g *Group) error { return g.Barrier(t.Context(), "go") })
		return nil
	})
	require.ErrorIs(t, errs[0], peer.ErrGone)
	require.ErrorContains(t, errs[0], "rank 1")
	oneOutcome(t, errs)
	require.NoError(t, c.Close())
	require.NoError(t, honest.Close())
	peertest.InTime(t, "Close", host.Close)
}

// A process that has not joined brings the host no files, whole messages of them or parts:
// they could fill its table.
func TestFilesBeforeJoining(t *testing.T) {
	host, path, err := Host(filepath.Join(t.TempDir(), "private"), "", 2, Options{})
	require.NoError(t, err)
	defer func() { require.NoError(t, host.Close()) }()
	c, err := peer.Dial(t.Context(), path, peer.Options{})
	require.NoError(t, err)
	m := hello{1, 2}.message()
	m.FDs = []*peer.FD{peertest.NullFD(t)}
	require.NoError(t, c.Send(t.Context(), m))
	_, err = c.Receive(peertest.Context(t))
	require.ErrorIs(t, err, peer.ErrRefused)
	require.ErrorContains(t, err, "a message with 1 file descriptor, where none has any")
	require.NoError(t, c.Close())
}

// All ranks return the same reason, even one that does not travel as it is.
func TestAReasonThatIsTooLong(t *testing.T) {
	each(t, 3, Options{}, func(t *testing.T, groups []*Group) {
		groups[0].Fail(errors.New("\xff" + strings.Repeat("é", MaxReason)))
		errs := together(groups, func(g *Group) error { return g.Barrier(t.Context(), "go") })
		require.ErrorIs(t, errs[0], ErrFailed)
		oneOutcome(t, errs)
	})
}
