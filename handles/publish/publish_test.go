//go:build linux

package publish_test

import (
	"context"
	"io"
	"path/filepath"
	"slices"
	"testing"
	"time"

	"github.com/cuvmm/cuvmm/cuda"
	"github.com/cuvmm/cuvmm/cuda/sim"
	"github.com/cuvmm/cuvmm/handles"
	"github.com/cuvmm/cuvmm/handles/peer"
	"github.com/cuvmm/cuvmm/handles/publish"
	"github.com/cuvmm/cuvmm/internal/driver"
	"github.com/cuvmm/cuvmm/internal/test/gputest"
	"github.com/cuvmm/cuvmm/internal/test/peertest"
	"github.com/cuvmm/cuvmm/vmm"
	"github.com/stretchr/testify/require"
)

const mib = 1 << 20

func closeLater(t testing.TB, c io.Closer) {
	t.Cleanup(func() { require.NoError(t, c.Close()) })
}

// publishing is a server on a socket.
func publishing(t testing.TB, o publish.ServerOptions) (*publish.Server, string) {
	l, err := peer.Listen(filepath.Join(t.TempDir(), "d"), "s", peer.Options{})
	require.NoError(t, err)
	s := publish.NewServer(o)
	over := make(chan error, 1)
	go func() { over <- s.Serve(context.Background(), l) }()
	t.Cleanup(func() {
		require.NoError(t, s.Close())
		require.NoError(t, <-over)
		require.NoError(t, l.Close())
		require.Zero(t, peer.OpenFDs())
	})
	return s, l.Path()
}

func client(t testing.TB, path string) *publish.Client {
	c, err := peer.Dial(peertest.Context(t), path, peer.Options{})
	require.NoError(t, err)
	k := publish.NewClient(c)
	t.Cleanup(func() { require.NoError(t, k.Close()) })
	return k
}

// published is an empty array of which nothing is announced yet.
func published(t testing.TB, s *publish.Server, d *cuda.Device) (*vmm.Array[uint32], *publish.Publication) {
	a, err := vmm.NewArray[uint32](d, vmm.BufferOptions{Reserve: 64 * mib, Chunks: vmm.FixedChunks(2 * mib)})
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, a.Close()) })
	p, err := publish.Array(s, "numbers", a)
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, p.Withdraw()) })
	return a, p
}

func stream(t testing.TB, d *cuda.Device) *cuda.Stream {
	s, err := d.NewStream(cuda.StreamOptions{})
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, s.Close()) })
	return s
}

func counting(from, n int) []uint32 {
	all := make([]uint32, n)
	for i := range all {
		all[i] = uint32(from + i)
	}
	return all
}

func elementsOf(t testing.TB, a *vmm.Array[uint32], s *cuda.Stream) []uint32 {
	got := make([]uint32, a.Len())
	require.NoError(t, a.All().CopyTo(s, got))
	return got
}

func TestGrowthTravelsWithItsData(t *testing.T) {
	gputest.Each(t, func(t *testing.T, d *cuda.Device) {
		server, path := publishing(t, publish.ServerOptions{})
		a, p := published(t, server, d)
		writer := stream(t, d)

		k := client(t, path)
		f, err := publish.Follow[uint32](peertest.Context(t), k, d, "numbers", publish.FollowOptions{})
		require.NoError(t, err)
		defer func() { require.NoError(t, f.Close()) }()
		require.Zero(t, f.Len())
		reader := stream(t, d)
		at := f.Array().Ptr()
		var want []uint32
		for i := range 5 {
			more := counting(i*1_000_000, 1_000_000)
			want = append(want, more...)
			require.NoError(t, gputest.Err(a.Append(writer, more)))
			require.NoError(t, p.Announce(peertest.Context(t), a.Len(), writer))
			require.NoError(t, f.Next(peertest.Context(t), reader))
			require.Equal(t, len(want), f.Len())
			require.Equal(t, len(want), f.Array().Len())
			require.EqualValues(t, i+1, f.Generation())
			require.True(t, slices.Equal(want, elementsOf(t, f.Array(), reader)))
			require.Equal(t, at, f.Array().Ptr())
		}
		require.NoError(t, p.Settle(peertest.Context(t)))
		require.NoError(t, f.Err())
	})
}

