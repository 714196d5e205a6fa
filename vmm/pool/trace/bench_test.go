package trace_test

import (
	"fmt"
	"math"
	"testing"
	"time"

	"github.com/cuvmm/cuvmm/cuda"
	"github.com/cuvmm/cuvmm/internal/cbench"
	"github.com/cuvmm/cuvmm/internal/core"
	"github.com/cuvmm/cuvmm/internal/driver"
	"github.com/cuvmm/cuvmm/internal/gputest"
	"github.com/cuvmm/cuvmm/vmm/pool/trace"
	"github.com/stretchr/testify/require"
)

// measured is what an allocator that held nothing did with a trace: the time of
// allocating and freeing, and the most memory it held.
type measured struct {
	took     time.Duration
	reserved uint64
}

// contenders are who is compared, in the same run. scripts/pool-peers.py adds
// those that live in Python, and joins all in a table.
var contenders = []struct {
	name   string
	replay func(b *testing.B, d *cuda.Device, t *trace.Trace) (measured, error)
}{
	{"cuda-async-c", driversPool(0)},
	{"cuda-async-keep-c", driversPool(math.MaxUint64)},
}

// BenchmarkReplay replays the generated traces at full size. Each is measured
// once, whatever the benchmark's time is. Promised of the pool, on every trace:
// no more memory than whichever of the driver's pool and PyTorch's expandable
// segments holds less, and no more time than that one takes.
func BenchmarkReplay(b *testing.B) {
	d := gputest.RealWith(b, cuda.WithNamedStreamsOnly())
	for _, g := range trace.Generators() {
		for seed := range uint64(seeds) {
			t := g.Make(trace.Config{Seed: seed})
			s, err := t.Summary()
			require.NoError(b, err)
			for _, c := range contenders {
				var m *measured
				b.Run(fmt.Sprintf("%s/%s", t.Name, c.name), func(b *testing.B) {
					if m == nil {
						got, err := c.replay(b, d, t)
						require.NoError(b, err)
						m = &got
					}
					b.ReportMetric(0, "ns/op")
					b.ReportMetric(float64(m.reserved)/float64(s.PeakBytes), "reserved/requested")
					b.ReportMetric(m.took.Seconds()*1e6/float64(s.Allocs+s.Frees), "us/op")
				})
			}
		}
	}
}

// driversPool is the driver's own pool, called from C. It keeps so much free
// memory when the program waits.
func driversPool(keep uint64) func(*testing.B, *cuda.Device, *trace.Trace) (measured, error) {
	return func(b *testing.B, d *cuda.Device, t *trace.Trace) (measured, error) {
		if !cbench.Available {
			b.Skip("built without cgo: no C to compare with")
		}
		lib, err := cbench.Open(d.System().Driver().Path)
		require.NoError(b, err)
		ctx, err := core.ContextOf(d)
		require.NoError(b, err)
		s, err := d.NewStream(cuda.StreamOptions{})
		require.NoError(b, err)
		defer func() { require.NoError(b, s.Close()) }()
		ops, err := poolOps(t)
		require.NoError(b, err)
		r, err := lib.PoolReplay(ctx.Handle, driver.Device(d.Ordinal()), driver.Stream(s.Handle()), ops, keep)
		return measured{r.Took, r.Reserved}, err
	}
}

// poolOps is a trace of one stream for the C loop, which reuses numbers of
// blocks, so that it has few to look after.
func poolOps(t *trace.Trace) ([]cbench.PoolOp, error) {
	if t.Streams != 1 {
		return nil, fmt.Errorf("%s has %d streams: the C loop has one", t.Name, t.Streams)
	}
	var free []uint32
	var most uint32
	number := map[uint32]uint32{}
	var ops []cbench.PoolOp
	for _, op := range t.Ops {
		switch op.Kind {
		case trace.Alloc:
			n := most
			if len(free) > 0 {
				n, free = free[len(free)-1], free[:len(free)-1]
			} else {
				most++
			}
			number[op.ID] = n
			ops = append(ops, cbench.PoolOp{Kind: cbench.PoolAlloc, Block: n, Bytes: max(op.Bytes, 1)})
		case trace.Free:
			free = append(free, number[op.ID])
			ops = append(ops, cbench.PoolOp{Kind: cbench.PoolFree, Block: number[op.ID]})
		case trace.Sync:
			ops = append(ops, cbench.PoolOp{Kind: cbench.PoolWait})
		}
	}
	return ops, nil
}

func TestPoolOps(t *testing.T) {
	one := small()
	one.Streams = 1
	one.Ops[1].Stream, one.Ops[2].Stream = 0, 0
	ops, err := poolOps(one)
	require.NoError(t, err)
	require.Equal(t, []cbench.PoolOp{
		{Kind: cbench.PoolAlloc, Bytes: 1000}, {Kind: cbench.PoolAlloc, Block: 1, Bytes: 1}, {Kind: cbench.PoolFree},
		{Kind: cbench.PoolWait}, {Kind: cbench.PoolAlloc, Bytes: 300},
	}, ops)
	_, err = poolOps(small())
	require.ErrorContains(t, err, "2 streams")
}
