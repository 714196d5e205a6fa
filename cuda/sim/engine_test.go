package sim

import (
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/cuvmm/cuvmm/internal/driver"
	"github.com/stretchr/testify/require"
)

func TestHeldStreamsCopyLandsOnRelease(t *testing.T) {
	r := start(t, Options{})
	p, s, host := r.mapped(1), r.stream(driver.StreamNonBlocking), r.pinned(64)
	copy(host, "asynchronous")
	r.m.Hold(uintptr(s))
	r.ok(r.MemcpyHtoDAsync(r.ctx, p, pointer(host), 64, s))
	time.Sleep(3 * laziness)
	r.is(driver.NotReady, r.StreamQuery(r.ctx, s))
	require.Equal(t, make([]byte, 64), r.bytes(p, 64))
	// Pinned memory is read when the copy is done.
	copy(host, "changed late")
	r.m.Release(uintptr(s))
	r.ok(r.StreamSynchronize(r.ctx, s))
	require.Equal(t, "changed late", string(r.bytes(p, 12)))
	r.ok(r.StreamQuery(r.ctx, s))
}

func TestWorkIsDoneWithoutAQuery(t *testing.T) {
	r := start(t, Options{})
	p, s := r.mapped(1), r.stream(driver.StreamNonBlocking)
	r.ok(r.MemsetD8Async(r.ctx, p, 7, 8, s))
	require.Eventually(t, func() bool { return r.bytes(p, 1)[0] == 7 }, time.Minute, time.Millisecond)
}

func TestQueriesMakeProgressOneStepAtATime(t *testing.T) {
	r := start(t, Options{})
	p, s, e := r.mapped(1), r.stream(driver.StreamNonBlocking), r.event()
	r.m.Hold(uintptr(s))
	for range 20 {
		r.ok(r.MemsetD8Async(r.ctx, p, 7, 8, s))
	}
	r.ok(r.EventRecord(r.ctx, e, s))
	r.is(driver.NotReady, r.EventQuery(r.ctx, e))
	r.m.Release(uintptr(s))
	require.Eventually(t, func() bool { return r.EventQuery(r.ctx, e) == driver.Success }, time.Minute, 10*time.Microsecond)
}

// order holds streams, fills them, lets them go together, and tells in which
// order their work was done.
func order(t *testing.T, seed uint64, streams int) string {
	r := start(t, Options{Seed: seed})
	var done []string
	var all []driver.Stream
	for i := range streams {
		s := r.stream(driver.StreamNonBlocking)
		r.m.Hold(uintptr(s))
		all = append(all, s)
		for j := range 3 {
			r.m.mu.Lock()
			_, res := r.m.streams[s].submit(task{run: func(site) *fault {
				r.m.mu.Lock()
				done = append(done, fmt.Sprintf("%c%d", 'a'+i, j))
				r.m.mu.Unlock()
				return nil
			}})
			r.m.mu.Unlock()
			r.ok(res)
		}
	}
	r.m.mu.Lock()
	for _, s := range all {
		r.m.streams[s].held = false
	}
	r.m.contexts[r.ctx].drain()
	defer r.m.mu.Unlock()
	for i := range streams {
		var own []string
		for _, d := range done {
			if d[0] == byte('a'+i) {
				own = append(own, d)
			}
		}
		require.True(t, slices.IsSorted(own), "work of one stream was reordered: %v", done)
	}
	require.Len(t, done, 3*streams)
	return strings.Join(done, " ")
}

func TestTheSeedDecidesTheOrderOfStreams(t *testing.T) {
	seen := map[string]bool{}
	for seed := range uint64(20) {
		seen[order(t, seed, 4)] = true
	}
	require.Greater(t, len(seen), 10, "the order hardly depends on the seed")
	once, again := order(t, 5, 4), order(t, 5, 4)
	require.Equal(t, once, again)
}

func TestLegacyAndBlockingStreamsWaitForEachOther(t *testing.T) {
	for seed := range uint64(10) {
		r := start(t, Options{Seed: seed})
		p := r.mapped(2)
		q := p + chunk
		blocking, free := r.stream(driver.StreamDefault), r.stream(driver.StreamNonBlocking)
		// Submitted in this order, to streams that order each other, the byte
		// travels from a to c. The non-blocking stream is not part of it.
		r.m.Hold(uintptr(free))
		r.ok(r.MemsetD8Async(r.ctx, p, 1, 1, free))
		r.ok(r.MemsetD8Async(r.ctx, p, 2, 1, blocking))
		r.ok(r.MemcpyDtoDAsync(r.ctx, q, p, 1, driver.StreamLegacy))
		r.ok(r.MemcpyDtoDAsync(r.ctx, q+1, q, 1, blocking))
		r.ok(r.StreamSynchronize(r.ctx, blocking))
		require.Equal(t, []byte{2, 2}, r.bytes(q, 2))
		r.ok(r.StreamSynchronize(r.ctx, driver.StreamNull))
		r.is(driver.NotReady, r.StreamQuery(r.ctx, free))
		r.m.Release(uintptr(free))
		r.ok(r.StreamSynchronize(r.ctx, free))
	}
}