func TestShrinkageTravels(t *testing.T) {
	gputest.Each(t, func(t *testing.T, d *cuda.Device) {
		server, path := publishing(t, publish.ServerOptions{})
		a, p := published(t, server, d)
		writer := stream(t, d)
		k := client(t, path)
		reader := stream(t, d)
		var told []int
		f, err := publish.Follow[uint32](peertest.Context(t), k, d, "numbers", publish.FollowOptions{Quiesce: func(length int) []*cuda.Stream {
			told = append(told, length)
			return []*cuda.Stream{reader}
		}})
		require.NoError(t, err)
		defer func() { require.NoError(t, f.Close()) }()
		require.NoError(t, gputest.Err(a.Append(writer, counting(0, 2_000_000))))
		require.NoError(t, p.Announce(peertest.Context(t), a.Len(), writer))
		require.NoError(t, f.Next(peertest.Context(t), reader))
		require.Equal(t, 4, p.Stats().Chunks)

		require.NoError(t, p.Shrink(600_000, writer))
		require.Equal(t, 600_000, a.Len())
		require.NoError(t, p.Settle(peertest.Context(t)))
		require.NoError(t, f.Next(peertest.Context(t), reader))
		require.Equal(t, []int{600_000}, told)
		require.Equal(t, 600_000, f.Len())
		require.Equal(t, 4*mib, f.Array().Stats().Committed)
		require.True(t, slices.Equal(counting(0, 600_000), elementsOf(t, f.Array(), reader)))
		require.Zero(t, p.Stats().Pinned)

		require.NoError(t, gputest.Err(a.Append(writer, counting(7, 2_000_000))))
		require.NoError(t, p.Announce(peertest.Context(t), a.Len(), writer))
		require.NoError(t, f.Next(peertest.Context(t), reader))
		require.True(t, slices.Equal(append(counting(0, 600_000), counting(7, 2_000_000)...), elementsOf(t, f.Array(), reader)))
	})
}

func TestPublishedMemoryIsHeld(t *testing.T) {
	d := gputest.Software(t)
	server, _ := publishing(t, publish.ServerOptions{})
	a, p := published(t, server, d)
	s := stream(t, d)
	require.NoError(t, gputest.Err(a.Append(nil, counting(0, 2_000_000))))
	require.NoError(t, p.Announce(peertest.Context(t), 1_000_000, nil))
	require.ErrorIs(t, a.Close(), cuda.ErrInUse)
	require.ErrorContains(t, a.Close(), `publication "numbers"`)
	require.ErrorIs(t, a.CloseAfter(s), cuda.ErrInUse)
	require.NoError(t, a.Resize(nil, 1_500_000))
	require.NoError(t, a.Clip(), "what was not announced is the owner's")
	require.NoError(t, a.Resize(nil, 10))
	require.ErrorIs(t, a.Clip(), cuda.ErrInUse)
	require.ErrorIs(t, a.Buffer().ClipAfter(s), cuda.ErrInUse)
	require.NoError(t, gputest.Err(a.Append(nil, counting(0, 1_500_000))), "growth goes on")
	require.NoError(t, p.Shrink(100))
	require.Equal(t, 100, a.Len())
	require.NoError(t, a.Clip())
	require.NoError(t, p.Withdraw())
	require.NoError(t, p.Withdraw())
	require.ErrorIs(t, p.Announce(peertest.Context(t), 100, nil), cuda.ErrClosed)
	require.ErrorIs(t, p.Shrink(1), cuda.ErrClosed)
	require.ErrorIs(t, p.Settle(peertest.Context(t)), cuda.ErrClosed)
	require.NoError(t, a.Close())
}

func TestGrowthBeyondAFollowersRoomIsItsErrorAlone(t *testing.T) {
	gputest.Each(t, func(t *testing.T, d *cuda.Device) {
		server, path := publishing(t, publish.ServerOptions{})
		a, p := published(t, server, d)
		k := client(t, path)
		small := followed(t, k, d, publish.FollowOptions{Reserve: 4*mib - 1})
		large := followed(t, k, d, publish.FollowOptions{Reserve: 1 << 40, Align: 4 << 20})
		require.Zero(t, uint64(large.Array().Ptr())%(4<<20))
		announce := func(n int) {
			require.NoError(t, gputest.Err(a.Append(nil, counting(a.Len(), n))))
			require.NoError(t, p.Announce(peertest.Context(t), a.Len(), nil))
		}
		announce(1_000_000)
		require.NoError(t, small.Next(peertest.Context(t)))
		require.Equal(t, 4*mib, small.Array().Stats().Reserved)
		require.Equal(t, a.Stats().Reserved, large.Array().Stats().Reserved, "the publisher's maximum")
		announce(1_000_000)
		err := small.Next(peertest.Context(t))
		require.ErrorIs(t, err, cuda.ErrCapacity)
		require.ErrorContains(t, err, "4 MiB")
		require.Equal(t, 1_000_000, small.Len())
		require.NoError(t, small.Err(), "it goes on following")
		for large.Len() < 2_000_000 {
			require.NoError(t, large.Next(peertest.Context(t)))
		}
		require.NoError(t, p.Settle(peertest.Context(t)), "it has said why not")
		for _, f := range p.Stats().Followers {
			require.Equal(t, f.Bytes < 8*mib, f.Refused != "")
		}
		require.NoError(t, p.Shrink(500_000))
		for small.Len() != 500_000 || small.Generation() != 3 {
			require.NoError(t, small.Next(peertest.Context(t)))
		}
		announce(100_000)
		require.NoError(t, small.Next(peertest.Context(t)))
		require.True(t, slices.Equal(elementsOf(t, a, nil), elementsOf(t, small.Array(), nil)))
	})
}

