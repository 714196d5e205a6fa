//go:build linux

package handles_test

import (
	"context"
	"encoding/binary"
	"fmt"
	"io"
	"testing"
	"time"

	"github.com/cuvmm/cuvmm/cuda"
	"github.com/cuvmm/cuvmm/cuda/sim"
	"github.com/cuvmm/cuvmm/handles"
	"github.com/cuvmm/cuvmm/handles/peer"
	"github.com/cuvmm/cuvmm/internal/test/gputest"
	"github.com/cuvmm/cuvmm/internal/test/peertest"
	"github.com/cuvmm/cuvmm/vmm"
	"github.com/stretchr/testify/require"
	"golang.org/x/sync/errgroup"
)

// pattern is n bytes that differ from place to place.
func pattern(n, seed int) []byte {
	p := make([]byte, (n+7)/8*8)
	for i := 0; i < len(p); i += 8 {
		binary.LittleEndian.PutUint64(p[i:], uint64(i+seed+1)*0x9e3779b97f4a7c15)
	}
	return p[:n]
}

func closeLater(t testing.TB, c io.Closer) {
	t.Helper()
	t.Cleanup(func() { require.NoError(t, c.Close()) })
}

// filled is a buffer of n bytes, in chunks of 2 MiB.
func filled(t testing.TB, d *cuda.Device, n, seed int) *vmm.Buffer {
	t.Helper()
	b, err := vmm.NewBuffer(d, vmm.BufferOptions{Reserve: n + 64*mib, Chunks: vmm.FixedChunks(2 * mib)})
	require.NoError(t, err)
	closeLater(t, b)
	require.NoError(t, gputest.Err(b.Append(nil, pattern(n, seed))))
	return b
}

func read(t testing.TB, b *vmm.Buffer) []byte {
	t.Helper()
	got := make([]byte, b.Len())
	part, err := b.Slice(0, b.Len())
	require.NoError(t, err)
	require.NoError(t, part.CopyTo(nil, got))
	return got
}

// passed sends on one end and receives on the other.
func passed[T any](t testing.TB, send func(context.Context) error, receive func(context.Context) (T, error)) T {
	t.Helper()
	ctx := peertest.Context(t)
	var group errgroup.Group
	group.Go(func() error { return send(ctx) })
	got, err := receive(ctx)
	require.NoError(t, err)
	require.NoError(t, group.Wait())
	return got
}

func passBuffer(t testing.TB, from, to *peer.Conn, b *vmm.Buffer, d *cuda.Device, o handles.ImportOptions) *vmm.Buffer {
	t.Helper()
	return passed(t, func(ctx context.Context) error { return handles.SendBuffer(ctx, from, b) },
		func(ctx context.Context) (*vmm.Buffer, error) { return handles.ReceiveBuffer(ctx, to, d, o) })
}

func TestMemoryIsSharedWithinAProcess(t *testing.T) {
	gputest.Each(t, func(t *testing.T, d *cuda.Device) {
		peertest.NoLeak(t)
		near, far := peertest.Pair(t, peer.Options{})
		for _, n := range []int{1, 2 * mib, 5*mib + 3, 200 * mib} {
			b := filled(t, d, n, n)
			i := passBuffer(t, near, far, b, d, handles.ImportOptions{})
			require.Equal(t, n, i.Len())
			require.Equal(t, (n+2*mib-1)/(2*mib), i.Stats().Chunks)
			require.Equal(t, i.Stats().Committed, i.Stats().Reserved, "exactly what was shared")
			require.NotEqual(t, b.Ptr(), i.Ptr())
			require.Equal(t, pattern(n, n), read(t, i))
			part, err := i.Slice(0, 1)
			require.NoError(t, err)
			require.NoError(t, part.CopyFrom(nil, []byte("!")))
			require.Equal(t, byte('!'), read(t, b)[0])
			require.NoError(t, b.Close())
			require.Equal(t, byte('!'), read(t, i)[0], "the memory lives in the other")
			require.NoError(t, i.Close())
		}
	})
}

