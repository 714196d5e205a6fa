package multicast_test

import (
	"testing"
	"time"

	"github.com/cuvmm/cuvmm/csrc/kernels"
	"github.com/cuvmm/cuvmm/cuda"
	"github.com/cuvmm/cuvmm/cuda/sim"
	"github.com/cuvmm/cuvmm/handles"
	"github.com/cuvmm/cuvmm/handles/peer"
	"github.com/cuvmm/cuvmm/internal/phys"
	"github.com/cuvmm/cuvmm/internal/test/gputest"
	"github.com/cuvmm/cuvmm/multicast"
	"github.com/cuvmm/cuvmm/vmm"
	"github.com/stretchr/testify/require"
)

func TestSupported(t *testing.T) {
	m, devices := open(t, 3)
	require.NoError(t, multicast.Supported(devices...))
	require.NoError(t, multicast.Supported(devices[1]))
	require.Zero(t, m.Count("cuMulticastCreate"), "nothing is created")

	o := sim.WithMulticast(2)
	o.Devices[1].Attributes = nil
	_, without := sim.Open(t, o)
	err := multicast.Supported(without.Devices()...)
	require.ErrorIs(t, err, cuda.ErrNotSupported)
	require.ErrorContains(t, err, "device 1 (Software GPU) has no multicast")

	o = sim.WithMulticast(1)
	o.DriverVersion = 12000
	_, old := sim.Open(t, o)
	err = multicast.Supported(old.Devices()...)
	require.ErrorIs(t, err, cuda.ErrNotSupported)
	require.ErrorContains(t, err, "12.1", "the version that it needs")

	_, plain := sim.Open(t)
	_, err = multicast.Create(plain, 1, multicast.Properties{Devices: 1})
	require.ErrorIs(t, err, cuda.ErrNotSupported)
	require.ErrorContains(t, err, "; multicast needs devices on an NVSwitch")

	require.ErrorIs(t, multicast.Supported(), cuda.ErrInvalidArgument)
	require.ErrorIs(t, multicast.Supported(devices[0], nil), cuda.ErrInvalidArgument)
	require.ErrorIs(t, multicast.Supported(devices[0], devices[0]), cuda.ErrInvalidArgument)
	require.ErrorIs(t, multicast.Supported(devices[0], without.Devices()[0]), cuda.ErrForeign)
}

// On a real GPU only what creates nothing is called, and creating is refused
// before the driver is asked.
func TestOnEitherDriver(t *testing.T) {
	gputest.Each(t, func(t *testing.T, d *cuda.Device) {
		caps, err := d.Capabilities()
		require.NoError(t, err)
		err = multicast.Supported(d)
		if !caps.Multicast {
			require.ErrorIs(t, err, cuda.ErrNotSupported)
			return
		}
		require.NoError(t, err)
		least, err := multicast.Granularity(d.System(), multicast.Properties{Devices: 1})
		require.NoError(t, err)
		best, err := multicast.Granularity(d.System(), multicast.Properties{Devices: 1, Granularity: vmm.RecommendedGranularity})
		require.NoError(t, err)
		require.Positive(t, least)
		require.Zero(t, best%least)
		if !d.System().Driver().Software {
			_, err = multicast.Create(d.System(), least, multicast.Properties{Devices: 1})
			require.ErrorIs(t, err, cuda.ErrNotPermitted)
			require.ErrorContains(t, err, "cuda.Options.RealMulticast")
		}
	})
}

