//go:build linux

package adversary

import (
	"os"
	"testing"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"
)

// A machine's folder is on a file system that runs full. The publisher is refused
// memory, and neither it nor a follower dies of what was promised and is not there.
func TestAFullFileSystem(t *testing.T) {
	needsRoot(t)
	folder := t.TempDir()
	require.NoError(t, unix.Mount("adversary", folder, "tmpfs", 0, "size=64m"))
	t.Cleanup(func() { require.NoError(t, unix.Unmount(folder, unix.MNT_DETACH)) })
	p := victim{Folder: folder + "/machine"}.starts(t)
	var free unix.Statfs_t
	require.NoError(t, unix.Statfs(folder, &free))
	rest := int(free.Bavail)*int(free.Bsize) - 20*chunk
	require.NoError(t, os.WriteFile(folder+"/full", make([]byte, rest), 0o600))
	p.does("announce", 1)
	f := startFollower(t, p.path, folder+"/machine") // memory goes into files for followers
	f.progress()
	refused := false
	for n := 8; n <= 64; n += 8 {
		if r := p.ask("announce", n); r.Err != "" {
			refused = true
			require.Contains(t, r.Err, "the room in its machine's folder")
			break
		}
	}
	require.True(t, refused, "of 64 chunks 20 fit")
	p.does("stats", 0)
	f.cmd.Kill()
	p.ends()
}
