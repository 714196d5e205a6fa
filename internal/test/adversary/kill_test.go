//go:build linux

package adversary

import (
	"math/rand/v2"
	"path/filepath"
	"testing"
	"time"

	"github.com/cuvmm/cuvmm/cuda/sim"
	"github.com/stretchr/testify/require"
)

// Publishers and followers are killed at random moments. The others go on, or are
// told; nothing stays on their machine.
func TestKills(t *testing.T) {
	for round := range times(3) {
		r := rand.New(rand.NewPCG(uint64(round), 3))
		moment := func() { time.Sleep(time.Duration(r.IntN(20)) * time.Millisecond) }
		folder := filepath.Join(t.TempDir(), "machine")
		p := victim{Folder: folder}.starts(t)
		p.does("announce", 1)
		all := make([]*child, 3)
		for i := range all {
			all[i] = startFollowerOn(t, p.path, folder)
		}
		for range 8 { // followers, in their first moments and when they are at it
			i := r.IntN(len(all))
			if r.IntN(2) == 0 {
				all[i].progress()
			}
			moment()
			all[i].cmd.Kill()
			all[i] = startFollowerOn(t, p.path, folder)
			p.does("announce", 1+r.IntN(8))
			p.does("shrink", 1)
		}
		for _, f := range all {
			f.progress()
		}
		moment()
		p.cmd.Kill()
		for _, f := range all {
			f.isTold()
		}
		require.Eventually(t, func() bool {
			u, err := sim.Inspect(folder)
			require.NoError(t, err)
			return len(u.Processes) == 0 && len(u.Exported) == 0 && u.Devices[0].Taken == 0 && u.HostTaken == 0
		}, patience, time.Millisecond, "round %d: something stays", round)
		files, err := filepath.Glob(folder + "/*")
		require.NoError(t, err)
		require.Len(t, files, 1, "the books alone")
	}
}
