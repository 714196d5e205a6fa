//go:build linux

package handles_test

import (
	"context"
	"path/filepath"
	"slices"
	"testing"
	"time"

	"github.com/cuvmm/cuvmm/cuda"
	"github.com/cuvmm/cuvmm/handles"
	"github.com/cuvmm/cuvmm/internal/gputest"
	"github.com/cuvmm/cuvmm/vmm"
	"github.com/stretchr/testify/require"
)

// soon is a context for what should take a moment.
func soon(t testing.TB) context.Context {
	ctx, cancel := context.WithTimeout(context.Background(), 30*time.Second)
	t.Cleanup(cancel)
	return ctx
}

// publishing is a server on a socket.
func publishing(t testing.TB, o handles.ServerOptions) (*handles.Server, string) {
	l, err := handles.Listen(filepath.Join(t.TempDir(), "d"), "s", handles.Options{})
	require.NoError(t, err)
	s := handles.NewServer(o)
	over := make(chan error, 1)
	go func() { over <- s.Serve(context.Background(), l) }()
	t.Cleanup(func() {
		require.NoError(t, s.Close())
		require.NoError(t, <-over)
		require.NoError(t, l.Close())
		require.Zero(t, handles.OpenFDs())
	})
	return s, l.Path()
}

func client(t testing.TB, path string) *handles.Client {
	c, err := handles.Dial(soon(t), path, handles.Options{})
	require.NoError(t, err)
	k := handles.NewClient(c)
	t.Cleanup(func() { require.NoError(t, k.Close()) })
	return k
}

// published is an empty array of which nothing is announced yet.
func published(t testing.TB, s *handles.Server, d *cuda.Device) (*vmm.Array[uint32], *handles.Publication) {
	a, err := vmm.NewArray[uint32](d, vmm.BufferOptions{Reserve: 64 * mib, Chunks: vmm.FixedChunks(2 * mib)})
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, a.Close()) })
	p, err := handles.PublishArray(s, "numbers", a)
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
		server, path := publishing(t, handles.ServerOptions{})
		a, p := published(t, server, d)
		writer := stream(t, d)

		k := client(t, path)
		f, err := handles.Follow[uint32](soon(t), k, d, "numbers", handles.FollowOptions{})
		require.NoError(t, err)
		defer func() { require.NoError(t, f.Close()) }()
		require.Zero(t, f.Len())
		reader := stream(t, d)
		at := f.Array().Ptr()
		var want []uint32
		for i := range 5 {
			more := counting(i*1_000_000, 1_000_000)
			want = append(want, more...)
			require.NoError(t, a.Append(writer, more))
			require.NoError(t, p.Announce(soon(t), a.Len(), writer))
			require.NoError(t, f.Next(soon(t), reader))
			require.Equal(t, len(want), f.Len())
			require.Equal(t, len(want), f.Array().Len())
			require.EqualValues(t, i+1, f.Generation())
			require.True(t, slices.Equal(want, elementsOf(t, f.Array(), reader)))
			require.Equal(t, at, f.Array().Ptr())
		}
		require.NoError(t, p.Settle(soon(t)))
		require.NoError(t, f.Err())
	})
}

func TestShrinkageTravels(t *testing.T) {
	gputest.Each(t, func(t *testing.T, d *cuda.Device) {
		server, path := publishing(t, handles.ServerOptions{})
		a, p := published(t, server, d)
		writer := stream(t, d)
		k := client(t, path)
		reader := stream(t, d)
		var told []int
		f, err := handles.Follow[uint32](soon(t), k, d, "numbers", handles.FollowOptions{Quiesce: func(length int) []*cuda.Stream {
			told = append(told, length)
			return []*cuda.Stream{reader}
		}})
		require.NoError(t, err)
		defer func() { require.NoError(t, f.Close()) }()
		require.NoError(t, a.Append(writer, counting(0, 2_000_000)))
		require.NoError(t, p.Announce(soon(t), a.Len(), writer))
		require.NoError(t, f.Next(soon(t), reader))
		require.Equal(t, 4, p.Stats().Chunks)

		require.NoError(t, p.Shrink(600_000, writer))
		require.Equal(t, 600_000, a.Len())
		require.NoError(t, p.Settle(soon(t)))
		require.NoError(t, f.Next(soon(t), reader))
		require.Equal(t, []int{600_000}, told)
		require.Equal(t, 600_000, f.Len())
		require.Equal(t, 4*mib, f.Array().Stats().Committed)
		require.True(t, slices.Equal(counting(0, 600_000), elementsOf(t, f.Array(), reader)))
		require.Zero(t, p.Stats().Pinned)

		require.NoError(t, a.Append(writer, counting(7, 2_000_000)))
		require.NoError(t, p.Announce(soon(t), a.Len(), writer))
		require.NoError(t, f.Next(soon(t), reader))
		require.True(t, slices.Equal(append(counting(0, 600_000), counting(7, 2_000_000)...), elementsOf(t, f.Array(), reader)))
	})
}
