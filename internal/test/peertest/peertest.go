//go:build linux

// Package peertest provides helpers for tests of connections between processes.
package peertest

import (
	"context"
	"encoding/binary"
	"os"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/cuvmm/cuvmm/handles/peer"
	"github.com/cuvmm/cuvmm/internal/link"
	"github.com/cuvmm/cuvmm/internal/test/needs"
	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"
)

// Guard bounds the waits of tests that must not hang. No test passes or fails by how
// long something takes.
const Guard = 2 * time.Minute

// A peer on a busy machine may be slow without being at fault.
func init() { link.DefaultTimeout = Guard }

// SetTimeout changes the limit of a connection that is at rest.
func SetTimeout(c *peer.Conn, d time.Duration) { link.Of(c).Limits().Timeout = d }

// Context ends after Guard, or with the test.
func Context(t testing.TB) context.Context {
	ctx, cancel := context.WithTimeout(context.Background(), Guard)
	t.Cleanup(cancel)
	return ctx
}

// Pair returns two ends in this process.
func Pair(t testing.TB, o peer.Options) (near, far *peer.Conn) {
	t.Helper()
	near, f, err := peer.Pair(o)
	require.NoError(t, err)
	far, err = peer.Inherit(f, o)
	require.NoError(t, err)
	t.Cleanup(func() {
		require.NoError(t, near.Close())
		require.NoError(t, far.Close())
	})
	return near, far
}

// Packet is the other end's half of the form, written down apart from the code.
func Packet(kind uint16, to []byte, sequence uint64, fds, allBytes, allFDs uint32, body string) []byte {
	le := binary.LittleEndian
	b := append([]byte("cuvP"), 2, 0)
	if kind == 0 || kind == 0xffff {
		b[4] = 1 // greetings and refusals
	}
	b = le.AppendUint16(b, kind)
	b = append(b, to...)
	b = le.AppendUint64(b, sequence)
	b = le.AppendUint32(b, uint32(len(body)))
	b = le.AppendUint32(b, fds)
	b = le.AppendUint32(b, allBytes)
	b = le.AppendUint32(b, allFDs)
	return append(b, body...)
}

// Greet greets as a bare socket does that takes no optional messages, and returns the
// other side's nonce.
func Greet(t testing.TB, s int) (nonce []byte) {
	t.Helper()
	b := make([]byte, 100)
	n, err := unix.Read(s, b)
	require.NoError(t, err)
	require.Equal(t, 72, n)
	require.Equal(t, "cuvP\x01\x00\x00\x00", string(b[:8]))
	require.Equal(t, "\x02\x00\x02\x00", string(b[64:68]), "versions 2 to 2")
	require.Equal(t, "\x01\x00\x00\x00", string(b[68:72]), "takes soon")
	require.NoError(t, unix.Sendmsg(s, Packet(0, make([]byte, 16), 0, 0, 20, 0, strings.Repeat("n", 16)+"\x02\x00\x02\x00"), nil, nil, 0))
	return b[48:64]
}

// Unprivileged is a user without rights.
const Unprivileged = 65534

// Become gives up being root, for this process alone.
func Become(id int) error {
	if err := syscall.Setgroups(nil); err != nil {
		return err
	}
	if err := syscall.Setresgid(id, id, id); err != nil {
		return err
	}
	return syscall.Setresuid(id, id, id)
}

// NeedRoot ends a test that only root can run, as needs.Lacks does.
func NeedRoot(t *testing.T) {
	t.Helper()
	if os.Geteuid() != 0 {
		needs.Lacks(t, "root")
	}
}

// NoLeak fails the test if it leaves descriptors open, of any owner.
func NoLeak(t testing.TB) {
	t.Helper()
	files, fds := OwnFiles(), peer.OpenFDs()
	t.Cleanup(func() {
		if t.Failed() {
			return
		}
		require.Equal(t, fds, peer.OpenFDs(), "FDs left open")
		if after := OwnFiles(); len(after) != len(files) {
			require.Equal(t, files, after, "file descriptors left open")
		}
	})
}

// OwnFiles returns the files of this process's descriptors, but for those of the Go
// runtime and of the real driver. OpenFDs counts the driver's descriptors that the library
// holds.
func OwnFiles() (links []string) {
	all, err := os.ReadDir("/proc/self/fd")
	if err != nil {
		panic(err)
	}
	driver := false
	for _, f := range all {
		link, err := os.Readlink("/proc/self/fd/" + f.Name())
		if err != nil { // the listing's own
			continue
		}
		driver = driver || strings.HasPrefix(link, "/dev/nvidia")
		links = append(links, link)
	}
	links = slices.DeleteFunc(links, func(l string) bool {
		return strings.HasPrefix(l, "anon_inode:[event") || // the runtime's wait.Spinner
			driver && (strings.HasPrefix(l, "/dev/") || strings.HasPrefix(l, "/proc/") || strings.HasPrefix(l, "pipe:") || strings.HasPrefix(l, "anon_inode:"))
	})
	slices.Sort(links)
	return links
}

// MemoryFiles counts the descriptors of memory that are open. The software driver has
// one of each chunk that was exported.
func MemoryFiles() (n int) {
	for _, link := range OwnFiles() {
		if strings.HasPrefix(link, "/memfd:cuvmm") {
			n++
		}
	}
	return n
}

// NullFD is a descriptor of the null device.
func NullFD(t testing.TB) *peer.FD {
	n, err := unix.Open(os.DevNull, unix.O_RDWR|unix.O_CLOEXEC, 0)
	require.NoError(t, err)
	f, err := peer.NewFD(n)
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, f.Close()) })
	return f
}