func TestEmptyBuffersAreShared(t *testing.T) {
	peertest.NoLeak(t)
	d := gputest.Software(t)
	near, far := peertest.Pair(t, peer.Options{})
	b, err := vmm.NewBuffer(d, vmm.BufferOptions{Reserve: mib})
	require.NoError(t, err)
	closeLater(t, b)
	i := passBuffer(t, near, far, b, d, handles.ImportOptions{})
	require.Zero(t, i.Len())
	require.ErrorIs(t, gputest.Err(i.Append(nil, []byte("x"))), cuda.ErrCapacity)
	require.NoError(t, i.Close())
}

func TestArraysAndAllocations(t *testing.T) {
	gputest.Each(t, func(t *testing.T, d *cuda.Device) {
		peertest.NoLeak(t)
		near, far := peertest.Pair(t, peer.Options{})
		a, err := vmm.NewArray[float32](d, vmm.BufferOptions{})
		require.NoError(t, err)
		closeLater(t, a)
		require.NoError(t, gputest.Err(a.Append(nil, []float32{1, 2, 3})))
		send := func(ctx context.Context) error { return handles.SendArray(ctx, near, a) }
		i := passed(t, send, func(ctx context.Context) (*vmm.Array[float32], error) {
			return handles.ReceiveArray[float32](ctx, far, d, handles.ImportOptions{})
		})
		got := make([]float32, 3)
		require.NoError(t, i.All().CopyTo(nil, got))
		require.Equal(t, []float32{1, 2, 3}, got)
		require.NoError(t, i.Close())

		// Another type, kind or pointer is refused, and the connection goes on.
		var group errgroup.Group
		group.Go(func() error { return send(t.Context()) })
		_, err = handles.ReceiveArray[int32](t.Context(), far, d, handles.ImportOptions{})
		require.ErrorIs(t, err, handles.ErrMismatch)
		require.ErrorContains(t, err, "float32")
		require.ErrorIs(t, group.Wait(), peer.ErrRefused)
		group.Go(func() error { return send(t.Context()) })
		_, err = handles.ReceiveBuffer(t.Context(), far, d, handles.ImportOptions{})
		require.ErrorIs(t, err, handles.ErrMismatch)
		require.ErrorContains(t, group.Wait(), "an array of float32")
		type record struct{ P *int32 }
		records, err := vmm.NewArray[[8]byte](d, vmm.BufferOptions{})
		require.NoError(t, err)
		closeLater(t, records)
		group.Go(func() error { return handles.SendArray(t.Context(), near, records) })
		_, err = handles.ReceiveArray[record](t.Context(), far, d, handles.ImportOptions{})
		require.ErrorIs(t, err, cuda.ErrInvalidArgument)
		require.ErrorIs(t, group.Wait(), peer.ErrRefused)

	})
}

// Memory that is received twice is two buffers, each with a mapping of its own.
func TestTheSameMemoryIsReceivedTwice(t *testing.T) {
	gputest.Each(t, func(t *testing.T, d *cuda.Device) {
		peertest.NoLeak(t)
		near, far := peertest.Pair(t, peer.Options{})
		b := filled(t, d, 5*mib, 1)
		one := passBuffer(t, near, far, b, d, handles.ImportOptions{})
		require.NoError(t, b.Resize(nil, 3*mib))
		two := passBuffer(t, near, far, b, d, handles.ImportOptions{})
		require.NotEqual(t, one.Ptr(), two.Ptr())
		require.Equal(t, []int{5 * mib, 3 * mib}, []int{one.Len(), two.Len()})
		require.NoError(t, one.Close())
		require.Equal(t, pattern(5*mib, 1)[:3*mib], read(t, two))
		require.NoError(t, two.Resize(nil, 0))
		require.NoError(t, two.Clip())
		require.NoError(t, two.Close())
	})
}

