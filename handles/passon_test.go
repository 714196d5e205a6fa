//go:build linux

package handles_test

import (
	"context"
	"os"
	"testing"
	"time"

	"github.com/cuvmm/cuvmm/cuda"
	"github.com/cuvmm/cuvmm/handles"
	"github.com/cuvmm/cuvmm/handles/peer"
	"github.com/cuvmm/cuvmm/internal/share"
	"github.com/cuvmm/cuvmm/internal/test/gputest"
	"github.com/cuvmm/cuvmm/internal/test/peertest"
	"github.com/cuvmm/cuvmm/vmm"
	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"
)

// descriptors returns how many descriptors of any kind this process has open.
func descriptors(t testing.TB) int {
	t.Helper()
	all, err := os.ReadDir("/proc/self/fd")
	require.NoError(t, err)
	return len(all)
}

// received is a buffer of two chunks of another machine's process, and its maker's.
func received(t testing.TB, o handles.ImportOptions) (mine, makers *vmm.Buffer) {
	t.Helper()
	devices, _ := onFabric(t, t.TempDir(), noChannel, noChannel)
	from, to, _, _ := loggedPair(t)
	makers = shareable(t, devices[0], vmm.PosixFD, 2, 5)
	mine = passBuffer(t, from, to, makers, devices[1], o)
	closeLater(t, mine)
	return mine, makers
}

func TestReceivedMemoryNeedsItsDescriptorsToBePassedOn(t *testing.T) {
	b, _ := received(t, handles.ImportOptions{})
	from, _, _, _ := loggedPair(t)
	for what, try := range map[string]func() error{
		"send": func() error { return handles.SendBuffer(peertest.Context(t), from, b) },
		"lease": func() error {
			return gputest.Err(handles.LeaseBuffer(b, handles.LeaseOptions{Handle: vmm.PosixFD}))
		},
	} {
		err := try()
		require.ErrorIs(t, err, cuda.ErrNotSupported, what)
		require.ErrorContains(t, err, "KeepDescriptors", what)
	}
}

func TestReceivedMemoryIsSentAndLeased(t *testing.T) {
	before := descriptors(t)
	t.Run("pass on", func(t *testing.T) {
		b, makers := received(t, handles.ImportOptions{KeepDescriptors: true})
		require.NoError(t, makers.Close())
		near, far, _, _ := loggedPair(t)

		again := passBuffer(t, near, far, b, b.Device(), handles.ImportOptions{})
		holds(t, again, 5)
		require.NoError(t, again.Close())

		_, err := handles.LeaseBuffer(b, handles.LeaseOptions{Handle: vmm.Fabric})
		require.ErrorIs(t, err, cuda.ErrNotSupported)
		lease, err := handles.LeaseBuffer(b, handles.LeaseOptions{})
		require.NoError(t, err, "memory without fabric handles is leased by descriptor unless it says otherwise")
		require.Equal(t, vmm.PosixFD, lease.Offer().Descriptor.Handle)
		leased, err := handles.ImportBuffer(b.Device(), lease.Offer(), handles.ImportOptions{KeepDescriptors: true})
		require.NoError(t, err)
		require.NoError(t, lease.Close())
		holds(t, leased, 5)
		require.NoError(t, leased.Close())
	})
	require.Eventually(t, func() bool { return descriptors(t) <= before }, peertest.Guard, time.Millisecond, "the descriptors end with the memory")
}

// Memory that has both types goes by descriptor, which can be kept, and memory that has
// none cannot be kept so.
func TestKeepingDescriptorsOfMemoryOnAFabric(t *testing.T) {
	devices, _ := onFabric(t, t.TempDir(), inClique, inClique)
	from, to, _, _ := loggedPair(t)
	keep := handles.ImportOptions{KeepDescriptors: true}
	b := passBuffer(t, from, to, shareable(t, devices[0], fdAndFabric, 2, 5), devices[1], keep)
	closeLater(t, b)
	near, far, _, _ := loggedPair(t)
	again := passBuffer(t, near, far, b, devices[1], handles.ImportOptions{})
	holds(t, again, 5)
	require.NoError(t, again.Close())

	only := shareable(t, devices[0], vmm.Fabric, 1, 5)
	lease, err := handles.LeaseBuffer(only, handles.LeaseOptions{})
	require.NoError(t, err)
	closeLater(t, lease)
	_, err = handles.ImportBuffer(devices[1], lease.Offer(), keep)
	require.ErrorIs(t, err, cuda.ErrNotSupported)
	require.ErrorContains(t, err, "KeepDescriptors")
}

