package vmm_test

import (
	"testing"

	"github.com/cuvmm/cuvmm/cuda"
	"github.com/cuvmm/cuvmm/cuda/sim"
	"github.com/cuvmm/cuvmm/internal/driver"
	"github.com/cuvmm/cuvmm/internal/osmem"
	"github.com/cuvmm/cuvmm/internal/test/gputest"
	"github.com/cuvmm/cuvmm/vmm"
	"github.com/stretchr/testify/require"
)

// hostPlaces are where host memory can lie, on this device.
func hostPlaces(t *testing.T, d *cuda.Device) []cuda.Location {
	t.Helper()
	c, err := d.Capabilities()
	require.NoError(t, err)
	var places []cuda.Location
	if c.HostNUMAVirtualMemory {
		places = append(places, cuda.OnHostNUMA(max(c.HostNUMANode, 0)))
	}
	if c.HostVirtualMemory {
		places = append(places, cuda.OnHost())
	}
	require.NotEmpty(t, places)
	return places
}

func TestHostMemoryIsSeenByTheCPUAndTheGPU(t *testing.T) {
	gputest.Each(t, func(t *testing.T, d *cuda.Device) {
		for _, place := range hostPlaces(t, d) {
			t.Run(place.String(), func(t *testing.T) {
				a, err := vmm.NewArray[uint32](d, vmm.BufferOptions{Reserve: 16 * mib, Memory: vmm.Properties{Location: place}})
				require.NoError(t, err)
				closed(t, a)
				require.NoError(t, gputest.Err(a.Append(nil, []uint32{1, 2, 3, 4})))
				part, err := a.Slice(1, 3)
				require.NoError(t, err)
				require.NoError(t, part.Host(func(data []uint32) error {
					require.Equal(t, []uint32{2, 3}, data)
					data[0] = 20
					return nil
				}))
				got := make([]uint32, 4)
				require.NoError(t, a.All().CopyTo(nil, got))
				require.Equal(t, []uint32{1, 20, 3, 4}, got)
			})
		}
	})
}

func TestHostViewIsChecked(t *testing.T) {
	_, d := open(t)
	never := func([]byte) error { t.Fatal("called"); return nil }
	b, err := vmm.NewBuffer(d, vmm.BufferOptions{})
	require.NoError(t, err)
	closed(t, b)
	require.NoError(t, gputest.Err(b.AppendUndefined(10)))
	s, err := b.Slice(0, 10)
	require.NoError(t, err)
	require.ErrorIs(t, s.Host(never), cuda.ErrNotSupported)
	require.ErrorIs(t, vmm.Slice[byte]{}.Host(never), cuda.ErrInvalidArgument)

	a, err := vmm.Create(d, 2*mib, vmm.Properties{Location: cuda.OnHostNUMA(0)})
	require.NoError(t, err)
	closed(t, a)
	r, err := vmm.Reserve(d, 2*mib, vmm.ReserveOptions{})
	require.NoError(t, err)
	closed(t, r)
	m, err := r.Map(0, a)
	require.NoError(t, err)
	err = m.Host(never)
	require.ErrorIs(t, err, cuda.ErrNotPermitted)
	require.ErrorContains(t, err, "grant host NUMA node 0 read-write access")
	require.NoError(t, m.SetAccess(vmm.Access{Location: cuda.OnHostNUMA(0), Mode: vmm.ReadWrite}))
	require.NoError(t, m.Host(func(data []byte) error {
		require.Len(t, data, 2*mib)
		data[2*mib-1] = 1
		return nil
	}))
	require.NoError(t, m.Close())
	require.ErrorIs(t, m.Host(never), cuda.ErrClosed)
}

func TestCompressibleMemorySaysWhatWasGranted(t *testing.T) {
	for _, granted := range []bool{true, false} {
		attr := 0
		if granted {
			attr = 1
		}
		_, d := open(t, sim.Options{Devices: []sim.DeviceOptions{{Attributes: map[int]int{107: attr}}}})
		a, err := vmm.Create(d, 2*mib, vmm.Properties{Compressible: true})
		require.NoError(t, err)
		require.True(t, a.Requested().Compressible)
		got, err := a.Granted()
		require.NoError(t, err)
		require.Equal(t, granted, got.Compressible)
		require.NoError(t, a.Close())
		_, err = a.Granted()
		require.ErrorIs(t, err, cuda.ErrClosed)
	}
}

