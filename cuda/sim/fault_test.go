package sim

import (
	"fmt"
	"sync"
	"testing"
	"time"

	"github.com/cuvmm/cuvmm/cuda"
	"github.com/cuvmm/cuvmm/internal/driver"
	"github.com/stretchr/testify/require"
)

func TestCallsListsEveryCall(t *testing.T) {
	require.Len(t, Calls(), driver.CallCount)
	require.Contains(t, Calls(), "cuMemCreate")
}

func TestInjectedFaultHasNoEffectButItsAnswer(t *testing.T) {
	r := start(t, Options{})
	before, live := r.free(), r.m.Live()
	r.m.Inject(Fault{Call: "cuMemCreate", After: 1, Times: 2, Result: cuda.Code(driver.OutOfMemory)})
	first := r.create(chunk, on(0, 0))
	for range 2 {
		_, res := r.MemCreate(chunk, on(0, 0))
		r.is(driver.OutOfMemory, res)
	}
	second := r.create(chunk, on(0, 0))
	r.ok(r.MemRelease(first))
	r.ok(r.MemRelease(second))
	require.Equal(t, before, r.free())
	require.Equal(t, live, r.m.Live())
	require.Equal(t, 4, r.m.Count("cuMemCreate"))
	require.Equal(t, 4, r.m.Counts()["cuMemCreate"])
	r.m.ResetCounts()
	require.Empty(t, r.m.Counts())
}

func TestFaultsApplyInTheOrderOfTheirInjection(t *testing.T) {
	r := start(t, Options{})
	query := func() driver.Result { return r.StreamQuery(r.ctx, driver.StreamNull) }
	r.m.Inject(Fault{Call: "cuStreamQuery", After: 1, Result: 1})
	remove := r.m.Inject(Fault{Times: -1, Result: 2})
	r.is(driver.OutOfMemory, query())
	r.is(driver.InvalidValue, query())
	r.is(driver.OutOfMemory, query())
	remove()
	r.ok(query())
	r.m.Inject(Fault{Times: -1, Result: 2})
	r.m.ClearFaults()
	r.ok(query())
}

func TestFaultCutsARunShort(t *testing.T) {
	r := start(t, Options{})
	p := r.mapped(4)
	none := []driver.AccessDesc{grant(driver.LocationDevice, 0, driver.AccessNone)}
	granted := func() (n int) {
		for i := range driver.Ptr(4) {
			f, res := r.MemGetAccess(none[0].Location, p+i*chunk)
			if res == driver.Success && f == driver.AccessReadWrite {
				n++
			}
		}
		return n
	}
	for parts := 1; parts <= 6; parts++ {
		r.allow(p, 4*chunk, 0)
		r.m.Inject(Fault{Call: "cuMemSetAccess", Parts: parts, Result: cuda.Code(driver.Unknown)})
		r.is(driver.Unknown, r.MemSetAccess(p, 4*chunk, none))
		require.Equal(t, max(0, 4-(parts-1)), granted(), "parts %d", parts)
	}
	r.allow(p, 4*chunk, 0)
	r.m.Inject(Fault{Call: "cuMemUnmap", Parts: 3, Result: cuda.Code(driver.Unknown)})
	r.is(driver.Unknown, r.MemUnmap(p, 4*chunk))
	require.Equal(t, 2, granted())
	require.Equal(t, 2, r.m.Live()[KindMapping])
}

func TestDelay(t *testing.T) {
	r := start(t, Options{})
	r.m.Inject(Fault{Call: "cuStreamQuery", Delay: 20 * time.Millisecond})
	began := time.Now()
	r.ok(r.StreamQuery(r.ctx, driver.StreamNull))
	require.GreaterOrEqual(t, time.Since(began), 20*time.Millisecond)
}

func TestObserverSeesEveryCallAndMayCall(t *testing.T) {
	r := start(t, Options{})
	var mu sync.Mutex
	var seen []string
	r.m.OnCall(func(call string) {
		mu.Lock()
		seen = append(seen, call)
		mu.Unlock()
		if call == "cuStreamQuery" {
			r.ok(r.MemUnmap(r.mappedOnce(), chunk))
		}
	})
	r.ok(r.StreamQuery(r.ctx, driver.StreamNull))
	r.m.OnCall(nil)
	r.ok(r.StreamQuery(r.ctx, driver.StreamNull))
	require.Equal(t, "cuStreamQuery", seen[0])
	require.Contains(t, seen, "cuMemUnmap")
}

// mappedOnce is a chunk that only its mapping keeps.
func (r *rig) mappedOnce() driver.Ptr {
	p := r.reserve(chunk)
	h := r.create(chunk, on(0, 0))
	r.ok(r.MemMap(p, chunk, 0, h))
	r.ok(r.MemRelease(h))
	r.t.Cleanup(func() { r.ok(r.MemAddressFree(p, chunk)) })
	return p
}

func TestMisusedFaultsPanic(t *testing.T) {
	r := start(t, Options{})
	for want, f := range map[string]Fault{
		`there is no driver call "MemCreate"; sim.Calls lists them`:         {Call: "MemCreate", Result: 2},
		`Parts is for cuMemSetAccess and cuMemUnmap, not for "cuMemCreate"`: {Call: "cuMemCreate", Parts: 1, Result: 2},
		"Parts without a Result":                                 {Call: "cuMemUnmap", Parts: 1},
		"without a Result and without a Delay does nothing":      {Call: "cuMemCreate"},
		"After -1, Delay 0s, Parts 0; none of them is negative":  {After: -1, Result: 2},
		"After 0, Delay -1ns, Parts 0; none of them is negative": {Delay: -1},
		"After 0, Delay 0s, Parts -1; none of them is negative":  {Call: "cuMemUnmap", Parts: -1, Result: 2},
	} {
		panicsWith(t, want, func() { r.m.Inject(f) })
	}
	panicsWith(t, `sim: Count: there is no driver call "cuNothing"; sim.Calls lists them`, func() { r.m.Count("cuNothing") })
}

func panicsWith(t *testing.T, want string, f func()) {
	t.Helper()
	defer func() {
		t.Helper()
		require.Contains(t, fmt.Sprint(recover()), want)
	}()
	f()
}
func TestOlderDriverLacksEntryPoints(t *testing.T) {
	r := start(t, OlderDriver(11000))
	require.False(t, r.Has(driver.CallMemAllocAsync))
	require.True(t, r.Has(driver.CallMemCreate))
	_, res := r.MemAllocAsync(r.ctx, 256, 0)
	r.is(driver.MissingEntryPoint, res)
	require.False(t, r.Has(driver.Call(9999)))
}