// followed is a follower of what published publishes.
func followed(t testing.TB, k *publish.Client, d *cuda.Device, o publish.FollowOptions) *publish.Follower[uint32] {
	t.Helper()
	f, err := publish.Follow[uint32](peertest.Context(t), k, d, "numbers", o)
	require.NoError(t, err)
	closeLater(t, f)
	return f
}

func TestNothingIsShownBeforeItIsThere(t *testing.T) {
	m, sys := sim.Open(t)
	d := sys.Devices()[0]
	server, path := publishing(t, publish.ServerOptions{})
	a, p := published(t, server, d)
	writer, reader, other := stream(t, d), stream(t, d), stream(t, d)
	k := client(t, path)
	f := followed(t, k, d, publish.FollowOptions{})
	late := func(what string) *publish.Follower[uint32] {
		f := followed(t, k, d, publish.FollowOptions{})
		ctx, cancel := context.WithTimeout(t.Context(), 20*time.Millisecond)
		defer cancel()
		require.ErrorIs(t, f.Next(ctx), peer.ErrTimeout, what)
		require.Zero(t, f.Len())
		return f
	}
	release := m.Hold(writer.Handle())
	defer release()
	require.NoError(t, gputest.Err(a.Append(writer, counting(5, 1000))))
	require.NoError(t, p.Announce(peertest.Context(t), 1000, writer))
	require.NoError(t, f.Next(peertest.Context(t), reader))
	require.Equal(t, 1000, f.Len(), "the stream is ordered behind it")
	require.NoError(t, f.Order(other))
	joined := late("a follower that joins before the work is done")
	for _, s := range []*cuda.Stream{reader, other} {
		done, err := s.Done()
		require.NoError(t, err)
		require.False(t, done)
	}
	release()
	require.Equal(t, counting(5, 1000), elementsOf(t, f.Array(), reader))
	require.NoError(t, other.Synchronize())
	require.NoError(t, joined.Next(peertest.Context(t)))
	require.Equal(t, counting(5, 1000), elementsOf(t, joined.Array(), nil))
}

func TestAnnouncementsOfSeveralStreamsKeepTheirOrder(t *testing.T) {
	m, sys := sim.Open(t)
	d := sys.Devices()[0]
	server, path := publishing(t, publish.ServerOptions{})
	a, p := published(t, server, d)
	slow, quick := stream(t, d), stream(t, d)
	f := followed(t, client(t, path), d, publish.FollowOptions{})
	release := m.Hold(slow.Handle())
	defer release()
	require.NoError(t, gputest.Err(a.Append(slow, counting(0, 100))))
	require.NoError(t, p.Announce(peertest.Context(t), 100, slow))
	require.NoError(t, gputest.Err(a.Append(quick, counting(100, 100))))
	require.NoError(t, p.Announce(peertest.Context(t), 200, quick))
	require.NoError(t, quick.Synchronize(), "no stream of the user's waits for another")
	ctx, cancel := context.WithTimeout(t.Context(), 20*time.Millisecond)
	defer cancel()
	require.ErrorIs(t, f.Next(ctx), peer.ErrTimeout)
	release()
	for f.Len() < 200 {
		require.NoError(t, f.Next(peertest.Context(t)))
	}
	require.Equal(t, counting(0, 200), elementsOf(t, f.Array(), nil))
}

