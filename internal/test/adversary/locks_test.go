//go:build linux

package adversary

import (
	"testing"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"
)

// A follower locks the descriptors that it was sent, as the software driver does
// to know which process holds them. Neither the publisher nor another follower waits.
func TestAFollowerThatLocksWhatItGets(t *testing.T) {
	for name, folder := range map[string]string{"memory files": "", "a machine's folder": t.TempDir()} {
		t.Run(name, func(t *testing.T) {
			p := victim{Folder: folder}.starts(t)
			p.does("announce", 4)
			w := mustDial(t, p.path)
			require.NoError(t, w.send(follow, followBody(1, 0, "p")))
			u := w.until(t, update)
			require.NotEmpty(t, u.fds)
			for _, f := range u.fds {
				_ = unix.Flock(f, unix.LOCK_EX|unix.LOCK_NB)
				_ = unix.FcntlFlock(uintptr(f), unix.F_OFD_SETLK, &unix.Flock_t{Type: unix.F_WRLCK})
			}
			require.NoError(t, w.send(done, doneBody(u, shown(u))))
			if folder == "" {
				p.serves(4)
			}
			p.does("announce", 8)
			if folder == "" {
				p.serves(8)
			}
			u.close()
			p.does("shrink", 2)
			p.ends()
		})
	}
}
