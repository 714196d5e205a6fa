package sim

import (
	"testing"

	"github.com/cuvmm/cuvmm/internal/driver"
	"github.com/stretchr/testify/require"
)

// leakSomething is to be found in the report.
func leakSomething(t *testing.T, d driver.Driver) driver.Ptr {
	p, r := d.MemAddressReserve(chunk, 0, 0)
	require.Zero(t, r)
	h, r := d.MemCreate(chunk, on(0, 0))
	require.Zero(t, r)
	require.Zero(t, d.MemMap(p, chunk, 0, h))
	require.Zero(t, d.MemRelease(h))
	return p
}

func TestCloseNamesWhatWasLeakedAndWhere(t *testing.T) {
	m, err := New(Options{})
	require.NoError(t, err)
	d := driver.Of(m)
	require.Zero(t, d.Init())
	leakSomething(t, d)
	require.Equal(t, map[string]int{KindReservation: 1, KindMapping: 1}, m.Live())
	leaks := m.Leaks()
	require.Len(t, leaks, 2)
	require.Equal(t, KindReservation, leaks[0].Kind)
	require.Equal(t, chunk, leaks[0].Size)
	require.Contains(t, leaks[0].Stack, "leakSomething")
	err = m.Close()
	require.ErrorContains(t, err, "2 leaked objects")
	require.ErrorContains(t, err, "leakSomething")
	require.ErrorContains(t, err, "leak_test.go")
	require.NoError(t, m.Close(), "it is reported once")
}

// A lost context's objects can be closed, and any that is not is a leak like
// any other.
func TestALostContextGivesBackWhatItHas(t *testing.T) {
	m, err := New(Options{})
	require.NoError(t, err)
	d := driver.Of(m)
	require.Zero(t, d.Init())
	c, _ := d.DevicePrimaryCtxRetain(0)
	free, _ := m.Memory(0)
	s, _ := d.StreamCreate(c, 1)
	q, _ := d.MemAlloc(c, 256)
	p := leakSomething(t, d) // without access
	require.Zero(t, d.MemsetD8Async(c, p, 1, 1, s))
	require.Equal(t, driver.IllegalAddress, d.StreamSynchronize(c, s))
	require.Len(t, m.Leaks(), 5)
	require.Zero(t, d.MemUnmap(p, chunk))
	require.Zero(t, d.MemAddressFree(p, chunk))
	require.Equal(t, driver.IllegalAddress, d.MemFree(c, q))
	require.Equal(t, driver.IllegalAddress, d.StreamDestroy(c, s))
	now, _ := m.Memory(0)
	require.Equal(t, free, now)
	require.Zero(t, d.DevicePrimaryCtxRelease(0))
	require.Empty(t, m.Leaks())
	require.NoError(t, m.Close())
}
