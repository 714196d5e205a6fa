package inspect_test

import (
	"testing"

	"github.com/cuvmm/cuvmm/cuda"
	"github.com/cuvmm/cuvmm/cuda/sim"
	"github.com/cuvmm/cuvmm/inspect"
	"github.com/cuvmm/cuvmm/internal/test/gputest"
	"github.com/cuvmm/cuvmm/managed"
	"github.com/stretchr/testify/require"
)

// A snapshot has the runs of managed memory that are at one location, of parts that are 64 KiB
// long or longer in larger memory.
func TestManagedMemoryInASnapshot(t *testing.T) {
	const kib, mib = 1 << 10, 1 << 20
	_, sys := sim.Open(t, sim.OlderDriver(13040))
	d := sys.Devices()[0]
	on, err := d.NewStream(cuda.StreamOptions{})
	require.NoError(t, err)
	var all []*managed.Buffer
	for _, n := range []int{3 * mib, 100, 256 * mib} {
		b, err := managed.New(d, n, managed.Options{})
		require.NoError(t, err)
		all = append(all, b)
	}
	send := func(b *managed.Buffer, from, to int, where cuda.Location) {
		part, err := b.Slice(from, to)
		require.NoError(t, err)
		require.NoError(t, part.Prefetch(on, where))
	}
	send(all[0], mib, 2*mib, cuda.OnDevice(0))
	send(all[0], 2*mib, 2*mib+128*kib, cuda.OnHost())
	send(all[0], 2*mib+512*kib, 3*mib, cuda.OnHost())
	send(all[1], 0, 100, cuda.OnHost())
	send(all[2], 0, 256*mib, cuda.OnDevice(0))
	send(all[2], mib, mib+192*kib, cuda.OnHost()) // most of a part of 256 KiB
	require.NoError(t, on.Synchronize())
	s, err := inspect.Take(sys)
	require.NoError(t, err)
	got := map[inspect.Address]inspect.Managed{}
	for _, m := range s.Managed {
		require.NotZero(t, m.Stack)
		m.Stack = 0
		got[m.Ptr] = m
	}
	want := map[inspect.Address]inspect.Managed{}
	for i, m := range []inspect.Managed{
		{Bytes: 3 * mib, Resident: []inspect.Resident{{Offset: mib, Bytes: mib, Location: "device 0"}, {Offset: 2 * mib, Bytes: 128 * kib, Location: "host"},
			{Offset: 2*mib + 512*kib, Bytes: 512 * kib, Location: "host"}}},
		{Bytes: 100, Prefetched: "host", Resident: []inspect.Resident{{Bytes: 100, Location: "host"}}},
		{Bytes: 256 * mib, Resident: []inspect.Resident{{Bytes: mib, Location: "device 0"}, {Offset: mib, Bytes: 256 * kib, Location: "host"},
			{Offset: mib + 256*kib, Bytes: 255*mib - 256*kib, Location: "device 0"}}},
	} {
		m.Ptr, m.Located = inspect.Address(all[i].Ptr()), true
		want[m.Ptr] = m
	}
	require.Equal(t, want, got)
	for _, b := range all {
		require.NoError(t, b.Close())
	}
	require.NoError(t, on.Close())
}

// If the driver cannot tell where managed memory is, a snapshot has the last prefetch.
func TestManagedMemoryOfDriversThatCannotTell(t *testing.T) {
	gputest.Each(t, func(t *testing.T, d *cuda.Device) {
		on, err := d.NewStream(cuda.StreamOptions{})
		require.NoError(t, err)
		b, err := managed.New(d, 4<<20, managed.Options{})
		require.NoError(t, err)
		require.NoError(t, b.Prefetch(on, cuda.OnDevice(d.Ordinal())))
		require.NoError(t, on.Synchronize())
		s, err := inspect.Take(d.System())
		require.NoError(t, err)
		require.Len(t, s.Managed, 1)
		s.Managed[0].Stack = 0
		require.Equal(t, inspect.Managed{Ptr: inspect.Address(b.Ptr()), Bytes: 4 << 20, Device: d.Ordinal(), Prefetched: cuda.OnDevice(d.Ordinal()).String()}, s.Managed[0])
		require.NoError(t, b.Close())
		require.NoError(t, on.Close())
	})
}
