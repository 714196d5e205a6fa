package pool_test

import (
	"fmt"
	"testing"
	"time"

	"github.com/cuvmm/cuvmm/cuda"
	"github.com/cuvmm/cuvmm/cuda/sim"
	"github.com/cuvmm/cuvmm/internal/tracegen"
	"github.com/cuvmm/cuvmm/vmm/pool"
	"github.com/cuvmm/cuvmm/vmm/pool/trace"
	"github.com/stretchr/testify/require"
)

// With the defaults the pool holds little more than was requested, and moves
// few chunks, on the seeds that are hardest for one or the other. The traces are
// replayed at full size: how much is held and moved is decided as on a GPU that
// keeps up.
func TestDefaultsHoldLittleAndMoveLittle(t *testing.T) {
	if thorough {
		t.Skip("checking everything after each operation, full traces take too long")
	}
	before := pool.SetMoment(10 * time.Second)
	defer pool.SetMoment(before)
	for _, c := range []struct {
		make  func(tracegen.Config) *trace.Trace
		held  float64 // times what was requested
		moved float64 // chunks a thousand operations
	}{
		{tracegen.Training, 1.07, 1},
		{tracegen.LoRA, 1.06, 0.5},
		{tracegen.Serving, 1.23, 1},
		{tracegen.Uniform, 1.24, 5},
	} {
		for _, seed := range []uint64{5, 8, 16, 19} {
			tr := c.make(tracegen.Config{Seed: seed})
			t.Run(tr.Name, func(t *testing.T) {
				m, d := open(t, sim.Options{Devices: []sim.DeviceOptions{{Memory: 60 << 30}}})
				want, err := tr.Summary()
				require.NoError(t, err)
				p, err := pool.New(d, pool.Options{})
				require.NoError(t, err)
				defer func() { require.NoError(t, p.Close()) }()
				_, err = trace.Replay(tr, &replayer{p: p, streams: []*cuda.Stream{stream(t, d)}})
				require.NoError(t, err)
				held := float64(p.Stats().PeakReserved) / float64(want.PeakBytes)
				moved := float64(m.Count("cuMemMap")-m.Count("cuMemCreate")) / float64(want.Allocs+want.Frees) * 1000
				says := fmt.Sprintf("held %.3f times what was requested, moved %.2f chunks a thousand operations", held, moved)
				t.Log(says)
				require.LessOrEqual(t, held, c.held, says)
				require.LessOrEqual(t, moved, c.moved, says)
			})
		}
	}
}
