package managed_test

import (
	"testing"

	"github.com/cuvmm/cuvmm/cuda"
	"github.com/cuvmm/cuvmm/cuda/sim"
	"github.com/cuvmm/cuvmm/internal/test/gputest"
	"github.com/cuvmm/cuvmm/managed"
	"github.com/stretchr/testify/require"
)

// Every location times every operation, on both drivers and several machines.

// operations take a location each.
var operations = []struct {
	name string
	do   func(b *managed.Buffer, s *cuda.Stream, l cuda.Location) error
	// read is where the location shows afterwards; nil where nowhere.
	read func(b *managed.Buffer, l cuda.Location) (cuda.Location, error)
	// accessors takes devices and the host alone, batches needs CUDA 13.0.
	accessors, batches bool
}{
	{
		name: "SetPreferred",
		do:   func(b *managed.Buffer, _ *cuda.Stream, l cuda.Location) error { return b.SetPreferred(l) },
		read: func(b *managed.Buffer, _ cuda.Location) (cuda.Location, error) { return b.Preferred() },
	},
	{
		name: "AccessedBy.Add", accessors: true,
		do:   func(b *managed.Buffer, _ *cuda.Stream, l cuda.Location) error { return b.AccessedBy().Add(l) },
		read: member,
	},
	{
		name: "AccessedBy.Assign", accessors: true,
		do:   func(b *managed.Buffer, _ *cuda.Stream, l cuda.Location) error { return b.AccessedBy().Assign(l) },
		read: member,
	},
	{
		name: "AccessedBy.Remove", accessors: true,
		do: func(b *managed.Buffer, _ *cuda.Stream, l cuda.Location) error { return b.AccessedBy().Remove(l) },
	},
	{
		name: "AccessedBy.Contains", accessors: true,
		do: func(b *managed.Buffer, _ *cuda.Stream, l cuda.Location) error {
			_, err := b.AccessedBy().Contains(l)
			return err
		},
	},
	{
		name: "Prefetch",
		do:   func(b *managed.Buffer, s *cuda.Stream, l cuda.Location) error { return b.Prefetch(s, l) },
		read: lastPrefetch,
	},
	{
		name: "PrefetchBatch",
		do: func(b *managed.Buffer, s *cuda.Stream, l cuda.Location) error {
			return managed.PrefetchBatch(s, []managed.Range{b.Range}, l)
		},
		read: lastPrefetch,
	},
	{
		name: "DiscardPrefetch", batches: true,
		do:   func(b *managed.Buffer, s *cuda.Stream, l cuda.Location) error { return b.DiscardPrefetch(s, l) },
		read: lastPrefetch,
	},
	{
		name: "DiscardPrefetchBatch", batches: true,
		do: func(b *managed.Buffer, s *cuda.Stream, l cuda.Location) error {
			return managed.DiscardPrefetchBatch(s, []managed.Range{b.Range}, l)
		},
		read: lastPrefetch,
	},
}

func lastPrefetch(b *managed.Buffer, _ cuda.Location) (cuda.Location, error) { return b.LastPrefetch() }

// member is the location where it is in the set, or none.
func member(b *managed.Buffer, l cuda.Location) (cuda.Location, error) {
	in, err := b.AccessedBy().Contains(l)
	if !in {
		l = cuda.Location{}
	}
	return l, err
}

// verdict is what an operation returns for a location.
type verdict int

const (
	yes verdict = iota
	never
	notHere
)

// place is a row of the table: a location, and how it is read back.
type place struct {
	name    string
	at, now cuda.Location
	// The verdict of each kind of operation.
	plain, accessors verdict
	// node: it needs the second form of the calls.
	node bool
}

func places(count int) []place {
	at := []place{
		{name: "no location", at: cuda.Location{}, plain: never, accessors: never},
		{name: "the host", at: cuda.OnHost(), now: cuda.OnHost()},
		{name: "the host with a number", at: cuda.Location{Type: cuda.LocationHost, ID: 1}, plain: never, accessors: never},
		{name: "node 0", at: cuda.OnHostNUMA(0), now: cuda.OnHostNUMA(0), accessors: never, node: true},
		{name: "node -1", at: cuda.OnHostNUMA(-1), plain: never, accessors: never},
		{name: "node 4000", at: cuda.OnHostNUMA(4000), plain: never, accessors: never},
		{name: "node 2^32", at: cuda.OnHostNUMA(1 << 32), plain: never, accessors: never},
		{name: "the thread's node", at: cuda.OnCurrentNUMA(), now: cuda.OnHostNUMA(0), accessors: never, node: true},
		{name: "device -1", at: cuda.OnDevice(-1), plain: never, accessors: never},
		{name: "a device behind the last", at: cuda.OnDevice(count), plain: never, accessors: never},
		{name: "device 2^32", at: cuda.OnDevice(1 << 32), plain: never, accessors: never},
		{name: "something else", at: cuda.Location{Type: 77}, plain: never, accessors: never},
	}
	for i := range count {
		at = append(at, place{name: cuda.OnDevice(i).String(), at: cuda.OnDevice(i), now: cuda.OnDevice(i)})
	}
	return at
}

