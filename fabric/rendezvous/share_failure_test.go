//go:build linux

package rendezvous

import (
	"fmt"
	"sync/atomic"
	"testing"
	"time"

	"github.com/cuvmm/cuvmm/cuda"
	"github.com/cuvmm/cuvmm/cuda/sim"
	"github.com/cuvmm/cuvmm/internal/driver"
	"github.com/cuvmm/cuvmm/internal/test/gputest"
	"github.com/cuvmm/cuvmm/vmm"
	"github.com/stretchr/testify/require"
)

// undoing are the calls that give back what Share built, and "" is none.
var undoing = []string{"", "cuMemUnmap", "cuMemRelease", "cuMemAddressFree"}

// TestEveryFailureOfShare has each driver call of one rank's Share fail, alone and while the
// drivers of all ranks refuse what undoes: all ranks learn of it, and once the drivers take
// everything again nothing is left.
func TestEveryFailureOfShare(t *testing.T) {
	calls := failingShare(t, 0, 0, "")
	require.Greater(t, calls, 10)
	for rank := range 2 {
		for k := range calls {
			t.Run(fmt.Sprintf("rank %d, call %d", rank, k), func(t *testing.T) {
				t.Parallel()
				for _, undo := range undoing {
					failingShare(t, rank, k+1, undo)
				}
			})
		}
	}
}

// failingShare has two of three ranks share a buffer, while the k-th driver call of a rank
// fails, counted from 1, and every call undo of every rank. It returns how many calls the
// rank made.
func failingShare(t *testing.T, rank, k int, undo string) int {
	groups, err := InProcess(3, Options{Timeout: testTimeout})
	require.NoError(t, err)
	folder := t.TempDir()
	var machines [3]*sim.Machine
	var devices [3]*cuda.Device
	var mine [3]*vmm.Buffer
	for r := range groups {
		groups[r].lag = time.Millisecond // no rank ends
		machines[r], devices[r] = seat(t, folder, place)
		if r == 2 {
			continue
		}
		mine[r], err = vmm.NewBuffer(devices[r], vmm.BufferOptions{Reserve: 1 << 20, Chunks: vmm.FixedChunks(64 << 10), Memory: vmm.Properties{Handles: vmm.Fabric}})
		require.NoError(t, err)
		require.NoError(t, gputest.Err(mine[r].AppendUndefined(2<<16)))
	}
	var before [3]cuda.Stats
	for r, d := range devices {
		before[r] = d.System().Stats()
	}
	var calls atomic.Int64
	machines[rank].OnCall(func(string) { calls.Add(1) })
	if k > 0 {
		machines[rank].Inject(sim.Fault{After: k - 1, Result: cuda.Code(driver.Unknown)})
	}
	if undo != "" {
		for _, m := range machines {
			m.Inject(sim.Fault{Call: undo, Times: -1, Result: cuda.Code(driver.Unknown)})
		}
	}
	var all [3][]*vmm.Buffer
	failed := together(groups, func(g *Group) (err error) {
		all[g.Rank()], err = Share(t.Context(), g, Agreement{Handle: vmm.Fabric}, devices[g.Rank()], mine[g.Rank()], ShareOptions{})
		return err
	})
	machines[rank].OnCall(nil)
	for _, m := range machines {
		m.ClearFaults()
	}
	at := fmt.Sprintf("%s: %v", undo, failed)
	for r := range groups {
		require.Equal(t, failed[0] == nil, failed[r] == nil, at)
		for _, b := range all[r] {
			if b != nil {
				require.NoError(t, b.Close(), at)
			}
		}
	}
	for r, g := range groups {
		sys := devices[r].System()
		_ = sys.Drain(t.Context()) // returns the errors of teardowns that failed
		require.NoError(t, sys.Drain(t.Context()), at)
		now := sys.Stats()
		now.SharedReleased, now.SharedReleasedBytes = before[r].SharedReleased, before[r].SharedReleasedBytes
		require.Equal(t, before[r], now, at)
		require.NoError(t, g.Close(), at)
		if mine[r] != nil {
			require.NoError(t, mine[r].Close(), at)
		}
	}
	return int(calls.Load())
}