func TestDefaultsAreDecidedAndReadable(t *testing.T) {
	gputest.Each(t, func(t *testing.T, d *cuda.Device) {
		c, err := d.Capabilities()
		require.NoError(t, err)
		for _, row := range []struct {
			what    string
			p       vmm.Properties
			handles vmm.HandleTypes
			rdma    bool
		}{
			{"default", vmm.Properties{}, vmm.PosixFD, c.RDMA},
			{"nothing", vmm.Properties{Handles: vmm.NoHandles, RDMA: vmm.RDMAOff}, vmm.NoHandles, false},
			{"on a NUMA node", vmm.Properties{Location: cuda.OnHostNUMA(max(c.HostNUMANode, 0))}, vmm.PosixFD, false},
		} {
			a, err := vmm.Create(d, 2*mib, row.p)
			require.NoError(t, err, row.what)
			require.Equal(t, row.handles, a.Requested().Handles, row.what)
			require.Equal(t, row.rdma, a.Requested().RDMA == vmm.RDMARequired, row.what)
			g, err := a.Granted()
			require.NoError(t, err)
			require.Equal(t, row.handles, g.Handles, row.what)
			require.Equal(t, row.rdma, g.RDMA == vmm.RDMARequired, row.what)
			require.Equal(t, a.Requested().Location, g.Location)
			require.NoError(t, a.Close())
		}
	})
}

// needs skips a test of what a GPU may lack. The software driver's devices have
// it, where memory can be shared at all.
func needs(t *testing.T, d *cuda.Device, what string, has bool) {
	t.Helper()
	switch {
	case has:
	case d.System().Driver().Software && osmem.Linux:
		t.Fatalf("%v is to have %s", d, what)
	default:
		t.Skipf("%v has no %s", d, what)
	}
}

// An explicit request for compression beats RDMA by default; if both are requested the
// driver drops compression, and reports that.
func TestCompressionAndRDMADoNotGoTogether(t *testing.T) {
	gputest.Each(t, func(t *testing.T, d *cuda.Device) {
		c, err := d.Capabilities()
		require.NoError(t, err)
		needs(t, d, "RDMA and compression", c.RDMA && c.Compression)
		for _, row := range []struct {
			p                vmm.Properties
			compressed, rdma bool
		}{
			{vmm.Properties{Compressible: true}, true, false},
			{vmm.Properties{Compressible: true, RDMA: vmm.RDMARequired}, false, true},
		} {
			a, err := vmm.Create(d, 2*mib, row.p)
			require.NoError(t, err)
			g, err := a.Granted()
			require.NoError(t, err)
			require.Equal(t, row.compressed, g.Compressible)
			require.Equal(t, row.rdma, g.RDMA == vmm.RDMARequired)
			require.NoError(t, a.Close())
		}
	})
}

func TestDMABufOfARange(t *testing.T) {
	gputest.Each(t, func(t *testing.T, d *cuda.Device) {
		r, err := vmm.Reserve(d, 8*mib, vmm.ReserveOptions{})
		require.NoError(t, err)
		closed(t, r)
		for _, off := range []int{0, 2 * mib} {
			a, err := vmm.Create(d, 2*mib, vmm.Properties{})
			require.NoError(t, err)
			m, err := r.Map(off, a)
			require.NoError(t, err)
			closed(t, m)
			require.NoError(t, a.Close())
		}
		require.NoError(t, r.SetAccess(0, 4*mib, vmm.Access{Location: d.Location(), Mode: vmm.ReadWrite}))
		c, err := d.Capabilities()
		require.NoError(t, err)
		f, err := r.DMABuf(d, 0, 4*mib, vmm.DMABufOptions{})
		if !c.DMABuf {
			require.ErrorIs(t, err, cuda.ErrNotSupported)
		}
		needs(t, d, "DMA-BUF descriptors", c.DMABuf)
		require.NoError(t, err)
		require.NoError(t, f.Close())
		f, err = r.DMABuf(d, 0, 4*mib, vmm.DMABufOptions{PCIe: true})
		if d.System().Driver().Software || err == nil {
			require.NoError(t, err)
			require.NoError(t, f.Close())
		} else {
			require.ErrorIs(t, err, cuda.ErrNotSupported) // by the machine, or by a driver before CUDA 12.8
			t.Logf("by PCIe: %v", err)
		}
		_, err = r.DMABuf(d, 2*mib, 4*mib, vmm.DMABufOptions{})
		require.ErrorIs(t, err, cuda.ErrOutOfRange)
		_, err = r.DMABuf(d, -1, mib, vmm.DMABufOptions{})
		require.ErrorIs(t, err, cuda.ErrOutOfRange)
		_, err = r.DMABuf(nil, 0, mib, vmm.DMABufOptions{})
		require.ErrorIs(t, err, cuda.ErrInvalidArgument)
	})
}

