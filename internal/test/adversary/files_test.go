//go:build linux

package adversary

import (
	"fmt"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"
)

// sealed are the seals of memory that processes share.
const sealed = unix.F_SEAL_SHRINK | unix.F_SEAL_GROW | unix.F_SEAL_SEAL

// file has the test close a descriptor at its end.
func file(t *testing.T, n int, err error) int {
	t.Helper()
	require.NoError(t, err)
	t.Cleanup(func() { _ = unix.Close(n) })
	return n
}

// memfd returns a memory file of a size with seals.
func memfd(t *testing.T, size int64, flags, seals int) int {
	t.Helper()
	f, err := unix.MemfdCreate("adversary", unix.MFD_CLOEXEC|unix.MFD_ALLOW_SEALING|flags)
	f = file(t, f, err)
	require.NoError(t, unix.Ftruncate(f, size))
	if seals != 0 {
		_, err = unix.FcntlInt(uintptr(f), unix.F_ADD_SEALS, seals)
		require.NoError(t, err)
	}
	return f
}

// oddFiles are descriptors that are no memory.
func oddFiles(t *testing.T) map[string]int {
	t.Helper()
	open := func(path string, flags int) int {
		n, err := unix.Open(path, flags|unix.O_CLOEXEC, 0)
		return file(t, n, err)
	}
	var pipe [2]int
	require.NoError(t, unix.Pipe2(pipe[:], unix.O_CLOEXEC))
	pair, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	require.NoError(t, err)
	fifo := filepath.Join(t.TempDir(), "fifo")
	require.NoError(t, unix.Mkfifo(fifo, 0o600))
	event, err := unix.Eventfd(0, unix.EFD_CLOEXEC)
	event = file(t, event, err)
	poll, err := unix.EpollCreate1(unix.EPOLL_CLOEXEC)
	poll = file(t, poll, err)
	return map[string]int{
		"/dev/null": open("/dev/null", unix.O_RDWR), "/dev/zero": open("/dev/zero", unix.O_RDWR),
		"a directory": open("/", unix.O_RDONLY), "a path": open("/", unix.O_PATH),
		"another process's memory": open("/proc/self/mem", unix.O_RDWR),
		"a pipe":                   file(t, pipe[0], nil), "its other end": file(t, pipe[1], nil),
		"a socket": file(t, pair[0], nil), "its peer": file(t, pair[1], nil),
		"a named pipe": open(fifo, unix.O_RDWR), "an event": event, "a poll set": poll,
	}
}

// openFiles counts a process's descriptors, whatever opened them.
func openFiles(pid string) int {
	all, _ := filepath.Glob(fmt.Sprintf("/proc/%s/fd/*", pid))
	return len(all)
}
