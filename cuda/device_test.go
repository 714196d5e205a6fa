package cuda_test

import (
	"fmt"
	"path/filepath"
	"testing"

	"github.com/cuvmm/cuvmm/csrc"
	"github.com/cuvmm/cuvmm/cuda"
	"github.com/cuvmm/cuvmm/cuda/sim"
	"github.com/cuvmm/cuvmm/internal/driver"
	"github.com/cuvmm/cuvmm/internal/test/gputest"
	"github.com/stretchr/testify/require"
)

func TestWhatADeviceSaysOfItself(t *testing.T) {
	gputest.Each(t, func(t *testing.T, d *cuda.Device) {
		require.NotEmpty(t, d.Name())
		require.Contains(t, d.String(), d.Name())
		require.NotZero(t, d.UUID())
		require.Regexp(t, `^GPU-[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}$`, d.UUID().String())
		require.Equal(t, cuda.OnDevice(d.Ordinal()), d.Location())
		free, total, err := d.MemoryInfo()
		require.NoError(t, err)
		require.LessOrEqual(t, free, total)
		require.Equal(t, d.TotalMemory(), total)
		self, err := d.System().Device(d.Ordinal())
		require.NoError(t, err)
		require.Same(t, d, self)
		require.Same(t, d, d.System().Devices()[d.Ordinal()])
		ok, err := d.CanAccess(d)
		require.NoError(t, err)
		require.True(t, ok)
		_, err = d.CanAccess(another(t, d))
		require.ErrorIs(t, err, cuda.ErrForeign)
		for _, ordinal := range []int{-1, len(d.System().Devices())} {
			_, err = d.System().Device(ordinal)
			require.ErrorIs(t, err, cuda.ErrInvalidArgument)
			require.ErrorContains(t, err, "numbered from 0")
		}
	})
}

func TestCapabilitiesAreTheAttributes(t *testing.T) {
	gputest.Each(t, func(t *testing.T, d *cuda.Device) {
		c, err := d.Capabilities()
		require.NoError(t, err)
		require.True(t, c.VirtualMemory)
		require.Positive(t, c.MinimumGranularity)
		require.Zero(t, c.RecommendedGranularity%c.MinimumGranularity)
		major, err := d.Attribute(75)
		require.NoError(t, err)
		require.Equal(t, major, c.ComputeMajor)
		for _, number := range []int{-1, 1<<32 + 75} {
			_, err = d.Attribute(number)
			require.ErrorIs(t, err, cuda.ErrInvalidArgument)
			require.ErrorContains(t, err, fmt.Sprint("attribute ", number))
			require.ErrorContains(t, err, "; the driver's cuda.h lists the numbers")
		}
	})
}

func TestPeers(t *testing.T) {
	_, d := open(t, sim.Options{Devices: []sim.DeviceOptions{{Unreachable: []int{2}}, {}, {}}})
	all := d.System().Devices()
	ok, err := d.CanAccess(all[1])
	require.NoError(t, err)
	require.True(t, ok)
	ok, err = d.CanAccess(all[2])
	require.NoError(t, err)
	require.False(t, ok)
}

// A trial is made once; where there was no memory for it, it is made again.
func TestProbeKeepsClearAnswersOnly(t *testing.T) {
	m, d := open(t)
	for after := range 3 {
		m.Inject(sim.Fault{Call: "cuMemCreate", After: after, Result: cuda.Code(driver.OutOfMemory)})
		_, err := d.Probe()
		require.ErrorIs(t, err, cuda.ErrOutOfMemory)
		require.ErrorContains(t, err, "ulimit -v", "the device has memory left")
		m.ClearFaults()
	}
	p, err := d.Probe()
	require.NoError(t, err)
	require.True(t, p.PosixFD)
	require.False(t, p.Fabric)
	require.ErrorIs(t, p.FabricError, cuda.ErrNotPermitted)
	require.ErrorContains(t, p.FabricError, "IMEX")
	tried := m.Count("cuMemCreate")
	again, err := d.Probe()
	require.NoError(t, err)
	require.Equal(t, p, again)
	require.Equal(t, tried, m.Count("cuMemCreate"))
	made := m.Count("cuMemCreate") + m.Count("cuMemImportFromShareableHandle")
	require.Equal(t, made-4, m.Count("cuMemRelease"), "nothing is kept; four trials failed")
}

