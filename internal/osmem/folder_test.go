//go:build linux && (amd64 || arm64)

package osmem

import (
	"os"
	"testing"

	"github.com/cuvmm/cuvmm/internal/host"
	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"
)

func openFolder(t *testing.T, path string) *Folder {
	f, err := OpenFolder(path)
	require.NoError(t, err)
	t.Cleanup(func() { _ = f.Close() })
	return f
}

func named(t *testing.T, f *Folder, name string) *Shared {
	s, err := f.NewFile(4 * host.PageSize())
	require.NoError(t, err)
	require.NoError(t, f.Link(s, name))
	t.Cleanup(func() { _ = s.Close() })
	return s
}

func TestFilesOfAFolderAreShared(t *testing.T) {
	path := t.TempDir()
	f, other := openFolder(t, path), openFolder(t, path)
	s, err := f.NewFile(4 * host.PageSize())
	require.NoError(t, err)
	s.Bytes()[0] = 7
	entries, err := os.ReadDir(path)
	require.NoError(t, err)
	require.Empty(t, entries, "without a name it is nowhere")
	require.NoError(t, f.Link(s, "a"))
	defer s.Close()
	second, err := f.NewFile(host.PageSize())
	require.NoError(t, err)
	require.ErrorIs(t, f.Link(second, "a"), unix.EEXIST)
	require.NoError(t, second.Close())

	o, err := other.OpenFile("a")
	require.NoError(t, err)
	require.Equal(t, byte(7), o.Bytes()[0])
	require.Equal(t, s.ID(), o.ID())
	o.Bytes()[1] = 8
	require.Equal(t, byte(8), s.Bytes()[1])
	require.NoError(t, other.Remove("a"))
	require.NoError(t, other.Remove("a"), "twice")
	_, err = f.OpenFile("a")
	require.ErrorIs(t, err, os.ErrNotExist)
	require.Equal(t, byte(8), o.Bytes()[1], "a process that has mapped it keeps it")
	require.NoError(t, o.Close())
	_, err = OpenFolder(path + "/none")
	require.ErrorIs(t, err, os.ErrNotExist)
}

func TestAFileThatDoesNotFitIsRefused(t *testing.T) {
	f := openFolder(t, t.TempDir())
	_, err := f.NewFile(1 << 60)
	require.ErrorIs(t, err, unix.ENOSPC)
	require.ErrorContains(t, err, "make room, or take a folder on another file system")
}

func TestExportedDescriptorsHoldAFile(t *testing.T) {
	path := t.TempDir()
	f, other := openFolder(t, path), openFolder(t, path)
	s := named(t, f, "a")
	require.False(t, f.Held("a"), "its maker's mapping does not count")
	fd, err := f.Export("a")
	require.NoError(t, err)
	dup, err := unix.Dup(fd)
	require.NoError(t, err)
	for _, opened := range []*Folder{f, other} {
		require.True(t, opened.Held("a"))
		require.True(t, opened.Is("a", fd))
		require.False(t, opened.Is("b", fd))
	}
	require.NoError(t, unix.Close(fd))
	require.True(t, other.Held("a"), "a duplicate holds it")
	require.NoError(t, unix.Close(dup))
	require.False(t, other.Held("a"))
	require.False(t, other.Held("b"))
	_, err = f.Export("b")
	require.ErrorIs(t, err, os.ErrNotExist)
	require.NoError(t, s.Close())

	// A link to somewhere else is not followed.
	require.NoError(t, os.Symlink("/etc/passwd", path+"/link"))
	_, err = f.OpenFile("link")
	require.ErrorIs(t, err, unix.ELOOP)
	require.True(t, f.Held("link"), "what cannot be asked counts as held")
}

