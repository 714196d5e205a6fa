package vmm

import (
	"sync"
	"testing"
	"time"

	"github.com/cuvmm/cuvmm/cuda"
	"github.com/cuvmm/cuvmm/cuda/sim"
	"github.com/cuvmm/cuvmm/internal/core"
	"github.com/cuvmm/cuvmm/internal/driver"
	"github.com/cuvmm/cuvmm/internal/phys"
	"github.com/cuvmm/cuvmm/internal/share"
	"github.com/stretchr/testify/require"
)

// twice is one import as two buffers, which have one range and its address.
func twice(t *testing.T) (d *cuda.Device, a, b *Buffer) {
	_, s := sim.Open(t)
	d = s.Devices()[0]
	prop, gran, err := Properties{}.resolve("test", d)
	require.NoError(t, err)
	var chunks []*phys.Handle
	for range 2 {
		h, r := phys.Create(core.SystemOf(d), gran, prop)
		require.Equal(t, driver.Success, r)
		chunks = append(chunks, h)
	}
	in, err := importBuffer("test", share.ImportOptions{Device: d, Memory: prop, Granularity: gran, Chunks: chunks, Length: 2 * gran})
	require.NoError(t, err)
	again, ok := in.Dup(2 * gran)
	require.True(t, ok)
	a, b = in.public(), again.(*Buffer)
	t.Cleanup(func() {
		require.NoError(t, a.Close())
		require.NoError(t, b.Close())
	})
	return d, a, b
}

// Copies in opposite directions between two buffers of one import lock the two in
// one order, so that they never wait for each other with a writer between them.
func TestTwoBuffersOfOneImportHaveALockOrder(t *testing.T) {
	_, a, b := twice(t)
	for _, busy := range []*buffer{a.b, b.b} {
		busy.mu.Lock()
		var readers sync.WaitGroup
		for _, pair := range [][2]*buffer{{a.b, b.b}, {b.b, a.b}} {
			readers.Go(func() {
				rlockBoth(pair[0], pair[1])
				runlockBoth(pair[0], pair[1])
			})
		}
		// Only the first of the two may be held by a reader that waits for the other.
		for end := time.Now().Add(50 * time.Millisecond); busy == a.b && time.Now().Before(end); {
			if !b.b.mu.TryLock() {
				t.Error("a reader waits for the first buffer and holds the second")
				break
			}
			b.b.mu.Unlock()
		}
		busy.mu.Unlock()
		readers.Wait()
	}
}

// The same with the copies and clips of users.
func TestCopiesBetweenTwoBuffersOfOneImportEnd(t *testing.T) {
	d, a, b := twice(t)
	s, err := d.NewStream(cuda.StreamOptions{})
	require.NoError(t, err)
	part := func(b *Buffer, off int) Slice[byte] {
		sl, err := b.Slice(off, off+16)
		require.NoError(t, err)
		return sl
	}
	lo, hi := 0, 2<<20
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		var all sync.WaitGroup
		for _, f := range []func(){
			func() { _ = part(a, lo).CopyFromSlice(s, part(b, hi)) },
			func() { _ = part(b, lo).CopyFromSlice(s, part(a, hi)) },
			func() { _ = a.ClipAfter(s) },
			func() { _ = b.ClipAfter(s) },
		} {
			all.Go(func() {
				for range 2000 {
					f()
				}
			})
		}
		all.Wait()
	}()
	select {
	case <-ended:
	case <-time.After(time.Minute):
		t.Fatal("the copies wait for each other")
	}
	require.NoError(t, s.Close())
}
