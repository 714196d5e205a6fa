package core_test

import (
	"bytes"
	"log/slog"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/cuvmm/cuvmm/internal/core"
	"github.com/stretchr/testify/require"
)

func closedLife() *core.Life {
	l := new(core.Life)
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
	case <-time.After(10 * time.Second):
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
	require.Contains(t, log.String(), "giving back what was closed, clipped or revoked failed")
}

func TestAReclaimThatCannotGoOnYetIsTriedAgain(t *testing.T) {
	_, s, _ := system(t, core.Config{})
	tries := 0
	s.Reclaim(&core.Fence{}, closedLife(), func() error {
		if tries++; tries < 4 {
			return core.ErrAgain
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
