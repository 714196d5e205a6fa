package life_test

import (
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/cuvmm/cuvmm/internal/life"
	"github.com/stretchr/testify/require"
)

func TestALifeEndsWhenItsOperationsHave(t *testing.T) {
	var l life.Life
	require.True(t, l.Acquire())
	require.True(t, l.Acquire())
	require.False(t, l.Closed())
	require.False(t, l.Idle())
	require.True(t, l.Close())
	require.False(t, l.Close())
	require.True(t, l.Closed())
	require.False(t, l.Acquire(), "no operation starts")
	ended := make(chan struct{})
	go func() {
		l.Wait()
		close(ended)
	}()
	l.Release()
	require.False(t, l.Idle())
	select {
	case <-ended:
		t.Fatal("one operation still runs")
	case <-time.After(5 * time.Millisecond):
	}
	l.Release()
	<-ended
	require.True(t, l.Idle())
	l.Wait()
}

func TestALifeWithoutOperationsEndsAtOnce(t *testing.T) {
	var l life.Life
	require.True(t, l.Close())
	require.True(t, l.Idle())
	l.Wait()
	require.False(t, l.Close())
}

// However operations and closings fall, one Close is the one, and after Wait
// nothing runs.
func TestALifeUnderManyGoroutines(t *testing.T) {
	for range 500 {
		var l life.Life
		var running, closers atomic.Int64
		var wg sync.WaitGroup
		for range 4 {
			wg.Go(func() {
				for l.Acquire() {
					running.Add(1)
					running.Add(-1)
					l.Release()
				}
			})
		}
		for range 3 {
			wg.Go(func() {
				if l.Close() {
					closers.Add(1)
				}
				l.Wait()
				if n := running.Load(); n != 0 {
					t.Errorf("%d operations run after Wait", n)
				}
			})
		}
		wg.Wait()
		require.Equal(t, int64(1), closers.Load())
	}
}

// Since a moment an operation ran if it ran then, or began later; whether it
// has ended does not matter.
func TestWhetherAnythingRanSince(t *testing.T) {
	var l life.Life
	quiet := l.Now()
	require.False(t, l.RanSince(quiet))
	require.True(t, l.Acquire())
	during := l.Now()
	require.True(t, l.RanSince(quiet))
	l.Release()
	require.True(t, l.RanSince(quiet), "it began and ended")
	require.True(t, l.RanSince(during), "it ran then")
	after := l.Now()
	require.True(t, l.Close())
	require.True(t, l.Idle())
	require.False(t, l.RanSince(after))
}