func TestLocksBelongToAnOpening(t *testing.T) {
	path := t.TempDir()
	f := openFolder(t, path)
	named(t, f, "board")
	a, err := f.OpenBoard("board")
	require.NoError(t, err)
	b, err := f.OpenBoard("board")
	require.NoError(t, err)
	defer b.Close()
	locked := func(board *Board, off uint64) bool {
		l, err := board.Locked(off)
		require.NoError(t, err)
		return l
	}
	require.NoError(t, a.Lock(5))
	require.False(t, locked(a, 5), "its own")
	require.True(t, locked(b, 5))
	require.False(t, locked(b, 4))
	require.NoError(t, b.Lock(4))
	got := make(chan error)
	go func() { got <- b.Lock(5) }() // waits
	require.NoError(t, a.Unlock(5))
	require.NoError(t, <-got)
	require.True(t, locked(a, 5))
	require.NoError(t, b.Unlock(5))
	require.NoError(t, a.Lock(5))
	require.NoError(t, a.Close())
	require.False(t, locked(b, 5), "closing gives it back")
	c, err := f.OpenBoard("board")
	require.NoError(t, err)
	require.NoError(t, c.Lock(5))
	require.NoError(t, unix.Close(c.own)) // as when a process has exited, and is yet to be unmapped
	require.False(t, locked(b, 5), "the mapping has no part in it")
	require.NoError(t, c.Shared.Close())
	_, err = f.OpenBoard("none")
	require.ErrorIs(t, err, os.ErrNotExist)
}

func TestTailReadsFilesOfTheFolderOnly(t *testing.T) {
	path := t.TempDir()
	f := openFolder(t, path)
	s := named(t, f, "a")
	s.Bytes()[3*host.PageSize()] = 9
	fd, err := f.Export("a")
	require.NoError(t, err)
	defer unix.Close(fd)
	page, size, err := f.Tail(fd)
	require.NoError(t, err)
	require.Equal(t, 4*host.PageSize(), size)
	require.Equal(t, byte(9), page[0])
	empty, err := os.Create(path + "/empty")
	require.NoError(t, err)
	defer empty.Close()
	page, size, err = f.Tail(int(empty.Fd()))
	require.NoError(t, err)
	require.Empty(t, page)
	require.Zero(t, size)
	folder, err := os.Open(path)
	require.NoError(t, err)
	defer folder.Close()
	r, w, err := os.Pipe()
	require.NoError(t, err)
	defer r.Close()
	defer w.Close()
	elsewhere, err := memfd("test", host.PageSize(), true)
	require.NoError(t, err)
	defer unix.Close(elsewhere)
	for _, fd := range []int{int(folder.Fd()), int(r.Fd()), elsewhere, -1} {
		_, _, err = f.Tail(fd)
		require.ErrorIs(t, err, ErrNotShared)
	}
}

// A page without room kills the process that touches it.
func TestFilesHaveTheirRoomFromTheBeginning(t *testing.T) {
	const size = commitStep + 3<<20
	s, err := openFolder(t, t.TempDir()).NewFile(size)
	require.NoError(t, err)
	defer s.Close()
	var stat unix.Stat_t
	require.NoError(t, unix.Fstat(s.fd, &stat))
	require.GreaterOrEqual(t, stat.Blocks*512, int64(size))
}

// The owner of a folder decides what its files say.
func TestAFoldersOwnerAndModeAreChecked(t *testing.T) {
	me := uint32(os.Geteuid())
	for _, row := range []struct {
		owner, mode uint32
		says        string
	}{
		{me, 0o700, ""},
		{me, 0o2775, ""},
		{0, 0o750, ""},
		{me + 1, 0o700, "belongs to user"},
		{me, 0o777, "chmod o-w"},
		{me, 0o1777, "chmod o-w"},
	} {
		err := checkOwner("/f", row.owner, row.mode)
		if row.says == "" {
			require.NoError(t, err, "%d %o", row.owner, row.mode)
			continue
		}
		require.ErrorIs(t, err, os.ErrPermission, "%d %o", row.owner, row.mode)
		require.ErrorContains(t, err, row.says)
	}
	open := t.TempDir()
	require.NoError(t, os.Chmod(open, 0o777))
	_, err := OpenFolder(open)
	require.ErrorIs(t, err, os.ErrPermission)
}

// One without a limit, such as the root of a small container, tells of no blocks.
func TestAFileSystemWithoutALimitHasRoom(t *testing.T) {
	require.True(t, fits(&unix.Statfs_t{Bsize: 4096}, 1<<40))
	require.True(t, fits(&unix.Statfs_t{Bsize: 4096, Blocks: 10, Bavail: 2}, 8192))
	require.False(t, fits(&unix.Statfs_t{Bsize: 4096, Blocks: 10, Bavail: 2}, 3*4096))
}
