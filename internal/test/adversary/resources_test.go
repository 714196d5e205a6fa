//go:build linux

package adversary

import (
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"
)

// A client passes descriptors whose close takes an hour. Neither closing the server
// nor taking memory back waits for that.
func TestFilesThatTakeForEverToClose(t *testing.T) {
	t.Run("Close", func(t *testing.T) {
		p := victim{Timeout: time.Second}.starts(t)
		p.does("announce", 4)
		a := startChild(t, "lingers", p.path, "0")
		a.progress()
		p.serves(4)
		p.ends()
		a.cmd.Kill()
	})
	t.Run("Shrink", func(t *testing.T) {
		p := victim{Timeout: time.Second, MaxPinned: chunk}.starts(t)
		p.does("announce", 8)
		a := startChild(t, "lingers", p.path, "8")
		a.progress()
		for range 3 {
			p.does("shrink", 1)
			p.does("announce", 8)
		}
		p.serves(8)
		p.ends()
		a.cmd.Kill()
	})
}

// A client follows more often than the publisher can open files, and goes. What
// its follows took is given back.
func TestFollowsThatExhaustOpenFiles(t *testing.T) {
	const limit = 512
	p := victim{Files: limit}.starts(t)
	p.does("announce", 1)
	before := p.does("stats", 0).Files
	var all []*wire
	for n := 0; n < 2*limit; {
		w, err := dial(p.path)
		if err != nil {
			break // refused: that is a bound, too
		}
		all = append(all, w)
		for i := range uint32(64) {
			if w.send(follow, followBody(i+1, 0, "p")) != nil {
				break
			}
			n++
		}
	}
	p.does("announce", 2)
	for _, w := range all {
		w.close()
	}
	require.Eventually(t, func() bool { return p.does("stats", 0).Files <= before+16 }, patience, 10*time.Millisecond,
		"files stay open when the attacker is gone")
	p.does("announce", 3)
	p.serves(3)
	p.ends()
}

// A client keeps the page that it followed with after it has left. No later follower
// gets that page, in which the client could write.
func TestAPageOfAFormerFollower(t *testing.T) {
	p := victim{}.starts(t)
	p.does("announce", 1)
	w := mustDial(t, p.path)
	require.NoError(t, w.send(follow, followBody(1, 0, "p")))
	a := w.until(t, accepted)
	require.NotEmpty(t, a.fds)
	page, err := unix.Mmap(a.fds[0], 0, 4096, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED)
	require.NoError(t, err)
	require.NoError(t, w.send(leave, a.body[4:20]))
	a.close()
	w.close()
	require.Eventually(t, func() bool { return p.does("stats", 0).Followers == 0 }, patience, time.Millisecond)
	p.does("announce", 2) // what was still on its way for this follower has come
	clear(page)
	for n := 3; n < 8; n++ {
		f := startFollower(t, p.path, "")
		f.progress()
		p.does("announce", n)
		f.progress()
		f.cmd.Kill()
	}
	own := 8 * le.Uint32(a.body[44:]) // of which the last write may have come late
	clear(page[own : own+8])
	require.Equal(t, make([]byte, 4096), page, "the publisher writes to the page for another follower")
	require.NoError(t, unix.Munmap(page))
	p.ends()
}

// One client that reads nothing uses up what the kernel lets its user have in
// flight. Others are served nevertheless. The limit is the publisher's user's,
// and no limit for root.
func TestAClientThatReadsNothing(t *testing.T) {
	needsRoot(t)
	dir := t.TempDir()
	for at := dir; at != "/" && at != os.TempDir(); at = filepath.Dir(at) {
		require.NoError(t, os.Chmod(at, 0o777))
	}
	p := victim{Dir: dir + "/private", Files: 512, Unprivileged: true}.starts(t)
	p.does("announce", 64)
	hold := startAttack(t, "reads nothing", p.path)
	hold.wait()
	p.does("announce", 64)
	f := startFollower(t, p.path, "unprivileged")
	f.progress()
	p.does("announce", 64)
	hold.cmd.Kill()
	f.cmd.Kill()
	p.ends()
}
