//go:build amd64 || arm64

package host

import (
	"errors"
	"os"
	"testing"
	"unsafe"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"
)

func TestNodes(t *testing.T) {
	nodes, err := Nodes()
	require.NoError(t, err)
	require.NotEmpty(t, nodes)
	_, err = CurrentNode()
	require.NoError(t, err)
}

func TestNodesAreReadInTheKernelsForm(t *testing.T) {
	for list, want := range map[string][]int{"0": {0}, "0-2": {0, 1, 2}, "0,2-3,7": {0, 2, 3, 7}} {
		got, err := parseNodes(list)
		require.NoError(t, err)
		require.Equal(t, want, got)
	}
	for _, list := range []string{"", "x", "1-", "3-1", "-1", "0-99999999"} {
		_, err := parseNodes(list)
		require.Error(t, err, list)
	}
}

func TestMapped(t *testing.T) {
	mem, err := unix.Mmap(-1, 0, 64*os.Getpagesize(), unix.PROT_READ, unix.MAP_PRIVATE|unix.MAP_ANON)
	require.NoError(t, err)
	at := uint64(uintptr(unsafe.Pointer(&mem[0])))
	require.True(t, Mapped(at, uint64(len(mem))))
	require.True(t, Mapped(at+10, 1))
	require.NoError(t, unix.Munmap(mem))
	require.False(t, Mapped(at, 1<<46), "no process has so much in a row")
	for _, bad := range [][2]uint64{{0, 1}, {at, 0}, {^uint64(0) - 5, 10}, {^uint64(0) - 5, 5}, {1 << 60, 4096}} {
		require.False(t, Mapped(bad[0], bad[1]), "%#x", bad)
	}
}

func TestPrefer(t *testing.T) {
	nodes, err := Nodes()
	require.NoError(t, err)
	mem, err := unix.Mmap(-1, 0, os.Getpagesize(), unix.PROT_READ|unix.PROT_WRITE, unix.MAP_PRIVATE|unix.MAP_ANON)
	require.NoError(t, err)
	defer func() { require.NoError(t, unix.Munmap(mem)) }()
	if err := Prefer(mem, nodes[0]); !errors.Is(err, unix.ENOSYS) && !errors.Is(err, unix.EPERM) { // a sandbox may refuse it
		require.NoError(t, err)
	}
	mem[0] = 1
	require.Error(t, Prefer(mem, -1))
	require.Error(t, Prefer(mem, 1<<10))
	require.Error(t, Prefer(mem[:1], 1<<10-1), "there is no such node")
}
