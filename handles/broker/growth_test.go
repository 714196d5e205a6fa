//go:build linux

package broker_test

import (
	"runtime"
	"testing"

	"github.com/cuvmm/cuvmm/handles/broker"
	"github.com/cuvmm/cuvmm/handles/peer"
	"github.com/cuvmm/cuvmm/internal/test/gputest"
	"github.com/cuvmm/cuvmm/internal/test/peertest"
	"github.com/stretchr/testify/require"
)

// Attaching again and again leaves nothing in the client, the broker or the keeper. CUVMM_KILL_ROUNDS
// has it attach five times as often.
func TestAttachesDoNotGrow(t *testing.T) {
	d := gputest.Software(t)
	h := newHouse(t, d, broker.Options{})
	k := h.dial()
	ctx := peertest.Context(t)
	closed(t, write(t, k, d, "o", mib, 1, broker.CreateOptions{}))
	state := func() (heap uint64, files, running int) {
		var m runtime.MemStats
		runtime.GC()
		runtime.ReadMemStats(&m)
		return m.HeapAlloc, peer.OpenFDs(), runtime.NumGoroutine()
	}
	attaches := func(n int) {
		for range n {
			o, err := k.Attach(t.Context(), d, "o", broker.AttachOptions{})
			require.NoError(t, err)
			require.NoError(t, o.Close())
		}
	}
	n := 5 * rounds()
	attaches(n/5 + 50)
	heap, files, running := state()
	attaches(n)
	heapAfter, filesAfter, runningAfter := state()
	t.Logf("%d attaches: heap of %d bytes, then %d; %d goroutines, then %d", n, heap, heapAfter, running, runningAfter)
	require.Less(t, heapAfter, heap+256<<10)
	require.Equal(t, files, filesAfter)
	require.LessOrEqual(t, runningAfter, running+4)
	require.NoError(t, k.Remove(ctx, "o", 0))
}