func TestReadOnlyImports(t *testing.T) {
	gputest.Each(t, func(t *testing.T, d *cuda.Device) {
		near, far := peertest.Pair(t, peer.Options{})
		b := filled(t, d, mib, 1)
		i := passBuffer(t, near, far, b, d, handles.ImportOptions{ReadOnly: true})
		require.Equal(t, pattern(mib, 1), read(t, i))
		part, err := i.Slice(0, 1)
		require.NoError(t, err)
		require.ErrorIs(t, part.Zero(nil), cuda.ErrNotPermitted)
		require.ErrorIs(t, i.SetAccess(vmm.Access{Location: d.Location(), Mode: vmm.ReadWrite}), cuda.ErrNotPermitted)
		require.NoError(t, i.Close())
	})
}

// A stray write to memory that was imported for reading is a fault of the GPU and changes
// nothing.
func TestAStrayWriteToAReadOnlyImportIsCaught(t *testing.T) {
	m, err := sim.New(sim.Options{})
	require.NoError(t, err)
	defer m.Close() // what the lost device keeps is no leak
	s, err := m.Open(cuda.Options{})
	require.NoError(t, err)
	d := s.Devices()[0]
	near, far := peertest.Pair(t, peer.Options{})
	b, err := vmm.NewBuffer(d, vmm.BufferOptions{})
	require.NoError(t, err)
	require.NoError(t, gputest.Err(b.Append(nil, []byte("x"))))
	i := passBuffer(t, near, far, b, d, handles.ImportOptions{ReadOnly: true})
	st, err := d.NewStream(cuda.StreamOptions{})
	require.NoError(t, err)
	require.NoError(t, st.Memset(i.Ptr(), 0, 1))
	require.ErrorIs(t, st.Synchronize(), cuda.ErrDeviceLost)
	require.Contains(t, m.Fault(), fmt.Sprintf("%#x", uint64(i.Ptr())))
}

func TestImportsOnAnotherDevice(t *testing.T) {
	_, s := sim.Open(t, sim.Options{Devices: []sim.DeviceOptions{{Memory: 64 * mib}, {Memory: 64 * mib}, {Memory: 64 * mib, Unreachable: []int{0}}}})
	near, far := peertest.Pair(t, peer.Options{})
	all := s.Devices()
	b := filled(t, all[0], 3*mib, 1)
	i := passBuffer(t, near, far, b, all[1], handles.ImportOptions{})
	require.Equal(t, all[1], i.Device())
	require.Equal(t, pattern(3*mib, 1), read(t, i))
	require.NoError(t, i.Close())
	var group errgroup.Group
	group.Go(func() error { return handles.SendBuffer(t.Context(), near, b) })
	_, err := handles.ReceiveBuffer(t.Context(), far, all[2], handles.ImportOptions{})
	require.ErrorIs(t, err, cuda.ErrNotSupported)
	require.ErrorContains(t, err, "cannot reach")
	require.ErrorContains(t, group.Wait(), "cannot reach")
}

func TestHostMemoryIsShared(t *testing.T) {
	gputest.Each(t, func(t *testing.T, d *cuda.Device) {
		near, far := peertest.Pair(t, peer.Options{})
		b, err := vmm.NewBuffer(d, vmm.BufferOptions{Reserve: 8 * mib, Memory: vmm.Properties{Location: cuda.OnHostNUMA(0)}})
		require.NoError(t, err)
		closeLater(t, b)
		require.NoError(t, gputest.Err(b.Append(nil, pattern(100, 1))))
		i := passBuffer(t, near, far, b, d, handles.ImportOptions{})
		part, err := i.Slice(0, 100)
		require.NoError(t, err)
		require.NoError(t, part.Host(func(data []byte) error {
			require.Equal(t, pattern(100, 1), data)
			data[0] = 99
			return nil
		}))
		require.Equal(t, byte(99), read(t, b)[0])
		require.NoError(t, i.Close())
	})
}