func TestCreate(t *testing.T) {
	_, devices := open(t, 2)
	sys := devices[0].System()
	for _, row := range []struct{ asked, size int }{{1, unit}, {unit, unit}, {unit + 1, 2 * unit}, {5 * unit, 5 * unit}} {
		for _, g := range []vmm.Granularity{vmm.MinimumGranularity, vmm.RecommendedGranularity} {
			o, err := multicast.Create(sys, row.asked, multicast.Properties{Devices: 2, Granularity: g})
			require.NoError(t, err)
			require.Equal(t, row.size, o.Size())
			require.Equal(t, multicast.Properties{Devices: 2, Granularity: g}, o.Properties())
			require.NoError(t, o.Close())
			require.NoError(t, o.Close())
		}
	}
	for _, row := range []struct {
		size int
		p    multicast.Properties
	}{
		{0, multicast.Properties{Devices: 1}},
		{-1, multicast.Properties{Devices: 1}},
		{1 << 61, multicast.Properties{Devices: 1}},
		{unit, multicast.Properties{}},
		{unit, multicast.Properties{Devices: -1}},
		{unit, multicast.Properties{Devices: 1, Handles: 2}},
		{unit, multicast.Properties{Devices: 1, Granularity: 7}},
	} {
		_, err := multicast.Create(sys, row.size, row.p)
		require.ErrorIs(t, err, cuda.ErrInvalidArgument, "%+v", row)
	}
	_, err := multicast.Create(sys, unit, multicast.Properties{Devices: 99})
	require.ErrorIs(t, err, cuda.ErrInvalidArgument)
	require.ErrorContains(t, err, "an object for 99 devices")
	require.ErrorContains(t, err, "64 on the software driver")
	_, err = multicast.Create(sys, unit, multicast.Properties{Devices: 1, Handles: vmm.Fabric})
	require.ErrorIs(t, err, cuda.ErrNotPermitted, "no channel is open")
	_, err = multicast.Create(nil, unit, multicast.Properties{Devices: 1})
	require.ErrorIs(t, err, cuda.ErrInvalidArgument)

	o := object(t, devices, unit, 0)
	require.Equal(t, "multicast object of 2 MiB for 2 devices", o.String())
	require.Contains(t, sys.Live()[0], "multicast object of 2 MiB")
	require.Zero(t, sys.Stats().AllocatedBytes, "it takes no memory")
}

// The recommended granularity is what sizes are rounded up to for speed. Parts are
// multiples of the least, whatever the object was made with.
func TestGranularities(t *testing.T) {
	opts := sim.WithMulticast(1)
	opts.MulticastRecommended = 4 * unit
	_, sys := sim.Open(t, opts)
	d := sys.Devices()[0]
	for _, row := range []struct {
		g           vmm.Granularity
		asked, size int
		granularity int
	}{
		{vmm.MinimumGranularity, 1, unit, unit},
		{vmm.RecommendedGranularity, 1, 4 * unit, 4 * unit},
		{vmm.RecommendedGranularity, 4*unit + 1, 8 * unit, 4 * unit},
	} {
		p := multicast.Properties{Devices: 1, Handles: vmm.PosixFD, Granularity: row.g}
		g, err := multicast.Granularity(sys, p)
		require.NoError(t, err)
		require.Equal(t, row.granularity, g)
		o := made[*multicast.Object](t)(multicast.Create(sys, row.asked, p))
		require.Equal(t, row.size, o.Size())
		require.NoError(t, o.AddDevice(d))
		a := allocation(t, d, 2*unit)
		closed(t, must(o.Bind(d, row.size-unit, a, unit, unit))(t))
		team := formAll(t, groupOf(t, 1), [][]*cuda.Device{{d}}, row.asked)[0]
		require.Zero(t, team.Size()%unit)
		require.NoError(t, team.Close())
		teams := form(t, groupOf(t, 1), [][]*cuda.Device{{d}}, row.asked, multicast.TeamOptions{Granularity: row.g})
		require.NoError(t, teams[0].err)
		require.Equal(t, row.size, teams[0].team.Size())
		use(t, []*multicast.Team{teams[0].team})
		require.NoError(t, teams[0].team.Close())
	}
}