func TestPerThreadStreamsOrderWithTheLegacyOne(t *testing.T) {
	r := start(t, Options{})
	p := r.mapped(1)
	r.ok(r.MemsetD8Async(r.ctx, p, 9, 4, driver.StreamPerThread))
	r.ok(r.MemcpyDtoDAsync(r.ctx, p+4, p, 4, driver.StreamLegacy))
	r.ok(r.StreamSynchronize(r.ctx, driver.StreamLegacy))
	require.Equal(t, repeated(9, 8), r.bytes(p, 8))
}

func TestUnwantedWorkStaysBehindWhatIsWaitedFor(t *testing.T) {
	// Whatever the seed, waiting for one stream must not need the other.
	for seed := range uint64(10) {
		r := start(t, Options{Seed: seed})
		p := r.mapped(1)
		wanted, held := r.stream(driver.StreamNonBlocking), r.stream(driver.StreamNonBlocking)
		r.m.Hold(uintptr(held))
		r.ok(r.MemsetD8Async(r.ctx, p, 1, 1, held))
		r.ok(r.MemsetD8Async(r.ctx, p+1, 2, 1, wanted))
		r.ok(r.StreamSynchronize(r.ctx, wanted))
		require.Equal(t, []byte{0, 2}, r.bytes(p, 2))
		r.m.Release(uintptr(held))
		r.ok(r.CtxSynchronize(r.ctx))
	}
}

func TestDestroyedStreamStillDoesItsWork(t *testing.T) {
	r := start(t, Options{})
	p := r.mapped(1)
	s, res := r.StreamCreate(r.ctx, 0)
	r.ok(res)
	r.m.Hold(uintptr(s))
	r.ok(r.MemsetD8Async(r.ctx, p, 3, 1, s))
	r.ok(r.StreamDestroy(r.ctx, s))
	r.is(driver.InvalidHandle, r.StreamQuery(r.ctx, s))
	r.is(driver.InvalidHandle, r.StreamDestroy(r.ctx, s))
	r.m.Release(uintptr(s))
	r.ok(r.CtxSynchronize(r.ctx))
	require.Equal(t, []byte{3}, r.bytes(p, 1))
}

func TestCloseDropsWorkAndWakesWhoWaits(t *testing.T) {
	m, err := New(Options{})
	require.NoError(t, err)
	d := driver.Of(m).Foreign()
	require.Zero(t, d.Init())
	ctx, _ := d.DevicePrimaryCtxRetain(0)
	s, _ := d.StreamCreate(ctx, 0)
	p, _ := d.MemAlloc(ctx, 64)
	m.Hold(uintptr(s))
	require.Zero(t, d.MemsetD8Async(ctx, p, 1, 64, s))
	results := make(chan driver.Result, 3)
	go func() { results <- d.StreamSynchronize(ctx, s) }()
	go func() { results <- d.MemFree(ctx, p) }()
	go func() { results <- d.DevicePrimaryCtxRelease(0) }()
	time.Sleep(20 * time.Millisecond)
	require.Error(t, m.Close())
	for range 3 {
		r := <-results
		require.Contains(t, []driver.Result{driver.Deinitialized, driver.Success, driver.InvalidContext}, r)
	}
	require.NoError(t, m.Close())
	require.Equal(t, driver.Deinitialized, d.StreamSynchronize(ctx, s))
}

func BenchmarkSubmitAndSynchronize(b *testing.B) {
	r := start(b, Options{})
	p, s := r.mapped(1), r.stream(driver.StreamNonBlocking)
	for b.Loop() {
		r.ok(r.MemsetD8Async(r.ctx, p, 1, 1, s))
		r.ok(r.StreamSynchronize(r.ctx, s))
	}
}

func BenchmarkThousandOperations(b *testing.B) {
	r := start(b, Options{})
	p, s := r.mapped(1), r.stream(driver.StreamNonBlocking)
	for b.Loop() {
		for range 1000 {
			r.ok(r.MemsetD8Async(r.ctx, p, 1, 1, s))
		}
		r.ok(r.StreamSynchronize(r.ctx, s))
	}
}

// Work that panics, as a copy to host memory that is not there, does so with the lock held
// again: its caller's deferred unlock must not hide the panic behind an error of its own.
func TestAPanicOfWorkFindsTheMachineLocked(t *testing.T) {
	m, err := New(Options{})
	require.NoError(t, err)
	require.PanicsWithValue(t, "no memory", func() {
		m.mu.Lock()
		defer m.mu.Unlock()
		m.unlocked(func() *fault { panic("no memory") })
	})
	require.NoError(t, m.Close())
}