func TestMemoryWithoutAHandleTypeIsRefusedAtExport(t *testing.T) {
	gputest.Each(t, func(t *testing.T, d *cuda.Device) {
		near, _ := peertest.Pair(t, peer.Options{})
		for _, c := range []struct {
			memory vmm.Properties
			hint   string
		}{
			{vmm.Properties{Handles: vmm.NoHandles}, "vmm.Properties.Handles"},
			{vmm.Properties{Location: cuda.OnHost()}, "cuda.OnHostNUMA"},
		} {
			b, err := vmm.NewBuffer(d, vmm.BufferOptions{Reserve: 4 * mib, Memory: c.memory})
			require.NoError(t, err)
			closeLater(t, b)
			for _, n := range []int{0, 1} {
				require.NoError(t, gputest.Err(b.AppendUndefined(n)))
				err := handles.SendBuffer(t.Context(), near, b)
				require.ErrorIs(t, err, cuda.ErrNotSupported)
				require.ErrorContains(t, err, c.hint)
			}
		}
	})
}

func TestImportedMemoryIsNotSharedOn(t *testing.T) {
	d := gputest.Software(t)
	near, far := peertest.Pair(t, peer.Options{})
	i := passBuffer(t, near, far, filled(t, d, mib, 1), d, handles.ImportOptions{})
	closeLater(t, i)
	err := handles.SendBuffer(t.Context(), far, i)
	require.ErrorIs(t, err, cuda.ErrNotSupported)
	require.ErrorContains(t, err, "only from the process that created it")
}

func TestArgumentsOfSharing(t *testing.T) {
	d := gputest.Software(t)
	near, far := peertest.Pair(t, peer.Options{})
	ctx := t.Context()
	b := filled(t, d, 1, 1)
	for _, err := range []error{
		handles.SendBuffer(ctx, near, nil), handles.SendArray[int](ctx, near, nil),
		handles.SendBuffer(ctx, nil, b),
	} {
		require.ErrorIs(t, err, cuda.ErrInvalidArgument)
	}
	for _, o := range []handles.ImportOptions{{MaxBytes: -1}, {MaxChunks: -1}, {Align: -1}, {Align: 3}} {
		_, err := handles.ReceiveBuffer(ctx, far, d, o)
		require.ErrorIs(t, err, cuda.ErrInvalidArgument)
	}
	_, err := handles.ReceiveBuffer(ctx, far, nil, handles.ImportOptions{})
	require.ErrorIs(t, err, cuda.ErrInvalidArgument)
	_, err = handles.ReceiveBuffer(ctx, nil, d, handles.ImportOptions{})
	require.ErrorIs(t, err, cuda.ErrInvalidArgument)
	require.NoError(t, b.Close())
	require.ErrorIs(t, handles.SendBuffer(ctx, near, b), cuda.ErrClosed)
	require.NoError(t, far.Close())
	_, err = handles.ReceiveBuffer(ctx, far, d, handles.ImportOptions{})
	require.ErrorIs(t, err, cuda.ErrClosed)
}

func TestLimitsOfTheImporter(t *testing.T) {
	d := gputest.Software(t)
	near, far := peertest.Pair(t, peer.Options{})
	b := filled(t, d, 5*mib, 1)
	for _, o := range []handles.ImportOptions{{MaxBytes: 4 * mib}, {MaxChunks: 2}} {
		var group errgroup.Group
		group.Go(func() error { return handles.SendBuffer(t.Context(), near, b) })
		_, err := handles.ReceiveBuffer(t.Context(), far, d, o)
		require.ErrorIs(t, err, peer.ErrTooLarge)
		err = group.Wait()
		require.ErrorIs(t, err, peer.ErrRefused)
		require.ErrorContains(t, err, "too large")
	}
	i := passBuffer(t, near, far, b, d, handles.ImportOptions{MaxBytes: 6 * mib, MaxChunks: 3})
	require.NoError(t, i.Close())
}