func TestAClosedSystem(t *testing.T) {
	m, err := sim.New(sim.WithMulticast(1))
	require.NoError(t, err)
	sys, err := m.Open(cuda.Options{})
	require.NoError(t, err)
	d := sys.Devices()[0]
	require.NoError(t, sys.Close())
	_, err = multicast.Create(sys, unit, multicast.Properties{Devices: 1})
	require.ErrorIs(t, err, cuda.ErrClosed)
	_, err = multicast.ImportFabric(sys, cuda.FabricHandle{}, unit, 1)
	require.ErrorIs(t, err, cuda.ErrClosed)
	_, err = multicast.Granularity(sys, multicast.Properties{Devices: 1})
	require.ErrorIs(t, err, cuda.ErrClosed)
	require.ErrorIs(t, multicast.Supported(d), cuda.ErrClosed)
	for _, f := range form(t, groupOf(t, 1), [][]*cuda.Device{{d}}, unit, multicast.TeamOptions{}) {
		require.ErrorIs(t, f.err, cuda.ErrClosed)
	}
	require.NoError(t, m.Close())
}

func TestAddDevice(t *testing.T) {
	_, devices := open(t, 3)
	_, others := open(t, 1)
	o := object(t, devices[:2], unit, 0)
	require.NoError(t, o.AddDevice(devices[0]))
	require.ErrorIs(t, o.AddDevice(devices[0]), cuda.ErrInvalidArgument)
	require.ErrorIs(t, o.AddDevice(nil), cuda.ErrInvalidArgument)
	require.ErrorIs(t, o.AddDevice(others[0]), cuda.ErrForeign)
	require.NoError(t, o.AddDevice(devices[1]))
	require.ErrorIs(t, o.AddDevice(devices[2]), cuda.ErrInvalidArgument)
	require.NoError(t, o.Close())
	require.ErrorIs(t, o.AddDevice(devices[2]), cuda.ErrClosed)
}

// If no other process can add what is missing, the driver is not called: it would
// never return.
func TestNothingBlocksForEver(t *testing.T) {
	m, devices := open(t, 2)
	o := object(t, devices, unit, 0)
	require.NoError(t, o.AddDevice(devices[0]))
	a := allocation(t, devices[0], unit)
	_, err := o.Bind(devices[0], 0, a, 0, unit)
	require.ErrorIs(t, err, cuda.ErrInvalidArgument)
	require.ErrorContains(t, err, "1 of its 2 devices added")
	r := made[*vmm.Reservation](t)(vmm.Reserve(devices[0], unit, vmm.ReserveOptions{}))
	_, err = r.Map(0, o)
	require.ErrorIs(t, err, cuda.ErrInvalidArgument)
	_, err = r.MapRun(0, nil, o)
	require.ErrorIs(t, err, cuda.ErrInvalidArgument)
	require.Zero(t, m.Count("cuMulticastBindMem_v1")+m.Count("cuMemMap"))
	require.NoError(t, o.AddDevice(devices[1]))
	b, err := o.Bind(devices[0], 0, a, 0, unit)
	require.NoError(t, err)
	closed(t, b)
	mp, err := r.Map(0, o)
	require.NoError(t, err)
	closed(t, mp)
}

// A shared object blocks until the other side adds its device.
func TestBindAndMapWaitForTheOtherImport(t *testing.T) {
	_, devices := open(t, 2)
	o := object(t, devices, unit, vmm.PosixFD)
	fd, err := o.Export()
	require.NoError(t, err)
	other := made[*multicast.Object](t)(multicast.Import(devices[0].System(), fd, o.Size(), 2))
	require.NoError(t, fd.Close())
	require.NoError(t, o.AddDevice(devices[0]))
	bound := make(chan *multicast.Binding)
	a := allocation(t, devices[0], unit)
	go func() {
		b, err := o.Bind(devices[0], 0, a, 0, unit)
		if err != nil {
			t.Error(err)
		}
		bound <- b
	}()
	select {
	case <-bound:
		require.Fail(t, "it did not wait")
	case <-time.After(20 * time.Millisecond):
	}
	require.NoError(t, other.AddDevice(devices[1]))
	require.NoError(t, (<-bound).Close())
}