// Kept descriptors count against the limit of open files, and leave some to share with.
func TestKeptDescriptorsHaveALimit(t *testing.T) {
	devices, _ := onFabric(t, t.TempDir(), noChannel, noChannel)
	from, to, _, _ := loggedPair(t)
	big := shareable(t, devices[0], vmm.PosixFD, 30, 5)
	small := shareable(t, devices[0], vmm.PosixFD, 3, 5)
	var old unix.Rlimit
	require.NoError(t, unix.Getrlimit(unix.RLIMIT_NOFILE, &old))
	require.NoError(t, unix.Setrlimit(unix.RLIMIT_NOFILE, &unix.Rlimit{Cur: 360, Max: old.Max})) // 90 are for sharing, 26 may be kept
	defer func() { require.NoError(t, unix.Setrlimit(unix.RLIMIT_NOFILE, &old)) }()
	keep := handles.ImportOptions{KeepDescriptors: true}
	// The first export keeps one more open while there is a connection.
	require.NoError(t, passBuffer(t, from, to, small, devices[1], handles.ImportOptions{}).Close())
	before := descriptors(t)
	done := make(chan error, 1)
	go func() { done <- handles.SendBuffer(peertest.Context(t), from, big) }()
	_, err := handles.ReceiveBuffer(peertest.Context(t), to, devices[1], keep)
	require.ErrorIs(t, err, peer.ErrOpenFiles)
	require.ErrorContains(t, err, "KeepDescriptors")
	require.ErrorIs(t, <-done, peer.ErrRefused)
	require.Eventually(t, func() bool { return descriptors(t) <= before }, peertest.Guard, time.Millisecond, "a refused import keeps none")

	for range 3 { // closed ones no longer count
		b := passBuffer(t, from, to, small, devices[1], keep)
		require.NoError(t, b.Close())
	}
	require.NoError(t, passBuffer(t, from, to, big, devices[1], handles.ImportOptions{}).Close())
}

// A process that has descriptors alone shares the memory behind them, though its maker has closed it.
func TestMemoryIsSharedByItsDescriptorsAlone(t *testing.T) {
	gputest.Each(t, func(t *testing.T, d *cuda.Device) {
		near, far := peertest.Pair(t, peer.Options{})
		b := filled(t, d, 200*mib, 3)
		described, fds := byDescriptors(t, b)
		require.NoError(t, b.Close())
		for range 2 { // they stay the caller's
			got := passed(t, func(ctx context.Context) error { return handles.SendFDs(ctx, near, described, fds) },
				func(ctx context.Context) (*vmm.Buffer, error) {
					return handles.ReceiveBuffer(ctx, far, d, handles.ImportOptions{})
				})
			require.Equal(t, pattern(200*mib, 3), read(t, got))
			require.NoError(t, got.Close())
		}
		require.NoError(t, peer.CloseAll(fds))
	})
}

// byDescriptors describes a buffer's memory, and exports each chunk.
func byDescriptors(t testing.TB, b *vmm.Buffer) (handles.Descriptor, []*peer.FD) {
	v, err := share.Of(b).View("test", uint64(b.Len()))
	require.NoError(t, err)
	d := handles.Descriptor{Kind: handles.BufferKind, Length: b.Len(), Location: b.Device().Location(), Device: b.Device().UUID(), Handle: vmm.PosixFD}
	var fds []*peer.FD
	for _, c := range v.Chunks {
		n, err := c.Handle.Export("test")
		require.NoError(t, err)
		f, err := peer.NewFD(n)
		require.NoError(t, err)
		fds = append(fds, f)
		d.Chunks = append(d.Chunks, int(c.Handle.Size))
	}
	require.NoError(t, v.Release())
	return d, fds
}

func TestDescriptorsThatCannotBeShared(t *testing.T) {
	near, far := peertest.Pair(t, peer.Options{})
	_, d := newSide(t, near), newSide(t, far).d
	b := filled(t, d, 3*mib, 1)
	good, fds := byDescriptors(t, b)
	defer func() { require.NoError(t, peer.CloseAll(fds)) }()
	none, fabric := good, good
	none.Chunks, none.Length = nil, 1
	fabric.Handle = vmm.Fabric
	for name, c := range map[string]struct {
		d    handles.Descriptor
		fds  []*peer.FD
		kind error
	}{
		"one missing":      {good, fds[1:], cuda.ErrInvalidArgument},
		"none described":   {none, nil, handles.ErrDescriptor},
		"by fabric handle": {fabric, fds, cuda.ErrInvalidArgument},
	} {
		require.ErrorIs(t, handles.SendFDs(peertest.Context(t), near, c.d, c.fds), c.kind, name)
	}
	require.ErrorIs(t, handles.SendFDs(peertest.Context(t), nil, good, fds), cuda.ErrInvalidArgument)
	// A descriptor of something else is the receiver's to find.
	other, err := os.Open(os.DevNull)
	require.NoError(t, err)
	n, err := unix.Dup(int(other.Fd()))
	require.NoError(t, err)
	require.NoError(t, other.Close())
	wrong, err := peer.NewFD(n)
	require.NoError(t, err)
	defer func() { require.NoError(t, wrong.Close()) }()
	sent := make(chan error, 1)
	go func() {
		sent <- handles.SendFDs(peertest.Context(t), near, good, []*peer.FD{fds[0], wrong})
	}()
	_, err = handles.ReceiveBuffer(peertest.Context(t), far, d, handles.ImportOptions{})
	require.ErrorIs(t, err, handles.ErrNotMemory)
	require.ErrorIs(t, <-sent, peer.ErrRefused)
}
