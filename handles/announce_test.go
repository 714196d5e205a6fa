//go:build linux

package handles

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// A follower dies while an announcement is under way.
func TestAFollowerThatDiesDuringAnAnnouncement(t *testing.T) {
	v := newVictim(t, ServerOptions{}, Options{})
	c := v.dial()
	to, u, fds := v.joined(c)
	require.NoError(t, closeAll(fds))
	require.NoError(t, c.Send(moment(t), pack(&done{to, u.serial, statusOK, 1, ""})))
	require.NoError(t, v.p.Settle(moment(t)))
	before := exports.used
	var ss *session
	for f := range v.p.followers {
		if f.token == to {
			ss = f.on
		}
	}
	require.NoError(t, v.array.Resize(nil, 1_000_000))
	// An announcement holds changes while it exports; the follower dies then.
	v.p.changes.Lock()
	require.NoError(t, c.Close())
	require.Eventually(t, func() bool { // its goroutine is gone, and its drop waits
		ss.mu.Lock()
		defer ss.mu.Unlock()
		return len(ss.followers) == 0
	}, 10*time.Second, time.Millisecond)
	ss.feeding.Wait()
	mem, err := v.p.memory.View("test", 4_000_000)
	require.NoError(t, err)
	fresh, err := v.p.announce(moment(t), "test", nil, 4_000_000, mem)
	require.NoError(t, err)
	old := v.p.mem
	v.p.show(view{generation: v.p.used, ordered: v.p.used, length: 1_000_000, chunks: chunksOf(mem)}, mem)
	require.NoError(t, old.Release())
	v.p.exports.close(fresh)
	v.p.changes.Unlock()
	require.Eventually(t, func() bool { return len(v.p.Stats().Followers) == 1 }, 10*time.Second, time.Millisecond)
	require.NoError(t, v.p.Settle(moment(t)))
	exports.mu.Lock()
	defer exports.mu.Unlock()
	require.Equal(t, before, exports.used, "descriptors stay open for ever")
}
