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