func TestNoReceiverTakesTheOffer(t *testing.T) {
	peertest.NoLeak(t)
	d := gputest.Software(t)
	near, far := peertest.Pair(t, peer.Options{Timeout: 100 * time.Millisecond})
	b := filled(t, d, 5*mib, 1)
	err := handles.SendBuffer(t.Context(), near, b)
	require.ErrorIs(t, err, peer.ErrTimeout)
	peertest.SetTimeout(near, peertest.Guard)
	peertest.SetTimeout(far, peertest.Guard)
	ctx, cancel := context.WithCancel(t.Context())
	time.AfterFunc(10*time.Millisecond, cancel)
	require.ErrorIs(t, handles.SendBuffer(ctx, near, b), context.Canceled)
	// A withdrawn offer is not received: the receiver that comes returns the last reason, and
	// the connection goes on.
	_, err = handles.ReceiveBuffer(peertest.Context(t), far, d, handles.ImportOptions{})
	require.ErrorIs(t, err, peer.ErrRefused)
	require.ErrorContains(t, err, context.Canceled.Error())
	other := filled(t, d, mib, 2)
	i := passBuffer(t, near, far, other, d, handles.ImportOptions{})
	require.Equal(t, pattern(mib, 2), read(t, i))
	require.NoError(t, i.Close())
}

func TestBothWaysAndBesideMessages(t *testing.T) {
	peertest.NoLeak(t)
	d := gputest.Software(t)
	near, far := peertest.Pair(t, peer.Options{})
	there, back := filled(t, d, 5*mib, 1), filled(t, d, 3*mib, 2)
	ctx := peertest.Context(t)
	const rounds = 20
	var group errgroup.Group
	for _, c := range []struct {
		conn  *peer.Conn
		sends *vmm.Buffer
		takes int
	}{{near, there, 3 * mib}, {far, back, 5 * mib}} {
		group.Go(func() error {
			for range rounds {
				if err := handles.SendBuffer(ctx, c.conn, c.sends); err != nil {
					return err
				}
			}
			return nil
		})
		group.Go(func() error {
			for range rounds {
				i, err := handles.ReceiveBuffer(ctx, c.conn, d, handles.ImportOptions{})
				if err != nil {
					return err
				}
				if i.Len() != c.takes {
					return fmt.Errorf("%d bytes came", i.Len())
				}
				if err := i.Close(); err != nil {
					return err
				}
			}
			return nil
		})
		group.Go(func() error {
			for n := range rounds {
				if err := c.conn.Send(ctx, peer.Message{Kind: 1, Body: []byte{byte(n)}}); err != nil {
					return err
				}
			}
			return nil
		})
		group.Go(func() error {
			for n := range rounds {
				m, err := c.conn.Receive(ctx)
				if err != nil {
					return err
				}
				if len(m.Body) != 1 || m.Body[0] != byte(n) {
					return fmt.Errorf("message %d is %v", n, m.Body)
				}
			}
			return nil
		})
	}
	require.NoError(t, group.Wait())
}

// A message that comes before the reply waits for Receive.
func TestMessagesWaitBesideATransfer(t *testing.T) {
	d := gputest.Software(t)
	near, far := peertest.Pair(t, peer.Options{})
	b := filled(t, d, mib, 1)
	f := peertest.NullFD(t)
	defer f.Close()
	require.NoError(t, far.Send(t.Context(), peer.Message{Kind: 3, Body: []byte("first"), FDs: []*peer.FD{f}}))
	i := passBuffer(t, near, far, b, d, handles.ImportOptions{})
	require.NoError(t, i.Close())
	m, err := near.Receive(t.Context())
	require.NoError(t, err)
	require.Equal(t, "first", string(m.Body))
	require.NoError(t, m.Close())
}

func TestSharedAndReleasedIsCounted(t *testing.T) {
	gputest.Each(t, func(t *testing.T, d *cuda.Device) {
		near, far := peertest.Pair(t, peer.Options{})
		s := d.System()
		before := s.Stats()
		b, quiet := filled(t, d, 3*mib, 1), filled(t, d, mib, 2)
		i := passBuffer(t, near, far, b, d, handles.ImportOptions{})
		require.Equal(t, before.SharedReleased, s.Stats().SharedReleased)
		require.NoError(t, b.Close())
		require.NoError(t, quiet.Close())
		st := s.Stats()
		require.Equal(t, before.SharedReleased+2, st.SharedReleased)
		require.Equal(t, before.SharedReleasedBytes+4*mib, st.SharedReleasedBytes)
		require.NoError(t, i.Close())
		require.Equal(t, st.SharedReleased, s.Stats().SharedReleased, "an import is not an export")
	})
}