// Nothing ends a bind that waits for others, so closing its object does not wait
// for it. The binding keeps the object.
func TestAnObjectClosesBehindABindThatWaits(t *testing.T) {
	m, devices := open(t, 2)
	o := object(t, devices, unit, vmm.PosixFD)
	fd, err := o.Export()
	require.NoError(t, err)
	other := made[*multicast.Object](t)(multicast.Import(devices[0].System(), fd, o.Size(), 2))
	require.NoError(t, fd.Close())
	require.NoError(t, o.AddDevice(devices[0]))
	a := allocation(t, devices[0], unit)
	asked := make(chan struct{})
	m.OnCall(func(call string) {
		if call == "cuMulticastBindMem_v1" {
			close(asked)
		}
	})
	bound := make(chan *multicast.Binding, 1)
	go func() {
		b, err := o.Bind(devices[0], 0, a, 0, unit)
		if err != nil {
			t.Error(err)
		}
		bound <- b
	}()
	<-asked
	require.NoError(t, o.Close())
	require.NoError(t, a.Close())
	_, err = o.Bind(devices[0], 0, a, 0, unit)
	require.ErrorIs(t, err, cuda.ErrClosed)
	require.Empty(t, bound)
	require.NoError(t, other.AddDevice(devices[1]))
	require.NoError(t, (<-bound).Close())
	m.OnCall(nil)
}