func TestACaptureIsNeverTouched(t *testing.T) {
	gputest.Each(t, func(t *testing.T, d *cuda.Device) {
		server, path := publishing(t, publish.ServerOptions{})
		a, p := published(t, server, d)
		s, other := stream(t, d), stream(t, d)
		f := followed(t, client(t, path), d, publish.FollowOptions{})
		require.NoError(t, gputest.Err(a.Append(nil, counting(0, 1000))))
		require.NoError(t, p.Announce(peertest.Context(t), 1000, nil))
		before := p.Stats()
		g, err := s.WithCapture(cuda.CaptureOptions{Mode: cuda.CaptureGlobal}, func() error {
			require.ErrorIs(t, p.Announce(peertest.Context(t), 1000, s), cuda.ErrCapturing)
			require.ErrorIs(t, p.Shrink(1, s), cuda.ErrCapturing)
			require.ErrorIs(t, f.Next(peertest.Context(t), s), cuda.ErrCapturing)
			require.ErrorIs(t, f.Order(s), cuda.ErrCapturing)
			require.Equal(t, before.Generation, p.Stats().Generation)
			require.Equal(t, 1000, a.Len())
			require.Zero(t, f.Len())
			// The rest goes on beside it.
			require.NoError(t, f.Next(peertest.Context(t), other))
			require.NoError(t, gputest.Err(a.Append(other, counting(0, 10))))
			require.NoError(t, p.Announce(peertest.Context(t), 1010, other))
			require.NoError(t, f.Next(peertest.Context(t), other))
			return s.Memset(a.Ptr(), 0, 4)
		})
		require.NoError(t, err)
		require.NoError(t, g.Launch(s))
		require.NoError(t, s.Synchronize())
		require.NoError(t, g.Close())
		require.Equal(t, uint32(0), elementsOf(t, f.Array(), other)[0])
	})
}

// Without 64-bit memory operations on streams the CPU waits and writes.
func TestDevicesWhoseStreamsWriteNoWords(t *testing.T) {
	m, sys := sim.Open(t, sim.Options{Devices: []sim.DeviceOptions{{Attributes: map[int]int{int(driver.AttrStreamMemOps64): 0}}}})
	d := sys.Devices()[0]
	server, path := publishing(t, publish.ServerOptions{})
	a, p := published(t, server, d)
	writer, reader := stream(t, d), stream(t, d)
	f := followed(t, client(t, path), d, publish.FollowOptions{})
	require.NoError(t, gputest.Err(a.Append(writer, counting(0, 1000))))
	release := m.Hold(writer.Handle())
	defer release()
	require.NoError(t, writer.Memset(a.Ptr(), 0, 4))
	ctx, cancel := context.WithTimeout(t.Context(), 20*time.Millisecond)
	defer cancel()
	require.ErrorIs(t, p.Announce(ctx, 1000, writer), peer.ErrTimeout, "it waits for the stream")
	require.Zero(t, p.Stats().Length)
	release()
	require.NoError(t, p.Announce(peertest.Context(t), 1000, writer))
	require.NoError(t, f.Next(peertest.Context(t), reader))
	require.NoError(t, f.Order(reader))
	require.Equal(t, append([]uint32{0}, counting(1, 999)...), elementsOf(t, f.Array(), reader))
	require.Zero(t, m.Count("cuMemHostRegister")+m.Count("cuStreamWriteValue64")+m.Count("cuStreamWaitValue64"))
}

// What the CPU waited for and the device lost was not written, and is not announced.
func TestElementsOfALostDeviceAreNotAnnounced(t *testing.T) {
	m, sys := sim.Open(t, sim.Options{Devices: []sim.DeviceOptions{{Attributes: map[int]int{int(driver.AttrStreamMemOps64): 0}}}})
	d := sys.Devices()[0]
	server, _ := publishing(t, publish.ServerOptions{})
	a, p := published(t, server, d)
	writer := stream(t, d)
	require.NoError(t, gputest.Err(a.Append(writer, counting(0, 1000))))
	release := m.Hold(writer.Handle())
	defer release()
	require.NoError(t, writer.Memset(a.Ptr(), 0, 4))
	m.Inject(sim.Fault{Call: "cuEventQuery", Result: cuda.Code(driver.IllegalAddress), Times: 1})
	for range 2 { // when the device is lost, and later
		require.ErrorIs(t, p.Announce(peertest.Context(t), 1000, writer), cuda.ErrDeviceLost)
		require.Zero(t, p.Stats().Length)
	}
}

func TestAWithdrawnPublicationStaysMapped(t *testing.T) {
	gputest.Each(t, func(t *testing.T, d *cuda.Device) {
		server, path := publishing(t, publish.ServerOptions{})
		a, p := published(t, server, d)
		k := client(t, path)
		f := followed(t, k, d, publish.FollowOptions{})
		require.NoError(t, gputest.Err(a.Append(nil, counting(0, 1000))))
		require.NoError(t, p.Announce(peertest.Context(t), 1000, nil))
		require.NoError(t, p.Settle(peertest.Context(t)))
		require.NoError(t, p.Withdraw())
		require.NoError(t, a.Close())
		require.NoError(t, f.Next(peertest.Context(t)), "what was announced before comes first")
		require.ErrorIs(t, f.Next(peertest.Context(t)), publish.ErrWithdrawn)
		require.ErrorIs(t, f.Err(), publish.ErrWithdrawn)
		require.NotErrorIs(t, f.Err(), publish.ErrUnfinished)
		require.Equal(t, counting(0, 1000), elementsOf(t, f.Array(), nil))
		_, err := publish.Follow[uint32](peertest.Context(t), k, d, "numbers", publish.FollowOptions{})
		require.ErrorIs(t, err, publish.ErrUnknown)
		// The name is free, and the connection goes on.
		b, q := published(t, server, d)
		require.NoError(t, gputest.Err(b.Append(nil, counting(3, 10))))
		require.NoError(t, q.Announce(peertest.Context(t), 10, nil))
		g := followed(t, k, d, publish.FollowOptions{})
		require.NoError(t, g.Next(peertest.Context(t)))
		require.Equal(t, counting(3, 10), elementsOf(t, g.Array(), nil))
	})
}

