package sharedpage

import (
	"os"
	"testing"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"
)

func TestPageIsSharedAndSealed(t *testing.T) {
	p, fd, err := New()
	require.NoError(t, err)
	defer unix.Close(fd)
	require.Zero(t, p.Word(0).Load())
	require.Equal(t, os.Getpagesize()/8, p.Words())
	require.ErrorIs(t, unix.Ftruncate(fd, 0), unix.EPERM)
	q, err := Open(fd)
	require.NoError(t, err)
	last := p.Words() - 1
	p.Word(last).Store(7)
	require.Equal(t, uint64(7), q.Word(last).Load())
	require.Zero(t, q.Word(0).Load())
	require.Panics(t, func() { p.Word(last + 1) })
	require.NotEqual(t, p.Pointer(), q.Pointer())
	require.Equal(t, uint64(os.Getpagesize()), q.Size())
	require.NoError(t, q.Close())
	require.NoError(t, q.Close())
	require.NoError(t, p.Close())
}

func TestOnlySealedPagesAreOpened(t *testing.T) {
	file := func(size int64, add int) int {
		fd, err := unix.MemfdCreate("test", unix.MFD_CLOEXEC|unix.MFD_ALLOW_SEALING)
		require.NoError(t, err)
		t.Cleanup(func() { unix.Close(fd) })
		require.NoError(t, unix.Ftruncate(fd, size))
		_, err = unix.FcntlInt(uintptr(fd), unix.F_ADD_SEALS, add)
		require.NoError(t, err)
		return fd
	}
	null, err := unix.Open(os.DevNull, unix.O_RDWR|unix.O_CLOEXEC, 0)
	require.NoError(t, err)
	t.Cleanup(func() { unix.Close(null) })
	var ends [2]int
	require.NoError(t, unix.Pipe2(ends[:], unix.O_CLOEXEC))
	t.Cleanup(func() { unix.Close(ends[0]); unix.Close(ends[1]) })
	ordinary, err := os.Create(t.TempDir() + "/file")
	require.NoError(t, err)
	defer ordinary.Close()
	require.NoError(t, ordinary.Truncate(int64(os.Getpagesize())))
	page := int64(os.Getpagesize())
	for what, fd := range map[string]int{
		"not sealed":              file(page, 0),
		"may shrink":              file(page, unix.F_SEAL_GROW|unix.F_SEAL_SEAL),
		"may grow":                file(page, unix.F_SEAL_SHRINK|unix.F_SEAL_SEAL),
		"takes further seals":     file(page, unix.F_SEAL_SHRINK|unix.F_SEAL_GROW),
		"cannot be written":       file(page, seals|unix.F_SEAL_WRITE),
		"empty":                   file(0, seals),
		"two pages":               file(2*page, seals),
		"the null device":         null,
		"a pipe":                  ends[0],
		"a file on a disk":        int(ordinary.Fd()),
		"a number without a file": 1 << 20,
	} {
		_, err := Open(fd)
		require.ErrorIs(t, err, ErrNoPage, what)
	}
}
