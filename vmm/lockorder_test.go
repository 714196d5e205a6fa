package vmm

import (
	"sync"
	"testing"
	"time"

	"github.com/cuvmm/cuvmm/cuda"
	"github.com/cuvmm/cuvmm/cuda/sim"
	"github.com/stretchr/testify/require"
)

// two are buffers of two chunks each, in the order of their addresses.
func two(t *testing.T) (d *cuda.Device, a, b *Buffer) {
	_, s := sim.Open(t)
	d = s.Devices()[0]
	var both [2]*Buffer
	for i := range both {
		made, err := NewBuffer(d, BufferOptions{Reserve: 4 << 20, Chunks: FixedChunks(2 << 20)})
		require.NoError(t, err)
		t.Cleanup(func() { require.NoError(t, made.Close()) })
		require.NoError(t, made.Resize(nil, 4<<20))
		both[i] = made
	}
	if a, b = both[0], both[1]; a.Ptr() > b.Ptr() {
		a, b = b, a
	}
	return d, a, b
}

// Copies in opposite directions between two buffers lock the two in one order, so that they
// never wait for each other with a writer between them.
func TestTwoBuffersHaveALockOrder(t *testing.T) {
	_, a, b := two(t)
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
func TestCopiesBetweenTwoBuffersEnd(t *testing.T) {
	d, a, b := two(t)
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
			func() { _ = a.Resize(nil, 4<<20); _ = a.ClipAfter(s) },
			func() { _ = b.Resize(nil, 4<<20); _ = b.ClipAfter(s) },
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