func TestWhatIsPublishedIsListedAndOpened(t *testing.T) {
	gputest.Each(t, func(t *testing.T, d *cuda.Device) {
		server, path := publishing(t, publish.ServerOptions{})
		a, p := published(t, server, d)
		b, err := vmm.NewBuffer(d, vmm.BufferOptions{Reserve: 4 * mib})
		require.NoError(t, err)
		closeLater(t, b)
		q, err := server.Publish("bytes", b)
		require.NoError(t, err)
		defer func() { require.NoError(t, q.Withdraw()) }()
		_, err = server.Publish("bytes", b)
		require.ErrorIs(t, err, cuda.ErrInUse)
		for _, name := range []string{"", "\xff", string(make([]byte, publish.MaxName+1))} {
			_, err = server.Publish(name, b)
			require.ErrorIs(t, err, cuda.ErrInvalidArgument)
		}
		require.NoError(t, gputest.Err(a.Append(nil, counting(0, 1_000_000))))
		require.NoError(t, p.Announce(peertest.Context(t), 900_000, nil))
		require.NoError(t, gputest.Err(b.Append(nil, []byte("hello"))))
		require.NoError(t, q.Announce(peertest.Context(t), 5, nil))

		k := client(t, path)
		all, err := k.List(peertest.Context(t))
		require.NoError(t, err)
		require.NotEqual(t, all[0].Identity, all[1].Identity)
		for i := range all {
			require.NotZero(t, all[i].Identity)
			all[i].Identity = [16]byte{}
		}
		require.Equal(t, []publish.Listing{
			{Name: "bytes", Kind: handles.BufferKind, Access: publish.WriteAccess, Length: 5, Bytes: b.Stats().Committed, Generation: 1},
			{Name: "numbers", Kind: handles.ArrayKind, Access: publish.WriteAccess, Element: handles.Uint32, ElementSize: 4, Length: 900_000, Bytes: 4 * mib, Generation: 1},
		}, all)
		opened, err := publish.Open[uint32](peertest.Context(t), k, d, "numbers", handles.ImportOptions{ReadOnly: true})
		require.NoError(t, err)
		defer func() { require.NoError(t, opened.Close()) }()
		require.True(t, slices.Equal(counting(0, 900_000), elementsOf(t, opened, nil)))
		require.Equal(t, 4*mib, opened.Stats().Reserved, "exactly what was shared")
		require.ErrorIs(t, gputest.Err(opened.Append(nil, counting(0, 200_000))), cuda.ErrCapacity)
		text, err := publish.Open[byte](peertest.Context(t), k, d, "bytes", handles.ImportOptions{})
		require.NoError(t, err)
		defer func() { require.NoError(t, text.Close()) }()
		require.NoError(t, text.All().CopyFrom(nil, []byte("reply")))
		got := make([]byte, 5)
		part, err := b.Slice(0, 5)
		require.NoError(t, err)
		require.NoError(t, part.CopyTo(nil, got))
		require.Equal(t, "reply", string(got))

		for _, follow := range []func() error{
			func() error {
				return second(publish.Follow[int32](peertest.Context(t), k, d, "numbers", publish.FollowOptions{}))
			},
			func() error {
				return second(publish.Follow[uint32](peertest.Context(t), k, d, "bytes", publish.FollowOptions{}))
			},
			func() error {
				return second(publish.Open[float64](peertest.Context(t), k, d, "numbers", handles.ImportOptions{}))
			},
		} {
			require.ErrorIs(t, follow(), handles.ErrMismatch)
		}
		_, err = publish.Open[uint32](peertest.Context(t), k, d, "numbers", handles.ImportOptions{MaxBytes: 2 * mib})
		require.ErrorIs(t, err, peer.ErrTooLarge)
		_, err = publish.Open[uint32](peertest.Context(t), k, d, "nothing", handles.ImportOptions{})
		require.ErrorIs(t, err, publish.ErrUnknown)
		_, err = publish.Open[uint32](peertest.Context(t), k, nil, "numbers", handles.ImportOptions{})
		require.ErrorIs(t, err, cuda.ErrInvalidArgument)
		require.Eventually(t, func() bool { return len(p.Stats().Followers)+len(q.Stats().Followers) == 0 }, peertest.Guard, time.Millisecond)
	})
}

