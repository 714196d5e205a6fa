//go:build linux

package publish

import (
	"errors"
	"testing"

	"github.com/cuvmm/cuvmm/handles/peer"
	"github.com/cuvmm/cuvmm/internal/fd"
	"github.com/cuvmm/cuvmm/internal/sharedpage"
	"github.com/stretchr/testify/require"
)

// Stats locks the publication for a part of its followers at a time, and sums their
// chunks without the lock.
func TestStatsOfManyFollowers(t *testing.T) {
	page, file, err := sharedpage.New()
	require.NoError(t, err)
	defer func() { require.NoError(t, errors.Join(fd.Close(file), page.Close())) }()
	p := &Publication{name: "p", followers: map[*replicator]struct{}{}}
	shown := []chunk{{1, 10}, {2, 10}}
	p.view = view{generation: 3, length: 20, chunks: shown}
	for i := range 3*statsStep + 1 {
		g := newProgress(1, 100)
		g.told, g.length, g.has = 3, 20, shown
		if i%2 == 0 { // one chunk that is no longer shown, and one in flight
			g.has, g.sent = []chunk{{1, 10}, {7, 5}}, []chunk{{8, 3}}
		}
		p.followers[&replicator{p: p, on: &session{client: client{peer.Credentials{PID: i}, true}}, slot: &pageSlot{page: page}, progress: g}] = struct{}{}
	}
	st := p.Stats()
	require.Equal(t, uint64(3), st.Generation)
	require.Equal(t, 20, st.Bytes)
	require.Len(t, st.Followers, 3*statsStep+1)
	pids := map[int]bool{}
	pinned := 0
	for _, f := range st.Followers {
		pids[f.Peer.PID] = true
		if f.Peer.PID%2 == 0 {
			require.Equal(t, 18, f.Bytes)
			require.Equal(t, 8, f.Pinned)
		} else {
			require.Zero(t, f.Pinned)
		}
		pinned += f.Pinned
	}
	require.Len(t, pids, len(st.Followers))
	require.Equal(t, pinned, st.Pinned)
	require.LessOrEqual(t, len(p.samples(nil)), statsStep)
	for f := range p.followers {
		delete(p.followers, f)
		require.Empty(t, p.samples([]*replicator{f}), "one that has left")
		break
	}
}

// The bytes that a follower pins are those behind the first chunk that differs.
func TestPinnedBytes(t *testing.T) {
	shown := []chunk{{1, 1}, {2, 2}, {3, 4}}
	for _, c := range []struct {
		has, sent []chunk
		want      uint64
	}{
		{nil, nil, 0},
		{shown, nil, 0},
		{shown[:1], shown[1:], 0},
		{shown[:1], []chunk{{9, 8}}, 8},
		{[]chunk{{1, 1}, {9, 8}}, []chunk{{3, 4}}, 12},
		{[]chunk{{1, 1}, {2, 2}, {3, 4}, {4, 16}}, nil, 16},
		{shown, []chunk{{4, 16}}, 16},
	} {
		require.Equal(t, c.want, pinned(c.has, c.sent, shown), c)
	}
}
