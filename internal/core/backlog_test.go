package core_test

import (
	"context"
	"fmt"
	"runtime/debug"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/cuvmm/cuvmm/cuda/sim"
	"github.com/cuvmm/cuvmm/internal/core"
	"github.com/cuvmm/cuvmm/internal/driver"
	"github.com/stretchr/testify/require"
)

// held is a System with so many streams that stand still.
func held(t testing.TB, n int) (*sim.Machine, *core.System, []*core.Stream) {
	t.Helper()
	m, err := sim.New(sim.Options{})
	require.NoError(t, err)
	d := driver.Of(m)
	require.Equal(t, driver.Success, d.Init())
	s := core.NewSystem(d, 13000, core.Config{})
	h, r := d.DevicePrimaryCtxRetain(0)
	require.Equal(t, driver.Success, r)
	ctx := s.AddContext(h, 0, true)
	var all []*core.Stream
	for range n {
		st, r := d.StreamCreate(h, driver.StreamNonBlocking)
		require.Equal(t, driver.Success, r)
		m.Hold(uintptr(st))
		all = append(all, ctx.AddStream(st, false, false))
	}
	t.Cleanup(func() {
		require.NoError(t, s.Drain(context.Background()))
		for _, st := range all {
			st.Forget()
			require.Equal(t, driver.Success, d.StreamDestroy(h, st.Handle))
		}
		require.NoError(t, s.Close())
		require.NoError(t, m.Close())
	})
	return m, s, all
}

// pend closes n objects that wait for each of the streams.
func pend(t testing.TB, s *core.System, n int, streams []*core.Stream, torn func(int)) {
	t.Helper()
	for k := range n {
		f, err := s.NewFence("x", streams)
		require.NoError(t, err)
		s.Reclaim(f, closedLife(), func() error { torn(k); return nil })
	}
}

// A poll queries a stream that stands still once, however many objects wait for it.
func TestALookCostsWhatThereIsOfStreams(t *testing.T) {
	m, s, all := held(t, 3)
	var torn atomic.Int64
	pend(t, s, 1000, all, func(int) { torn.Add(1) })
	for _, st := range all {
		pend(t, s, 100, []*core.Stream{st}, func(int) { torn.Add(1) })
	}
	s.PollReclaim()
	m.ResetCounts()
	before := m.Count("cuEventQuery")
	for range 100 {
		s.PollReclaim()
	}
	require.LessOrEqual(t, m.Count("cuEventQuery")-before, 100*3+3*100, "the reclaimer's own goroutine may poll meanwhile")
	for i, st := range all {
		m.Release(uintptr(st.Handle))
		if i == 0 {
			require.Eventually(t, func() bool { s.PollReclaim(); return torn.Load() == 100 }, time.Minute, time.Millisecond,
				"those that wait for this stream alone")
		}
	}
	require.NoError(t, s.Drain(t.Context()))
	require.EqualValues(t, 1300, torn.Load())
}

// An object is torn down when its own marks have passed, whatever stands before or
// behind it in the queue: here marks reach the reclaimer in another order than that in
// which they were made.
func TestMarksInAnyOrder(t *testing.T) {
	m, s, all := held(t, 2)
	first, err := s.NewFence("x", all[:1])
	require.NoError(t, err)
	second, err := s.NewFence("x", all)
	require.NoError(t, err)
	third, err := s.NewFence("x", all[:1])
	require.NoError(t, err)
	var order []int
	for k, f := range map[int]*core.Fence{3: third, 2: second, 1: first} {
		s.Reclaim(f, closedLife(), func() error { order = append(order, k); return nil })
	}
	s.PollReclaim()
	m.Release(uintptr(all[0].Handle))
	require.Eventually(t, func() bool { s.PollReclaim(); return s.PendingReclaims() == 1 }, time.Minute, time.Millisecond)
	m.Release(uintptr(all[1].Handle))
	require.NoError(t, s.Drain(t.Context()))
	require.ElementsMatch(t, []int{1, 2, 3}, order)
	require.Equal(t, 2, order[2])
}

// One operation that acquires does not pay for all that has passed at once.
func TestAnOperationTearsDownFew(t *testing.T) {
	m, s, all := held(t, 1)
	var torn, mine atomic.Int64
	pend(t, s, 500, all, func(int) {
		torn.Add(1)
		if strings.Contains(string(debug.Stack()), "core_test.TestAnOperationTearsDownFew(") {
			mine.Add(1)
		}
	})
	m.Release(uintptr(all[0].Handle))
	for torn.Load() < 500 {
		before := mine.Load()
		s.PollReclaim()
		require.LessOrEqual(t, mine.Load()-before, int64(16))
	}
}

// BenchmarkPending is what an operation that acquires pays beside n objects that
// wait for a stream, or for n streams, that stand still.
func BenchmarkPending(b *testing.B) {
	for _, n := range []int{0, 10, 1000, 10_000, 100_000} {
		b.Run(fmt.Sprintf("objects=%d", n), func(b *testing.B) {
			m, s, all := held(b, 1)
			pend(b, s, n, all, func(int) {})
			time.Sleep(100 * time.Millisecond) // the reclaimer's goroutine has taken them in
			for b.Loop() {
				s.PollReclaim()
			}
			m.Release(uintptr(all[0].Handle))
		})
	}
	for _, n := range []int{10, 1000, 10_000} {
		b.Run(fmt.Sprintf("streams=%d", n), func(b *testing.B) {
			m, s, all := held(b, n)
			for _, st := range all {
				pend(b, s, 1, []*core.Stream{st}, func(int) {})
			}
			time.Sleep(100 * time.Millisecond)
			for b.Loop() {
				s.PollReclaim()
			}
			for _, st := range all {
				m.Release(uintptr(st.Handle))
			}
		})
	}
}