func second[T any](_ T, err error) error { return err }

func TestWrongAnnouncements(t *testing.T) {
	d := gputest.Software(t)
	server, _ := publishing(t, publish.ServerOptions{})
	a, p := published(t, server, d)
	require.NoError(t, gputest.Err(a.Append(nil, counting(0, 1000))))
	require.NoError(t, p.Announce(peertest.Context(t), 1000, nil))
	other := stream(t, gputest.Software(t))
	closed, err := d.NewStream(cuda.StreamOptions{})
	require.NoError(t, err)
	require.NoError(t, closed.Close())
	over, cancel := context.WithCancel(t.Context())
	cancel()
	for what, row := range map[string]struct {
		err error
		is  error
	}{
		"longer than the array":       {p.Announce(peertest.Context(t), 1001, nil), cuda.ErrOutOfRange},
		"absurd":                      {p.Announce(peertest.Context(t), 1<<62, nil), cuda.ErrOutOfRange},
		"negative":                    {p.Announce(peertest.Context(t), -1, nil), cuda.ErrInvalidArgument},
		"shorter":                     {p.Announce(peertest.Context(t), 999, nil), cuda.ErrInvalidArgument},
		"a stream of another":         {p.Announce(peertest.Context(t), 1000, other), cuda.ErrForeign},
		"a closed stream":             {p.Announce(peertest.Context(t), 1000, closed), cuda.ErrClosed},
		"an ended context":            {p.Announce(over, 1000, nil), context.Canceled},
		"a shrink to more":            {p.Shrink(1001), cuda.ErrInvalidArgument},
		"a shrink to less than 0":     {p.Shrink(-1), cuda.ErrInvalidArgument},
		"a shrink on a closed stream": {p.Shrink(1, closed), cuda.ErrClosed},
	} {
		require.ErrorIs(t, row.err, row.is, what)
	}
	require.ErrorContains(t, p.Announce(peertest.Context(t), 1001, nil), "append or resize first")
	require.EqualValues(t, 1, p.Stats().Generation)
	hidden, err := vmm.NewBuffer(d, vmm.BufferOptions{Reserve: 2 * mib, Memory: vmm.Properties{Handles: vmm.NoHandles}})
	require.NoError(t, err)
	closeLater(t, hidden)
	_, err = server.Publish("hidden", hidden)
	require.ErrorIs(t, err, cuda.ErrNotSupported)
	require.ErrorContains(t, err, "Handles")
	_, err = server.Publish("nil", nil)
	require.ErrorIs(t, err, cuda.ErrInvalidArgument)
}

// Whichever call fails, on either side, the next generation is taken as if
// nothing had been.
func TestAFailedGenerationIsFollowedByAGoodOne(t *testing.T) {
	for _, row := range []struct {
		call      string
		announces bool // fails the publisher
	}{
		{"cuMemExportToShareableHandle", true}, {"cuEventRecord", true}, {"cuStreamWaitEvent", true}, {"cuStreamWriteValue64", true},
		{"cuMemImportFromShareableHandle", false}, {"cuMemGetAllocationPropertiesFromHandle", false}, {"cuMemMap", false}, {"cuMemSetAccess", false},
	} {
		t.Run(row.call, func(t *testing.T) {
			m, sys := sim.Open(t)
			d := sys.Devices()[0]
			server, path := publishing(t, publish.ServerOptions{})
			a, p := published(t, server, d)
			f := followed(t, client(t, path), d, publish.FollowOptions{})
			s := stream(t, d)
			require.NoError(t, gputest.Err(a.Append(s, counting(0, 1000))))
			require.NoError(t, p.Announce(peertest.Context(t), 1000, s))
			require.NoError(t, f.Next(peertest.Context(t), s))
			require.NoError(t, gputest.Err(a.Append(nil, counting(1000, 1_000_000))))
			require.NoError(t, p.Settle(peertest.Context(t)))
			m.Inject(sim.Fault{Call: row.call, Result: cuda.Code(driver.Unknown)})
			err := p.Announce(peertest.Context(t), a.Len(), s)
			if !row.announces {
				require.NoError(t, err)
				err = f.Next(peertest.Context(t), s)
			}
			require.ErrorContains(t, err, row.call)
			require.Equal(t, 1000, f.Len())
			require.NoError(t, p.Announce(peertest.Context(t), a.Len(), s))
			require.NoError(t, f.Next(peertest.Context(t), s))
			require.True(t, slices.Equal(counting(0, 1_001_000), elementsOf(t, f.Array(), s)))
			require.NoError(t, p.Settle(peertest.Context(t)))
		})
	}
}

