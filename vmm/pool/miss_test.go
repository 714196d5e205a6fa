package pool_test

import (
	"sync/atomic"
	"testing"
	"time"

	"github.com/cuvmm/cuvmm/cuda"
	"github.com/cuvmm/cuvmm/vmm/pool"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"golang.org/x/sync/errgroup"
)

// A miss that the driver holds up does not hold up those of other streams, nor of its
// own, whatever their size.
func TestMissesGoOnSideBySide(t *testing.T) {
	if thorough {
		t.Skip("every operation ends with a check, which waits for misses")
	}
	m, d := open(t)
	s, other := stream(t, d), stream(t, d)
	p := newPool(t, d, pool.Options{})
	free(t, p, alloc(t, p, s, 2*mib)) // there is a region
	in, release := make(chan struct{}), make(chan struct{})
	var first atomic.Bool
	m.OnCall(func(call string) {
		if call == "cuMemCreate" && !first.Swap(true) {
			close(in)
			<-release
		}
	})
	var large pool.Block
	done := make(chan struct{})
	go func() {
		defer close(done)
		var err error
		large, err = p.Alloc(pool.Request{Bytes: 64 * mib, Stream: s})
		assert.NoError(t, err)
	}()
	<-in
	within(t, "a miss waits for another", func() {
		for _, by := range []*cuda.Stream{other, s} {
			for _, bytes := range []int{512, 8 * mib, 40 * mib} {
				free(t, p, alloc(t, p, by, bytes))
			}
		}
	})
	close(release)
	<-done
	m.OnCall(nil)
	free(t, p, large)
}

// A request is not refused because another miss, which will be refused, holds all chunks.
func TestAMissTakesNothingFromOthers(t *testing.T) {
	m, d := openSmall(t)
	p := newPool(t, d, pool.Options{Wait: -1})
	s, other := stream(t, d), stream(t, d)
	kept := alloc(t, p, s, 4*mib)
	full, served := make(chan struct{}), make(chan struct{})
	var creates atomic.Int32
	m.OnCall(func(call string) {
		if call != "cuMemCreate" {
			return
		}
		if creates.Add(1) == 31 { // the 30 before took all that there was
			close(full)
			select {
			case <-served: // refused, that is
			case <-time.After(200 * time.Millisecond):
			}
		}
	})
	refused := make(chan error, 1)
	go func() {
		_, err := p.Alloc(pool.Request{Bytes: 64 * mib, Stream: s})
		refused <- err
	}()
	<-full
	b, err := p.Alloc(pool.Request{Bytes: 8 * mib, Stream: other})
	close(served)
	require.NoError(t, err)
	require.ErrorIs(t, <-refused, cuda.ErrOutOfMemory)
	m.OnCall(nil)
	require.NoError(t, p.Check())
	free(t, p, b)
	free(t, p, kept)
}

// Misses of many goroutines on few streams, beside trims.
func TestMissesOfManyGoroutines(t *testing.T) {
	patient(t)
	_, d := open(t)
	p := newPool(t, d, pool.Options{})
	streams := []*cuda.Stream{stream(t, d), stream(t, d), stream(t, d)}
	const goroutines, rounds = 6, 60
	run := func(g int) error {
		s := streams[g%len(streams)]
		var live []pool.Block
		for i := range rounds {
			b, err := p.Alloc(pool.Request{Bytes: (i*7%23 + 1) * mib, Stream: s})
			if err == nil {
				err = s.Memset(b.Ptr(), byte(g), b.Bytes())
			}
			if live = append(live, b); err == nil && len(live) > 3 {
				err, live = p.Free(live[0]), live[1:]
			}
			if err == nil && i%20 == g {
				_, err = p.Trim(8 * mib)
			}
			if err != nil {
				return err
			}
		}
		for _, b := range live {
			if err := p.Free(b); err != nil {
				return err
			}
		}
		return nil
	}
	var group errgroup.Group
	for g := range goroutines {
		group.Go(func() error { return run(g) })
	}
	require.NoError(t, group.Wait())
	require.NoError(t, p.Check())
	require.Zero(t, p.Stats().Blocks)
}

// A trim gives memory back whose earlier places are mapped yet.
func TestATrimUnmapsEveryPlaceOfWhatItGivesBack(t *testing.T) {
	t.Cleanup(pool.SetUpkeep(time.Hour))
	m, d := open(t)
	s := stream(t, d)
	p := newPool(t, d, pool.Options{})
	live := holes(t, p, s, 8, 8*mib)
	live = append(live, alloc(t, p, s, 32*mib)) // of the holes
	require.Zero(t, m.Count("cuMemUnmap"))
	for _, b := range live {
		free(t, p, b)
	}
	require.NoError(t, s.Synchronize())
	freed, err := p.Trim(20 * mib)
	require.NoError(t, err)
	require.GreaterOrEqual(t, freed, 20*mib)
	require.Equal(t, 64*mib-freed, p.Stats().Reserved)
	require.Equal(t, 64*mib-freed, d.System().Stats().AllocatedBytes)
	_, err = p.Trim(0)
	require.NoError(t, err)
	require.Zero(t, p.Stats().Reserved)
	require.Zero(t, d.System().Stats().AllocatedBytes)
}

// Old places are unmapped while chunks move, if there are too many.
func TestTooManyPlacesAreUnmapped(t *testing.T) {
	t.Cleanup(pool.SetUpkeep(time.Hour))
	t.Cleanup(pool.SetMostDeferred(2))
	m, d := open(t)
	s := stream(t, d)
	p := newPool(t, d, pool.Options{})
	live := holes(t, p, s, 12, 4*mib)
	for range 3 {
		require.Zero(t, m.Count("cuMemUnmap"))
		live = append(live, alloc(t, p, s, 8*mib)) // of two holes
	}
	require.Eventually(t, func() bool { return m.Count("cuMemUnmap") > 0 }, testTimeout, time.Millisecond)
	for _, b := range live {
		free(t, p, b)
	}
}