func TestBindIsChecked(t *testing.T) {
	for _, version := range []int{13000, 13010} {
		opts := sim.WithMulticast(2)
		opts.DriverVersion = version
		m, sys := sim.Open(t, opts)
		devices := sys.Devices()
		_, others := open(t, 1)
		o := complete(t, devices, 4*unit)
		a, far := allocation(t, devices[0], 4*unit), allocation(t, devices[1], 4*unit)
		foreign := allocation(t, others[0], unit)
		gone, err := vmm.Create(devices[0], unit, vmm.Properties{})
		require.NoError(t, err)
		require.NoError(t, gone.Close())
		host := made[*vmm.Allocation](t)(vmm.Create(devices[0], unit, vmm.Properties{Location: cuda.OnHost()}))
		node := made[*vmm.Allocation](t)(vmm.Create(devices[0], unit, vmm.Properties{Location: cuda.OnHostNUMA(0)}))
		half := object(t, devices, unit, vmm.PosixFD)
		require.NoError(t, half.AddDevice(devices[0]))
		private := made[*vmm.Allocation](t)(vmm.Create(devices[0], unit, vmm.Properties{Handles: vmm.NoHandles}))
		d := devices[0]
		for what, row := range map[string]struct {
			do   func() (*multicast.Binding, error)
			want error
		}{
			"nil device":             {func() (*multicast.Binding, error) { return o.Bind(nil, 0, a, 0, unit) }, cuda.ErrInvalidArgument},
			"nil memory":             {func() (*multicast.Binding, error) { return o.Bind(d, 0, nil, 0, unit) }, cuda.ErrInvalidArgument},
			"nil allocation":         {func() (*multicast.Binding, error) { return o.Bind(d, 0, (*vmm.Allocation)(nil), 0, unit) }, cuda.ErrInvalidArgument},
			"zero mapping":           {func() (*multicast.Binding, error) { return o.BindMapping(d, 0, &vmm.Mapping{}, 0, unit) }, cuda.ErrInvalidArgument},
			"nil mapping":            {func() (*multicast.Binding, error) { return o.BindMapping(d, 0, nil, 0, unit) }, cuda.ErrInvalidArgument},
			"foreign device":         {func() (*multicast.Binding, error) { return o.Bind(others[0], 0, a, 0, unit) }, cuda.ErrForeign},
			"foreign memory":         {func() (*multicast.Binding, error) { return o.Bind(d, 0, foreign, 0, unit) }, cuda.ErrForeign},
			"closed memory":          {func() (*multicast.Binding, error) { return o.Bind(d, 0, gone, 0, unit) }, cuda.ErrClosed},
			"the object itself":      {func() (*multicast.Binding, error) { return o.Bind(d, 0, o, 0, unit) }, cuda.ErrInvalidArgument},
			"no bytes":               {func() (*multicast.Binding, error) { return o.Bind(d, 0, a, 0, 0) }, cuda.ErrOutOfRange},
			"a negative size":        {func() (*multicast.Binding, error) { return o.Bind(d, 0, a, 0, -unit) }, cuda.ErrOutOfRange},
			"a negative offset":      {func() (*multicast.Binding, error) { return o.Bind(d, -unit, a, 0, unit) }, cuda.ErrOutOfRange},
			"a negative memory":      {func() (*multicast.Binding, error) { return o.Bind(d, 0, a, -unit, unit) }, cuda.ErrOutOfRange},
			"half a unit":            {func() (*multicast.Binding, error) { return o.Bind(d, 0, a, 0, unit/2) }, cuda.ErrInvalidArgument},
			"an odd offset":          {func() (*multicast.Binding, error) { return o.Bind(d, 4096, a, 0, unit) }, cuda.ErrInvalidArgument},
			"an odd memory offset":   {func() (*multicast.Binding, error) { return o.Bind(d, 0, a, 4096, unit) }, cuda.ErrInvalidArgument},
			"past the object":        {func() (*multicast.Binding, error) { return o.Bind(d, 3*unit, a, 0, 2*unit) }, cuda.ErrOutOfRange},
			"past the memory":        {func() (*multicast.Binding, error) { return o.Bind(d, 0, a, 3*unit, 2*unit) }, cuda.ErrOutOfRange},
			"overflow":               {func() (*multicast.Binding, error) { return o.Bind(d, 1<<62, a, 1<<62, 1<<62) }, cuda.ErrOutOfRange},
			"another device's":       {func() (*multicast.Binding, error) { return o.Bind(d, 0, far, 0, unit) }, cuda.ErrInvalidArgument},
			"host memory":            {func() (*multicast.Binding, error) { return o.Bind(d, 0, host, 0, unit) }, cuda.ErrNotSupported},
			"a device not added":     {func() (*multicast.Binding, error) { return half.Bind(devices[1], 0, far, 0, unit) }, cuda.ErrInvalidArgument},
			"memory not shareable":   {func() (*multicast.Binding, error) { return half.Bind(d, 0, private, 0, unit) }, cuda.ErrInvalidArgument},
			"a mapping, odd offset":  {func() (*multicast.Binding, error) { return o.BindMapping(d, 0, mapped(t, a, d), 1, unit) }, cuda.ErrInvalidArgument},
			"a mapping, past it":     {func() (*multicast.Binding, error) { return o.BindMapping(d, 0, mapped(t, a, d), 4*unit, unit) }, cuda.ErrOutOfRange},
			"a mapping, another's":   {func() (*multicast.Binding, error) { return o.BindMapping(d, 0, mapped(t, far, devices[1]), 0, unit) }, cuda.ErrInvalidArgument},
			"the object's own range": {func() (*multicast.Binding, error) { return o.BindMapping(d, 0, mapped(t, o, d), 0, unit) }, cuda.ErrInvalidArgument},
		} {
			b, err := row.do()
			require.Nil(t, b, what)
			require.ErrorIs(t, err, row.want, what)
		}
		calls := 0
		for _, c := range []string{"cuMulticastBindMem", "cuMulticastBindMem_v1", "cuMulticastBindAddr", "cuMulticastBindAddr_v1"} {
			calls += m.Count(c)
		}
		require.Zero(t, calls, "the driver was not asked")

		// What is right, in the driver's form with a device and without.
		first, err := o.Bind(d, unit, a, 2*unit, 2*unit)
		require.NoError(t, err)
		require.Equal(t, []int{0, unit, 2 * unit}, []int{first.Device(), first.Offset(), first.Size()})
		second, err := o.BindMapping(d, 3*unit, mapped(t, a, d), unit, unit)
		require.NoError(t, err)
		_, err = o.Bind(d, 2*unit, a, 0, 2*unit)
		require.ErrorIs(t, err, cuda.ErrInUse)
		require.ErrorContains(t, err, "4 MiB bound at offset 2 MiB")
		later := map[int]int{13000: 0, 13010: 1}[version]
		require.Equal(t, later, m.Count("cuMulticastBindMem"))
		require.Equal(t, 1-later, m.Count("cuMulticastBindMem_v1"))
		require.Equal(t, later, m.Count("cuMulticastBindAddr"))
		onNode, err := o.Bind(devices[1], 0, node, 0, unit)
		if later == 0 {
			require.ErrorIs(t, err, cuda.ErrNotSupported)
		} else {
			require.NoError(t, err)
			require.NoError(t, onNode.Close())
		}
		require.NoError(t, first.Close())
		require.NoError(t, first.Close())
		require.NoError(t, second.Close())
		again, err := o.Bind(d, 0, a, 0, 4*unit)
		require.NoError(t, err, "the place is free again")
		require.NoError(t, again.Close())
	}
}