func TestEveryLocationWithEveryOperation(t *testing.T) {
	for _, m := range []struct {
		name    string
		options sim.Options
		version int
		// without are the devices without concurrent managed access.
		without []int
	}{
		{"default", sim.Options{}, 13000, nil},
		{"three devices", devices(3), 13000, nil},
		{"12.1", sim.OlderDriver(12010), 12010, nil},
		{"12.9", sim.OlderDriver(12090), 12090, nil},
		{"no concurrent access", sim.WithoutConcurrentManagedAccess(), 13000, []int{0}},
		{"one of two without concurrent access", sim.Options{Devices: []sim.DeviceOptions{{}, sim.WithoutConcurrentManagedAccess().Devices[0]}}, 13000, []int{1}},
	} {
		t.Run(m.name, func(t *testing.T) {
			_, d := open(t, m.options)
			everyLocation(t, d, m.version, m.without)
		})
	}
	t.Run("real", func(t *testing.T) {
		d := gputest.Real(t)
		var without []int
		for i, d := range d.System().Devices() {
			if c, err := d.Capabilities(); err == nil && !c.ConcurrentManagedAccess {
				without = append(without, i)
			}
		}
		everyLocation(t, d, d.System().Driver().Version, without)
	})
}

func everyLocation(t *testing.T, d *cuda.Device, version int, without []int) {
	for _, o := range operations {
		t.Run(o.name, func(t *testing.T) {
			for _, p := range places(len(d.System().Devices())) {
				anyNode := p.at == cuda.OnCurrentNUMA() && !d.System().Driver().Software
				t.Run(p.name, func(t *testing.T) {
					b, s := buffer(t, d, 2*mib), stream(t, d)
					want := p.plain
					if o.accessors {
						want = p.accessors
					}
					if want == yes && (p.node && version < 12020 || o.batches && (version < 13000 || len(without) > 0) || lacks(p.at, without)) {
						want = notHere
					}
					// Prefetches run on a stream of the first device.
					if want == yes && !o.accessors && o.name != "SetPreferred" && len(without) > 0 && without[0] == 0 {
						want = notHere
					}
					err := o.do(b, s, p.at)
					var now cuda.Location
					if o.read != nil && (!o.accessors || want == yes) {
						var readErr error
						now, readErr = o.read(b, p.at)
						require.NoError(t, readErr)
					}
					switch want {
					case yes:
						require.NoError(t, err)
						if o.read != nil {
							want := p.now
							switch {
							case o.name == "SetPreferred" && p.node:
								want = cuda.Location{} // the driver takes it and forgets it
								if now == cuda.OnHost() && !d.System().Driver().Software {
									want = now // or makes it the host, on some machines
								}
							case anyNode: // whichever this thread is on
								want.ID = now.ID
							}
							require.Equal(t, want, now)
						}
						return
					case never:
						if o.name == "SetPreferred" && p.at == (cuda.Location{}) {
							require.NoError(t, err, "that takes the advice back")
							return
						}
						require.ErrorIs(t, err, cuda.ErrInvalidArgument)
						require.ErrorContains(t, err, p.at.String())
					case notHere:
						require.ErrorIs(t, err, cuda.ErrNotSupported)
					}
					require.Zero(t, now, "it was changed")
				})
			}
		})
	}
}

func lacks(l cuda.Location, without []int) bool {
	for _, d := range without {
		if l == cuda.OnDevice(d) {
			return true
		}
	}
	return false
}

// An argument that could never work is named even where the call is missing.
func TestArgumentsBeforeSupport(t *testing.T) {
	gputest.Alone(t)
	_, d := open(t, sim.OlderDriver(12010))
	b, s := buffer(t, d, mib), stream(t, d)
	require.ErrorIs(t, b.DiscardPrefetch(s, cuda.OnDevice(9)), cuda.ErrInvalidArgument)
	require.ErrorIs(t, b.Discard(legacy(t, d)), cuda.ErrInvalidArgument)
	require.ErrorIs(t, b.Prefetch(s, cuda.OnHostNUMA(-7)), cuda.ErrInvalidArgument)
	require.ErrorIs(t, managed.DiscardPrefetchBatch(s, []managed.Range{b.Range, b.Range}, cuda.OnHostNUMA(0), cuda.OnDevice(9)), cuda.ErrInvalidArgument)
	require.ErrorIs(t, b.AccessedBy().Assign(cuda.OnHost(), cuda.OnHostNUMA(0)), cuda.ErrInvalidArgument)

	err := b.Discard(s)
	require.ErrorIs(t, err, cuda.ErrNotSupported)
	require.ErrorContains(t, err, "13.0")
	err = b.SetPreferred(cuda.OnHostNUMA(0))
	require.ErrorIs(t, err, cuda.ErrNotSupported)
	require.ErrorContains(t, err, "use cuda.OnHost")
}

// The remedy of what a device without concurrent access refuses is not refused in turn.
func TestPrefetchesOfADeviceWithoutConcurrentAccess(t *testing.T) {
	_, d := open(t, sim.WithoutConcurrentManagedAccess())
	b, s := buffer(t, d, 2*mib), stream(t, d)
	for _, to := range []cuda.Location{d.Location(), cuda.OnHost()} {
		for name, err := range map[string]error{
			"Prefetch": b.Prefetch(s, to), "without a stream": b.Prefetch(nil, to), "PrefetchBatch": managed.PrefetchBatch(s, []managed.Range{b.Range}, to),
			"DiscardPrefetch": b.DiscardPrefetch(s, to),
		} {
			require.ErrorIs(t, err, cuda.ErrNotSupported, name)
			require.ErrorContains(t, err, "or do without", name)
			require.NotContains(t, err.Error(), "OnHost", name)
		}
	}
}
