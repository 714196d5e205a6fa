//go:build linux

package fd_test

import (
	"os"
	"testing"

	"github.com/cuvmm/cuvmm/internal/fd"
	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"
)

func closedOnExec(t *testing.T, n int) bool {
	flags, err := unix.FcntlInt(uintptr(n), unix.F_GETFD, 0)
	require.NoError(t, err)
	return flags&unix.FD_CLOEXEC != 0
}

// A close that waits for its turn keeps its descriptor open, so no more can wait than the
// process may have open.
func TestWaitingClosesAreBoundedByTheLimitOfOpenFiles(t *testing.T) {
	var limit unix.Rlimit
	require.NoError(t, unix.Getrlimit(unix.RLIMIT_NOFILE, &limit))
	require.NoError(t, unix.Setrlimit(unix.RLIMIT_NOFILE, &unix.Rlimit{Cur: 200, Max: limit.Max}))
	defer func() { require.NoError(t, unix.Setrlimit(unix.RLIMIT_NOFILE, &limit)) }()
	release := make(chan struct{})
	var all []<-chan struct{}
	for {
		n, err := fd.Dup(0)
		if err != nil {
			require.ErrorIs(t, err, unix.EMFILE)
			break
		}
		require.Less(t, len(all), 200)
		all = append(all, fd.Away(func() {
			<-release
			_ = fd.Close(n)
		}))
	}
	close(release)
	for _, done := range all {
		<-done
	}
	n, err := fd.Dup(0)
	require.NoError(t, err)
	require.NoError(t, fd.Close(n))
}

func TestTakenAndDuplicatedDescriptorsAreClosedOnExec(t *testing.T) {
	n, err := unix.Open(os.DevNull, unix.O_RDONLY, 0)
	require.NoError(t, err)
	require.False(t, closedOnExec(t, n))
	require.NoError(t, fd.Take(n))
	require.True(t, closedOnExec(t, n))
	d, err := fd.Dup(n)
	require.NoError(t, err)
	require.NotEqual(t, n, d)
	require.True(t, closedOnExec(t, d))
	require.NoError(t, fd.Close(n))
	require.NoError(t, fd.Close(d))
	require.ErrorIs(t, fd.Close(d), unix.EBADF)
	require.ErrorIs(t, fd.Take(d), unix.EBADF)
	_, err = fd.Dup(d)
	require.ErrorIs(t, err, unix.EBADF)
}