func TestDMABufByPCIeNeedsADriver(t *testing.T) {
	_, sys := sim.Open(t, sim.Options{DriverVersion: 12070})
	d, err := sys.Device(0)
	require.NoError(t, err)
	b, err := vmm.NewBuffer(d, vmm.BufferOptions{Reserve: 8 * mib, Chunks: vmm.FixedChunks(2 * mib)})
	require.NoError(t, err)
	closed(t, b)
	require.NoError(t, gputest.Err(b.AppendUndefined(2*mib)))
	_, err = b.DMABuf(0, 2*mib, vmm.DMABufOptions{PCIe: true})
	require.ErrorIs(t, err, cuda.ErrNotSupported)
	require.ErrorContains(t, err, "vmm.Buffer.DMABuf: not supported: a DMA-BUF that is reached by PCIe")
	require.ErrorContains(t, err, "it needs a driver for CUDA 12.8, and this one is for 12.7")
}

func TestDMABufOfABuffer(t *testing.T) {
	gputest.Each(t, func(t *testing.T, d *cuda.Device) {
		c, err := d.Capabilities()
		require.NoError(t, err)
		needs(t, d, "DMA-BUF descriptors", c.DMABuf)
		b, err := vmm.NewBuffer(d, vmm.BufferOptions{Reserve: 8 * mib, Chunks: vmm.FixedChunks(2 * mib)})
		require.NoError(t, err)
		closed(t, b)
		require.NoError(t, gputest.Err(b.AppendUndefined(6*mib)))
		require.NoError(t, b.Resize(nil, 4*mib))
		f, err := b.DMABuf(2*mib, 4*mib, vmm.DMABufOptions{})
		require.NoError(t, err)
		// The descriptor keeps the memory, whatever becomes of the buffer.
		require.NoError(t, b.Resize(nil, 0))
		require.NoError(t, b.Clip())
		free, _, err := d.MemoryInfo()
		require.NoError(t, err)
		require.NoError(t, f.Close())
		if d.System().Driver().Software {
			after, _, err := d.MemoryInfo()
			require.NoError(t, err)
			require.Equal(t, free+2*mib, after)
		}
		for _, part := range [][2]int{{0, 0}, {0, 7 * mib}, {-1, 1}, {2 * mib, 1}} {
			_, err = b.DMABuf(part[0], part[1], vmm.DMABufOptions{})
			require.ErrorIs(t, err, cuda.ErrOutOfRange, "%v", part)
		}
		require.NoError(t, b.Close())
		_, err = b.DMABuf(0, 1, vmm.DMABufOptions{})
		require.ErrorIs(t, err, cuda.ErrClosed)
	})
}

// Where the driver refuses a creation, a trial of what was asked for says why.
func TestARefusedCreationIsExplainedByATrial(t *testing.T) {
	for _, c := range []struct {
		name   string
		trials []driver.Result // plain, compressible, descriptor, fabric
		times  int
		asks   vmm.HandleTypes
		says   string
		is     error
	}{
		{"no descriptors", []driver.Result{0, 0, driver.NotSupported, 0}, 0, vmm.PosixFD, "which the driver does not make there", cuda.ErrNotSupported},
		{"no fabric", []driver.Result{0, 0, 0, driver.NotPermitted}, 0, vmm.Fabric, "IMEX channel", cuda.ErrNotPermitted},
		{"the trial works", []driver.Result{0, 0, 0, driver.NotPermitted}, 0, vmm.PosixFD, "cuMemCreate returned CUDA_ERROR_NOT_SUPPORTED (801)", cuda.ErrNotSupported},
		{"nothing works", []driver.Result{driver.NotSupported}, -1, vmm.PosixFD,
			"cuMemCreate returned CUDA_ERROR_NOT_SUPPORTED (801)", cuda.ErrNotSupported},
		{"the trial says nothing", []driver.Result{0, 0, driver.OutOfMemory}, 0, vmm.PosixFD, "cuMemCreate returned CUDA_ERROR_NOT_SUPPORTED (801)", cuda.ErrNotSupported},
	} {
		t.Run(c.name, func(t *testing.T) {
			m, d := open(t)
			m.Inject(sim.Fault{Call: "cuMemCreate", Result: cuda.Code(driver.NotSupported)})
			for i, r := range c.trials {
				if r != 0 { // a fault that applies keeps those behind it from counting
					m.Inject(sim.Fault{Call: "cuMemCreate", After: i, Times: c.times, Result: cuda.Code(r)})
				}
			}
			_, err := vmm.Create(d, 2*mib, vmm.Properties{Handles: c.asks})
			require.ErrorIs(t, err, c.is)
			require.ErrorContains(t, err, "vmm.Create: ")
			require.ErrorContains(t, err, c.says)
		})
	}
}
