package phys_test

import (
	"sync"
	"testing"
	"time"

	"github.com/cuvmm/cuvmm/cuda"
	"github.com/cuvmm/cuvmm/cuda/sim"
	"github.com/cuvmm/cuvmm/internal/core"
	"github.com/cuvmm/cuvmm/internal/driver"
	"github.com/cuvmm/cuvmm/internal/life"
	"github.com/cuvmm/cuvmm/internal/phys"
	_ "github.com/cuvmm/cuvmm/internal/test/gputest" // with it, another library captures beside each test
	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

const mib = 1 << 20

var onDevice = driver.AllocationProp{
	Type:     driver.AllocationPinned,
	Location: driver.Location{Type: driver.LocationDevice},
}

// open gives a test a machine of its own with 8 MiB, where everything must be
// released when the test ends.
func open(t *testing.T) (*sim.Machine, *cuda.System, *core.System) {
	t.Helper()
	m, s := sim.Open(t, sim.Options{Devices: []sim.DeviceOptions{{Memory: 8 * mib}}})
	return m, s, core.SystemOf(s)
}

func create(t *testing.T, s *core.System) *phys.Handle {
	t.Helper()
	h, r, _ := phys.Create(s, 2*mib, onDevice, nil)
	require.Equal(t, driver.Success, r)
	return h
}

func TestTheLastReleaseGivesTheMemoryBack(t *testing.T) {
	m, s, sys := open(t)
	h := create(t, sys)
	require.EqualValues(t, 2*mib, h.Size)
	require.Equal(t, onDevice, h.Asked)
	require.Equal(t, 1, s.Stats().Allocations)
	h.Retain()
	require.Equal(t, driver.Success, h.Release())
	require.Equal(t, 1, m.Live()[sim.KindAllocation])
	require.Equal(t, driver.Success, h.Release())
	require.Zero(t, m.Live()[sim.KindAllocation])
	require.Zero(t, s.Stats().Allocations)
}

func TestAReleaseThatFailedKeepsItsCount(t *testing.T) {
	m, s, sys := open(t)
	h := create(t, sys)
	m.Inject(sim.Fault{Call: "cuMemRelease", Result: cuda.Code(driver.Unknown)})
	require.Equal(t, driver.Unknown, h.Release())
	require.Equal(t, 2*mib, s.Stats().AllocatedBytes, "it is accounted for")
	require.Equal(t, driver.Success, h.Release())
	require.Zero(t, s.Stats().AllocatedBytes)
}

func TestManyOwnersReleaseOnce(t *testing.T) {
	m, _, sys := open(t)
	h := create(t, sys)
	var wg sync.WaitGroup
	for range 32 {
		h.Retain()
		wg.Go(func() {
			h.Retain()
			require.Equal(t, driver.Success, h.Release())
			require.Equal(t, driver.Success, h.Release())
		})
	}
	wg.Wait()
	require.Zero(t, m.Count("cuMemRelease"))
	require.Equal(t, driver.Success, h.Release())
	require.Equal(t, 1, m.Count("cuMemRelease"))
}

// owner is what the packages above make of a handle.
type owner struct {
	phys.Holder
	life life.Life
}

func TestUseOfAClosedOwner(t *testing.T) {
	_, _, sys := open(t)
	h := create(t, sys)
	o := &owner{}
	o.Holder = phys.NewHolder(h, &o.life)
	require.Same(t, h, phys.Of(o))
	got, ok := phys.Acquire(o)
	require.True(t, ok)
	require.Same(t, h, got)
	o.life.Close()
	require.True(t, o.life.Idle(), "the use keeps a count, not the owner")
	_, ok = phys.Acquire(o)
	require.False(t, ok)
	require.Equal(t, driver.Success, h.Release())
	require.Equal(t, driver.Success, h.Release())
}

func TestCreateTakesWhatWasClosedAndHasPassed(t *testing.T) {
	m, s, sys := open(t)
	var all []*phys.Handle
	for range 4 {
		all = append(all, create(t, sys))
	}
	_, r, _ := phys.Create(sys, 2*mib, onDevice, nil)
	require.Equal(t, driver.OutOfMemory, r)

	d, err := s.Device(0)
	require.NoError(t, err)
	ctx, err := core.ContextOf("test", d)
	require.NoError(t, err, "a context needs no memory here")
	h, r := sys.Drv.StreamCreate(ctx.Handle, driver.StreamNonBlocking)
	require.Equal(t, driver.Success, r)
	st := ctx.AddStream(h, false, false)
	fence, err := sys.NewFence("test", []*core.Stream{st})
	require.NoError(t, err)
	gone := all[0]
	sys.Reclaim(fence, nil, func() error {
		require.Equal(t, driver.Success, gone.Release())
		return nil
	})
	all[0], r, _ = phys.Create(sys, 2*mib, onDevice, nil)
	// The reclaimer's goroutine may be at it just now.
	for until := time.Now().Add(10 * time.Second); r == driver.OutOfMemory && time.Now().Before(until); {
		all[0], r, _ = phys.Create(sys, 2*mib, onDevice, nil)
	}
	require.Equal(t, driver.Success, r)
	for _, h := range all {
		require.Equal(t, driver.Success, h.Release())
	}
	st.Forget()
	require.Equal(t, driver.Success, sys.Drv.StreamDestroy(ctx.Handle, h))
	require.Equal(t, 5, m.Count("cuMemRelease"))
}

func TestALostDeviceMakesNoMemoryAndGivesItBack(t *testing.T) {
	m, s, sys := open(t)
	h := create(t, sys)
	refused := create(t, sys)
	kept, err := refused.Use("test")
	require.NoError(t, err)
	refused.Done()
	calls := m.Count("cuMemCreate")
	sys.Observe(driver.IllegalAddress, 0)
	_, r, _ := phys.Create(sys, 2*mib, onDevice, nil)
	require.Equal(t, driver.IllegalAddress, r)
	require.Equal(t, calls, m.Count("cuMemCreate"))
	require.Equal(t, driver.Success, h.Release())
	m.Inject(sim.Fault{Call: "cuMemRelease", Result: cuda.Code(driver.InvalidValue)})
	require.Equal(t, driver.Success, refused.Release(), "a lost device may refuse")
	require.Zero(t, s.Stats().Allocations)
	require.Equal(t, 2, m.Count("cuMemRelease"))
	require.Equal(t, driver.Success, driver.Of(m).MemRelease(kept)) // which it was not
}
