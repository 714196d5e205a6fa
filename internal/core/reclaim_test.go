package core_test

import (
	"bytes"
	"log/slog"
	"runtime"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/cuvmm/cuvmm/internal/core"
	"github.com/cuvmm/cuvmm/internal/driver"
	"github.com/cuvmm/cuvmm/internal/life"
	"github.com/stretchr/testify/require"
)

func closedLife() *life.Life {
	l := new(life.Life)
	l.Close()
	return l
}

// Without Drain and without a poll the reclaimer's own goroutine does it.
func TestReclaimHappensByItself(t *testing.T) {
	_, s, st := system(t, core.Config{})
	work(t, st)
	f, err := s.NewFence("x", []*core.Stream{st})
	require.NoError(t, err)
	done := make(chan struct{})
	s.Reclaim(f, closedLife(), func() error { close(done); return nil })
	select {
	case <-done:
	case <-time.After(time.Minute):
		t.Fatal("nothing was reclaimed")
	}
	require.NoError(t, s.Drain(t.Context()))
}

// What failed is logged, and reported by one Drain; the rest goes on.
func TestAReclaimThatFailsIsReportedOnce(t *testing.T) {
	var log bytes.Buffer
	_, s, _ := system(t, core.Config{Log: slog.New(slog.NewTextHandler(&log, nil))})
	var ran atomic.Int64
	for i := range 5 {
		s.Reclaim(&core.Fence{}, closedLife(), func() error {
			ran.Add(1)
			if i == 2 {
				return errTest
			}
			return nil
		})
	}
	require.ErrorIs(t, s.Drain(t.Context()), errTest)
	require.NoError(t, s.Drain(t.Context()))
	require.Equal(t, int64(5), ran.Load())
	require.Contains(t, log.String(), "giving back what was closed or clipped failed")
}

func TestAReclaimThatCannotGoOnYetIsTriedAgain(t *testing.T) {
	_, s, _ := system(t, core.Config{})
	tries := 0
	s.Reclaim(&core.Fence{}, closedLife(), func() error {
		if tries++; tries < 4 {
			return life.ErrAgain
		}
		return nil
	})
	require.NoError(t, s.Drain(t.Context()))
	require.Equal(t, 4, tries)
}

// A teardown may leave further ones to the reclaimer.
func TestReclaimFromATeardown(t *testing.T) {
	_, s, _ := system(t, core.Config{})
	var ran atomic.Int64
	s.Reclaim(&core.Fence{}, closedLife(), func() error {
		s.Reclaim(&core.Fence{}, closedLife(), func() error { ran.Add(1); return nil })
		return nil
	})
	require.NoError(t, s.Drain(t.Context()))
	require.Equal(t, int64(1), ran.Load())
}

// What is torn down is kept alive by nothing, whatever still waits.
func TestReclaimKeepsNothingOfWhatIsGone(t *testing.T) {
	_, s, _ := system(t, core.Config{})
	waits := new(life.Life) // not closed, so that it stays
	s.Reclaim(&core.Fence{}, waits, func() error { return nil })
	gone := make(chan struct{})
	func() {
		object := new([64]byte)
		runtime.AddCleanup(object, func(struct{}) { close(gone) }, struct{}{})
		s.Reclaim(&core.Fence{}, closedLife(), func() error { object[0] = 1; return nil })
	}()
	for s.PendingReclaims() > 1 {
		s.PollReclaim()
	}
	require.Eventually(t, func() bool {
		runtime.GC()
		select {
		case <-gone:
			return true
		default:
			return false
		}
	}, time.Minute, time.Millisecond)
	waits.Close()
	require.NoError(t, s.Drain(t.Context()))
}

func TestManyReclaimsFromManyGoroutines(t *testing.T) {
	_, s, st := system(t, core.Config{})
	var ran atomic.Int64
	var wg sync.WaitGroup
	for range 8 {
		wg.Go(func() {
			for range 100 {
				f, err := s.NewFence("x", []*core.Stream{st})
				if err != nil {
					t.Error(err)
					return
				}
				s.Reclaim(f, closedLife(), func() error { ran.Add(1); return nil })
				s.PollReclaim()
			}
			if err := s.Drain(t.Context()); err != nil {
				t.Error(err)
			}
		})
	}
	wg.Wait()
	require.NoError(t, s.Drain(t.Context()))
	require.Equal(t, int64(800), ran.Load())
}

func TestPollReclaimMakesNoCallWithNothingPending(t *testing.T) {
	m, s, _ := system(t, core.Config{})
	m.ResetCounts()
	s.PollReclaim()
	require.Empty(t, m.Counts())
}

// Late work is marked on every stream as soon as that is possible: an item that waits for a
// capture waits for that one alone, however many begin elsewhere after it.
func TestLateWorkWaitsForACaptureOnce(t *testing.T) {
	_, s, first := system(t, core.Config{})
	d := s.Drv
	h, r := d.StreamCreate(first.Ctx.Handle, driver.StreamNonBlocking)
	require.Equal(t, driver.Success, r)
	second := first.Ctx.AddStream(h, false, false)
	endFirst := begin(t, first)
	f := new(core.Fence)
	f.AddAllStreams()
	var did atomic.Bool
	s.Reclaim(f, closedLife(), func() error { did.Store(true); return nil })
	for range 20 {
		s.PollReclaim()
		time.Sleep(time.Millisecond)
	}
	require.False(t, did.Load(), "what is on the captured stream cannot be marked yet")
	endSecond := begin(t, second) // which is fenced already
	endFirst()
	require.NoError(t, s.Drain(t.Context()))
	require.True(t, did.Load())
	endSecond()
	second.Forget()
	require.Equal(t, driver.Success, d.StreamDestroy(first.Ctx.Handle, h))
}

// AddStreams makes no driver call: the reclaimer marks the streams, waits until captures of
// them are over, and waits for no other stream.
func TestAddedStreamsAreMarkedByTheReclaimer(t *testing.T) {
	m, s, added := system(t, core.Config{})
	d := s.Drv
	h, r := d.StreamCreate(added.Ctx.Handle, driver.StreamNonBlocking)
	require.Equal(t, driver.Success, r)
	other := added.Ctx.AddStream(h, false, false)
	endAdded, endOther := begin(t, added), begin(t, other)
	f := new(core.Fence)
	m.ResetCounts()
	f.AddStreams([]*core.Stream{added})
	require.Empty(t, m.Counts())
	var did atomic.Bool
	s.Reclaim(f, closedLife(), func() error { did.Store(true); return nil })
	for range 20 {
		s.PollReclaim()
		time.Sleep(time.Millisecond)
	}
	require.False(t, did.Load(), "what is on the captured stream cannot be marked yet")
	endAdded()
	require.NoError(t, s.Drain(t.Context()))
	require.True(t, did.Load(), "the other stream captures still")
	endOther()
	other.Forget()
	require.Equal(t, driver.Success, d.StreamDestroy(added.Ctx.Handle, h))
}