// What may pass is tried again too: too many open files, a fabric that is not
// ready yet.
func TestProbeTriesAgainWhatMayPass(t *testing.T) {
	m, d := open(t)
	for _, row := range []struct {
		call   string
		result driver.Result
	}{
		{"cuMemCreate", driver.Unknown},
		{"cuMemExportToShareableHandle", driver.OperatingSystem},
		{"cuMemImportFromShareableHandle", driver.OperatingSystem},
	} {
		m.Inject(sim.Fault{Call: row.call, Result: cuda.Code(row.result)})
		_, err := d.Probe()
		require.Error(t, err, "%v", row)
	}
	// The trial of the fabric is the last.
	m.Inject(sim.Fault{Call: "cuMemCreate", After: 3, Result: cuda.Code(driver.SystemNotReady)})
	p, err := d.Probe()
	require.NoError(t, err)
	require.True(t, p.PosixFD)
	var e *cuda.Error
	require.ErrorAs(t, p.FabricError, &e)
	require.EqualValues(t, driver.SystemNotReady, e.Code)
	// What a trial made and could not be given back at once says nothing of it.
	m.Inject(sim.Fault{Call: "cuMemRelease", After: 2, Result: cuda.Code(driver.Unknown)})
	p, err = d.Probe()
	require.NoError(t, err)
	require.True(t, p.PosixFD)
	require.ErrorIs(t, p.FabricError, cuda.ErrNotPermitted)
	require.NoError(t, d.System().Drain(t.Context()))
	require.Zero(t, d.System().Stats().Allocations)
	tried := m.Count("cuMemCreate")
	_, err = d.Probe()
	require.NoError(t, err)
	require.Equal(t, tried, m.Count("cuMemCreate"), "that is clear")
}

func TestADeviceWithoutVirtualMemory(t *testing.T) {
	_, d := open(t, sim.Options{Devices: []sim.DeviceOptions{{Attributes: map[int]int{int(driver.AttrVirtualMemoryManagement): 0}}}})
	c, err := d.Capabilities()
	require.NoError(t, err)
	require.False(t, c.VirtualMemory)
	require.Zero(t, c.MinimumGranularity)
	_, err = d.Probe()
	require.ErrorIs(t, err, cuda.ErrNotSupported)
}

func TestOpenSaysWhatWasTried(t *testing.T) {
	path := filepath.Join(t.TempDir(), "libcuda.so.1")
	_, err := cuda.Open(cuda.Options{Library: path})
	require.ErrorIs(t, err, cuda.ErrNoDriver)
	var open *csrc.OpenError
	require.ErrorAs(t, err, &open)
	if open.Reason == csrc.NoCgo {
		require.ErrorContains(t, err, "CGO_ENABLED=1")
		return
	}
	require.ErrorContains(t, err, path)
}

// There is one real System: it ends when it was closed as often as opened.
func TestTheRealSystemIsCounted(t *testing.T) {
	d := gputest.Real(t)
	s, err := cuda.Open(cuda.Options{})
	require.NoError(t, err)
	require.Same(t, d.System(), s)
	require.NoError(t, s.Close())
	_, _, err = d.MemoryInfo()
	require.NoError(t, err)
}

// While anything lives Close changes nothing and names it.
func TestASystemInUseDoesNotClose(t *testing.T) {
	_, d := open(t)
	s, err := d.NewStream(cuda.StreamOptions{})
	require.NoError(t, err)
	for range 2 {
		err = d.System().Close()
		require.ErrorIs(t, err, cuda.ErrInUse)
		require.ErrorContains(t, err, "live objects: stream")
		require.ErrorContains(t, err, "(device_test.go:", "leak tracing names the place that made it")
	}
	require.Len(t, d.System().Live(), 1)
	require.NoError(t, s.Upload(memory(t, d, 64), pattern(64, 1)))
	require.NoError(t, s.Close())
}