func TestManyChunksTravelInBatches(t *testing.T) {
	d := gputest.Software(t)
	server, path := publishing(t, publish.ServerOptions{})
	a, err := vmm.NewArray[byte](d, vmm.BufferOptions{Reserve: 1 << 30, Chunks: vmm.FixedChunks(2 * mib)})
	require.NoError(t, err)
	closeLater(t, a)
	p, err := publish.Array(server, "many", a)
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, p.Withdraw()) })
	require.NoError(t, gputest.Err(a.AppendUndefined(300*mib)))
	require.NoError(t, p.Announce(peertest.Context(t), a.Len(), nil))
	k := client(t, path)
	for range 3 {
		f, err := publish.Follow[byte](peertest.Context(t), k, d, "many", publish.FollowOptions{})
		require.NoError(t, err)
		closeLater(t, f)
		require.NoError(t, f.Next(peertest.Context(t)))
		require.Equal(t, 300*mib, f.Len())
		require.Equal(t, 150, f.Array().Stats().Chunks)
	}
	opened, err := publish.Open[byte](peertest.Context(t), k, d, "many", handles.ImportOptions{})
	require.NoError(t, err)
	require.Equal(t, 150, opened.Stats().Chunks)
	require.NoError(t, opened.Close())
	_, err = publish.Open[byte](peertest.Context(t), k, d, "many", handles.ImportOptions{MaxChunks: 149})
	require.ErrorIs(t, err, peer.ErrTooLarge)
}

func TestFollowersAndClientsCloseInEveryOrder(t *testing.T) {
	for _, order := range [][]string{
		{"follower", "client", "server", "array"}, {"client", "follower", "server", "array"}, {"server", "follower", "client", "array"},
		{"server", "array", "client", "follower"}, {"client", "server", "array", "follower"}, {"server", "client", "follower", "array"},
	} {
		_, sys := sim.Open(t)
		d := sys.Devices()[0]
		server, path := publishing(t, publish.ServerOptions{})
		a, err := vmm.NewArray[uint32](d, vmm.BufferOptions{Reserve: 64 * mib})
		require.NoError(t, err)
		p, err := publish.Array(server, "numbers", a)
		require.NoError(t, err)
		k := client(t, path)
		f, err := publish.Follow[uint32](peertest.Context(t), k, d, "numbers", publish.FollowOptions{})
		require.NoError(t, err)
		require.NoError(t, gputest.Err(a.Append(nil, counting(0, 1000))))
		require.NoError(t, p.Announce(peertest.Context(t), 1000, nil))
		require.NoError(t, f.Next(peertest.Context(t)))
		all := map[string]func() error{"follower": f.Close, "client": k.Close, "server": server.Close, "array": a.Close}
		for _, what := range order {
			if what == "follower" {
				require.Equal(t, counting(0, 1000), elementsOf(t, f.Array(), nil), "after %v", order)
				require.ErrorIs(t, f.Array().Close(), cuda.ErrInUse)
				require.ErrorIs(t, gputest.Err(f.Array().Append(nil, []uint32{1})), cuda.ErrNotPermitted)
			}
			require.NoError(t, all[what](), "%s of %v", what, order)
		}
		require.ErrorIs(t, f.Next(peertest.Context(t)), cuda.ErrClosed)
		require.NoError(t, sys.Drain(peertest.Context(t)))
		require.Empty(t, sys.Live())
	}
}

func TestAFollowerOnAnotherDevice(t *testing.T) {
	gputest.EachPair(t, func(t *testing.T, d, peer *cuda.Device) {
		server, path := publishing(t, publish.ServerOptions{})
		a, p := published(t, server, d)
		s, reader := stream(t, d), stream(t, peer)
		f := followed(t, client(t, path), peer, publish.FollowOptions{ReadOnly: true})
		for i := range 3 {
			require.NoError(t, gputest.Err(a.Append(s, counting(i*1000, 1000))))
			require.NoError(t, p.Announce(peertest.Context(t), a.Len(), s))
			require.NoError(t, f.Next(peertest.Context(t), reader))
			require.Equal(t, counting(0, (i+1)*1000), elementsOf(t, f.Array(), reader))
		}
		require.ErrorIs(t, f.Array().All().Zero(reader), cuda.ErrNotPermitted)
		require.ErrorIs(t, f.Next(peertest.Context(t), nil), cuda.ErrInvalidArgument)
		require.ErrorIs(t, f.Order(), cuda.ErrInvalidArgument)
		require.ErrorIs(t, f.Order(stream(t, gputest.Software(t))), cuda.ErrForeign)
	})
}