func TestTheHostReachesNoMulticastObject(t *testing.T) {
	_, devices := open(t, 1)
	o := complete(t, devices, unit)
	m := mapped(t, o, devices[0])
	require.ErrorIs(t, m.SetAccess(vmm.Access{Location: cuda.OnHost(), Mode: vmm.ReadWrite}), cuda.ErrNotSupported)
	mode, err := m.Access(devices[0].Location())
	require.NoError(t, err)
	require.Equal(t, vmm.ReadWrite, mode)
}

// A broadcast through an object that was put together by hand reaches every
// replica, and nothing else.
func TestAnObjectReachesAllReplicas(t *testing.T) {
	m, devices := open(t, 3)
	o := complete(t, devices, unit)
	var own []*vmm.Mapping
	for _, d := range devices {
		a := allocation(t, d, unit)
		closed(t, must(o.Bind(d, 0, a, 0, unit))(t))
		own = append(own, mapped(t, a, d))
	}
	mc := mapped(t, o, devices...)
	src := mapped(t, allocation(t, devices[1], unit), devices[1])
	s := stream(t, devices[1])
	mod := made[*cuda.Module](t)(devices[1].LoadModule(kernels.Multimem))
	k, err := mod.Kernel(kernels.Broadcast)
	require.NoError(t, err)
	require.NoError(t, s.Memset(src.Ptr(), 7, unit))
	require.NoError(t, k.Launch(s, cuda.Threads(1000), mc.Ptr(), src.Ptr(), uint64(1000)))
	require.NoError(t, s.Synchronize())
	for _, r := range own {
		got, err := m.Bytes(r.Ptr(), 4004)
		require.NoError(t, err)
		for i, b := range got {
			want := byte(7)
			if i >= 4000 {
				want = 0
			}
			require.Equal(t, want, b, "byte %d", i)
		}
	}
}

func must[T any](v T, err error) func(t testing.TB) T {
	return func(t testing.TB) T {
		t.Helper()
		require.NoError(t, err)
		return v
	}
}

func TestShare(t *testing.T) {
	_, devices := open(t, 1)
	sys := devices[0].System()
	private := object(t, devices, unit, 0)
	_, err := private.Export()
	require.ErrorIs(t, err, cuda.ErrNotSupported)
	o := object(t, devices, unit, vmm.PosixFD)
	_, err = o.ExportFabric()
	require.ErrorIs(t, err, cuda.ErrNotSupported)
	fd, err := o.Export()
	require.NoError(t, err)
	for _, row := range []struct{ size, devices int }{{0, 1}, {unit / 2, 1}, {1 << 61, 1}, {unit, 0}} {
		_, err = multicast.Import(sys, fd, row.size, row.devices)
		require.ErrorIs(t, err, cuda.ErrInvalidArgument)
	}
	_, err = multicast.Import(nil, fd, unit, 1)
	require.ErrorIs(t, err, cuda.ErrInvalidArgument)
	_, err = multicast.Import(sys, nil, unit, 1)
	require.ErrorIs(t, err, cuda.ErrInvalidArgument)
	_, err = multicast.ImportFabric(sys, cuda.FabricHandle{1}, unit, 1)
	require.Error(t, err)
	in, err := multicast.Import(sys, fd, unit, 1)
	require.NoError(t, err)
	_, err = in.Export()
	require.ErrorIs(t, err, cuda.ErrNotSupported, "only the creator exports")
	require.NoError(t, fd.Close())
	_, err = multicast.Import(sys, fd, unit, 1)
	require.ErrorIs(t, err, cuda.ErrClosed)
	require.NoError(t, o.Close())
	_, err = o.Export()
	require.ErrorIs(t, err, cuda.ErrClosed)
	require.NoError(t, in.AddDevice(devices[0]), "the import lives on")
	require.NoError(t, in.Close())
}