func TestWhatIsMissingIsNamed(t *testing.T) {
	d := gputest.Software(t)
	server, _ := publishing(t, publish.ServerOptions{})
	a, _ := published(t, server, d)
	k := publish.NewClient(nil)
	for what, err := range map[string]error{
		"a server":          second(publish.Array(nil, "numbers", a)),
		"an array":          second(publish.Array[int32](server, "more", nil)),
		"a listener":        server.Serve(peertest.Context(t), nil),
		"a connection":      server.ServeConn(peertest.Context(t), nil),
		"a client":          second(publish.Follow[uint32](peertest.Context(t), nil, d, "numbers", publish.FollowOptions{})),
		"its connection":    second(publish.Follow[uint32](peertest.Context(t), k, d, "numbers", publish.FollowOptions{})),
		"a device":          second(publish.Follow[uint32](peertest.Context(t), k, nil, "numbers", publish.FollowOptions{})),
		"a sensible range":  second(publish.Follow[uint32](peertest.Context(t), k, d, "numbers", publish.FollowOptions{Reserve: -1})),
		"something to list": second(k.List(peertest.Context(t))),
	} {
		require.ErrorIs(t, err, cuda.ErrInvalidArgument, what)
	}
	require.NoError(t, k.Close())
	require.NoError(t, k.Close())
}

// A follower's endings beside streams that stand still, on each driver.
func TestEndingsBesideStreamsThatStandStill(t *testing.T) {
	gputest.Each(t, func(t *testing.T, d *cuda.Device) {
		server, path := publishing(t, publish.ServerOptions{})
		a, p := published(t, server, d)
		writer, reader, other := stream(t, d), stream(t, d), stream(t, d)
		word, err := d.NewHostBuffer(8)
		require.NoError(t, err)
		defer func() { require.NoError(t, word.Close()) }()
		goOn := func() { word.All().Bytes()[0] = 1 }
		defer goOn()
		k := client(t, path)
		require.NoError(t, gputest.Err(a.Append(writer, counting(0, 1000))))
		require.NoError(t, p.Announce(peertest.Context(t), 1000, writer))

		// A Next that names its stream does not wait for another.
		f, err := publish.Follow[uint32](peertest.Context(t), k, d, "numbers", publish.FollowOptions{})
		require.NoError(t, err)
		require.NoError(t, f.Next(peertest.Context(t), reader))
		require.Equal(t, counting(0, 1000), elementsOf(t, f.Array(), reader))
		require.NoError(t, stuck(d, other, word.All()))
		require.NoError(t, f.CloseAfter(reader))
		require.Eventually(t, func() bool { return len(p.Stats().Followers) == 0 }, peertest.Guard, time.Millisecond)
		goOn()
		require.NoError(t, other.Synchronize())
		require.NoError(t, d.System().Drain(peertest.Context(t)))
		require.NoError(t, f.Close(), "it is closed")

		// A follower with a limit does not wait for a publisher that stands still.
		f, err = publish.Follow[uint32](peertest.Context(t), k, d, "numbers", publish.FollowOptions{MaxWait: 100 * time.Millisecond})
		require.NoError(t, err)
		require.NoError(t, f.Next(peertest.Context(t), reader))
		require.NoError(t, stuck(d, writer, word.All()))
		require.NoError(t, p.Announce(peertest.Context(t), 1000, writer))
		require.NoError(t, f.Next(peertest.Context(t), reader))
		require.NoError(t, reader.Synchronize())
		require.ErrorIs(t, f.Err(), publish.ErrStalled)
		require.ErrorIs(t, f.Err(), publish.ErrUnfinished)
		require.Equal(t, 1000, f.Len())
		require.Eventually(t, func() bool { return len(p.Stats().Followers) == 0 }, peertest.Guard, time.Millisecond)
		goOn()
		require.NoError(t, f.Close())

		// Several streams, one of which is late.
		f = followed(t, k, d, publish.FollowOptions{})
		require.NoError(t, f.Next(peertest.Context(t), reader))
		require.NoError(t, stuck(d, other, word.All()))
		at, err := a.Append(other, counting(1000, 10))
		require.NoError(t, err)
		require.NoError(t, p.AnnounceRange(peertest.Context(t), at, at+10, other, writer))
		require.NoError(t, f.Next(peertest.Context(t), reader))
		done, err := reader.Done()
		require.NoError(t, err)
		require.False(t, done)
		goOn()
		require.Equal(t, counting(0, 1010), elementsOf(t, f.Array(), reader))
	})
}