// Ordinary memory is no multicast object, by whatever handle it comes, and none of
// it is kept.
func TestImportOfOrdinaryMemory(t *testing.T) {
	opts := sim.WithMulticast(1)
	opts.Folder, opts.Fabric = t.TempDir(), sim.Fabric{Channels: []int{0}}
	_, sys := sim.Open(t, opts)
	memory, err := vmm.NewBuffer(sys.Devices()[0], vmm.BufferOptions{Reserve: unit, Memory: vmm.Properties{Handles: vmm.PosixFD | vmm.Fabric}})
	require.NoError(t, err)
	_, err = memory.AppendUndefined(unit)
	require.NoError(t, err)
	byFile, err := handles.LeaseBuffer(memory, handles.LeaseOptions{Handle: vmm.PosixFD})
	require.NoError(t, err)
	_, err = multicast.Import(sys, byFile.Offer().Files[0], unit, 1)
	require.ErrorIs(t, err, handles.ErrMismatch)
	var typed *peer.Error
	require.ErrorAs(t, err, &typed)
	require.Equal(t, "multicast.Import", typed.Op)
	require.ErrorContains(t, err, "Object.Export")
	byFabric, err := handles.LeaseBuffer(memory, handles.LeaseOptions{Handle: vmm.Fabric})
	require.NoError(t, err)
	_, err = multicast.ImportFabric(sys, byFabric.Offer().Handles[0], unit, 1)
	require.ErrorIs(t, err, handles.ErrMismatch)
	require.NoError(t, byFile.Close())
	require.NoError(t, byFabric.Close())
	require.NoError(t, memory.Close())
}

// By fabric handle, on a machine that processes share.
func TestShareByFabricHandle(t *testing.T) {
	opts := sim.WithMulticast(1)
	opts.Folder, opts.Fabric = t.TempDir(), sim.Fabric{Channels: []int{0}}
	_, sys := sim.Open(t, opts)
	o, err := multicast.Create(sys, unit, multicast.Properties{Devices: 1, Handles: vmm.Fabric})
	require.NoError(t, err)
	h, err := o.ExportFabric()
	require.NoError(t, err)
	in, err := multicast.ImportFabric(sys, h, unit, 1)
	require.NoError(t, err)
	require.NoError(t, in.Close())
	require.NoError(t, o.Close())
	_, err = multicast.ImportFabric(sys, h, unit, 1)
	require.Error(t, err, "the handle keeps nothing")
}

// The object goes on to name the memory that was bound, so that memory is not taken.
func TestBoundMemoryIsNotTaken(t *testing.T) {
	_, devices := open(t, 2)
	o := complete(t, devices, unit)
	a := allocation(t, devices[0], unit)
	b, err := o.Bind(devices[0], 0, a, 0, unit)
	require.NoError(t, err)
	require.ErrorIs(t, phys.Of(a).Take("test"), cuda.ErrInUse)
	require.NoError(t, b.Close())
	require.ErrorIs(t, phys.Of(o).Take("test"), cuda.ErrNotSupported)
	require.NoError(t, phys.Of(a).Take("test"))
	_, err = o.Bind(devices[0], 0, a, 0, unit)
	require.ErrorIs(t, err, cuda.ErrSuspended)
	phys.Of(a).Return()
	b, err = o.Bind(devices[0], 0, a, 0, unit)
	require.NoError(t, err)
	require.NoError(t, b.Close())
}
