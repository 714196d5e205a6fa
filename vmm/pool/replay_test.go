package pool_test

import (
	"flag"
	"fmt"
	"math"
	"testing"
	"time"

	"github.com/cuvmm/cuvmm/cuda"
	"github.com/cuvmm/cuvmm/cuda/sim"
	"github.com/cuvmm/cuvmm/internal/cbench"
	"github.com/cuvmm/cuvmm/internal/core"
	"github.com/cuvmm/cuvmm/internal/driver"
	"github.com/cuvmm/cuvmm/internal/gputest"
	"github.com/cuvmm/cuvmm/internal/tracegen"
	"github.com/cuvmm/cuvmm/vmm/pool"
	"github.com/cuvmm/cuvmm/vmm/pool/trace"
	"github.com/stretchr/testify/require"
)

// measured is what an allocator that held nothing did with a trace: the time of
// allocating and freeing, and the most memory it held.
type measured struct {
	took     time.Duration
	reserved uint64
}

// contender is an allocator on the device.
type contender struct {
	name   string
	replay func(b *testing.B, d *cuda.Device, t *trace.Trace) (measured, error)
}

// BenchmarkReplay replays the generated traces at full size. Each is measured
// once, whatever the benchmark's time is. Promised of the pool, on every trace:
// no more memory than whichever of the driver's pool and PyTorch's expandable
// segments holds less, and no more time than that one takes. scripts/pool-peers.py
// adds those that live in Python, and joins all in a table.
func BenchmarkReplay(b *testing.B) {
	replayEach(b, 20, []contender{
		{"pool", ourPool(pool.Options{})},
		{"cuda-async-c", driversPool(0)},
		{"cuda-async-keep-c", driversPool(math.MaxUint64)},
	})
}

// BenchmarkCurve is what the pool's sizes trade: memory for time.
func BenchmarkCurve(b *testing.B) {
	all := []contender{{"pool", ourPool(pool.Options{})}}
	for _, slack := range []float64{-1, 1. / 8} {
		all = append(all, contender{fmt.Sprintf("pool-slack=%.3f", max(slack, 0)), ourPool(pool.Options{Slack: slack})})
	}
	for _, chunk := range []int{16, 32, 128} {
		all = append(all, contender{fmt.Sprintf("pool-chunk=%dMiB", chunk), ourPool(pool.Options{Chunk: chunk * mib})})
	}
	all = append(all, contender{"pool-exact=256MiB", ourPool(pool.Options{ExactFrom: 256 * mib})},
		contender{"pool-chunk=2MiB-slack=0", ourPool(pool.Options{Chunk: 2 * mib, Slack: -1})})
	replayEach(b, 2, all)
}

func replayEach(b *testing.B, seeds uint64, contenders []contender) {
	d := gputest.RealWith(b, cuda.WithNamedStreamsOnly())
	for _, g := range tracegen.Generators() {
		for seed := range seeds {
			t := g.Make(tracegen.Config{Seed: seed})
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

// replayer is a pool that replays a trace.
type replayer struct {
	p       *pool.Pool
	streams []*cuda.Stream
	used    []*cuda.Stream
}

func (r *replayer) Alloc(bytes uint64, stream uint32, _ string) (pool.Block, error) {
	return r.p.Alloc(pool.Request{Bytes: int(bytes), Stream: r.streams[stream]})
}

func (r *replayer) Free(b pool.Block, used []uint32) error {
	if len(used) == 0 {
		return r.p.Free(b)
	}
	r.used = r.used[:0]
	for _, u := range used {
		r.used = append(r.used, r.streams[u])
	}
	return r.p.Free(b, r.used...)
}

func (r *replayer) Sync() error {
	for _, s := range r.streams {
		if err := s.Synchronize(); err != nil {
			return err
		}
	}
	return nil
}

// ourPool is a new pool for each trace.
func ourPool(o pool.Options) func(*testing.B, *cuda.Device, *trace.Trace) (measured, error) {
	return func(b *testing.B, d *cuda.Device, t *trace.Trace) (measured, error) {
		p, err := pool.New(d, o)
		require.NoError(b, err)
		s, err := d.NewStream(cuda.StreamOptions{})
		require.NoError(b, err)
		defer func() {
			require.NoError(b, p.Close())
			require.NoError(b, s.Close())
		}()
		r, err := trace.Replay(t, &replayer{p: p, streams: []*cuda.Stream{s}})
		return measured{r.Took, p.Stats().PeakReserved}, err
	}
}

var replaySeeds = flag.Uint64("replay-seeds", 1, "how many seeds of each generator TestReplay replays")

// On the software driver the traces are replayed at full size, since memory that
// nobody touches costs nothing there: how much the pool holds can be seen without
// a GPU.
func TestReplay(t *testing.T) {
	for _, g := range tracegen.Generators() {
		for _, streams := range []int{1, 3} {
			for seed := range *replaySeeds {
				tr := g.Make(tracegen.Config{Seed: seed, Streams: streams})
				if thorough {
					tr.Ops = tr.Ops[:400]
				}
				t.Run(fmt.Sprintf("%s/%d streams", tr.Name, streams), func(t *testing.T) {
					t.Parallel()
					_, d := open(t, sim.Options{Devices: []sim.DeviceOptions{{Memory: 60 << 30}}})
					want, err := tr.Summary()
					require.NoError(t, err)
					r := &replayer{}
					for range streams {
						r.streams = append(r.streams, stream(t, d))
					}
					r.p = newPool(t, d, pool.Options{Statistics: true})
					got, err := trace.Replay(tr, r)
					require.NoError(t, err)
					s := r.p.Stats()
					require.Equal(t, want.PeakBytes, s.PeakRequested)
					require.EqualValues(t, want.PeakBlocks, s.PeakBlocks)
					require.EqualValues(t, want.Allocs, s.Allocs)
					require.Zero(t, s.Blocks)
					t.Logf("reserved/requested %.3f, %v a request", float64(s.PeakReserved)/float64(want.PeakBytes), got.PerOperation())
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
	one := &trace.Trace{Streams: 1, Tags: []string{""}, Ops: []trace.Op{
		{Kind: trace.Alloc, Bytes: 1000},
		{Kind: trace.Alloc, ID: 1},
		{Kind: trace.Free},
		{Kind: trace.Sync},
		{Kind: trace.Alloc, ID: 2, Bytes: 300},
	}}
	ops, err := poolOps(one)
	require.NoError(t, err)
	require.Equal(t, []cbench.PoolOp{
		{Kind: cbench.PoolAlloc, Bytes: 1000}, {Kind: cbench.PoolAlloc, Block: 1, Bytes: 1}, {Kind: cbench.PoolFree},
		{Kind: cbench.PoolWait}, {Kind: cbench.PoolAlloc, Bytes: 300},
	}, ops)
	one.Streams = 2
	_, err = poolOps(one)
	require.ErrorContains(t, err, "2 streams")
}

// What a pool recorded is the program that it served: its trace can be stored,
// and replayed.
func TestHistoryIsAReplay(t *testing.T) {
	_, d := open(t)
	tr := tracegen.Serving(tracegen.Config{Seed: 2, Streams: 3, Divisor: 100})
	tr.Ops = tr.Ops[:20_000]
	if thorough {
		tr.Ops = tr.Ops[:600]
	}
	r := &replayer{p: newPool(t, d, pool.Options{})}
	for range tr.Streams {
		r.streams = append(r.streams, stream(t, d))
	}
	r.p.StartHistory(pool.HistoryOptions{Events: len(tr.Ops) + 1000})
	_, err := trace.Replay(tr, r)
	require.NoError(t, err)
	recorded := r.p.History().Trace("again")
	r.p.StopHistory()

	// The history does not know when the program waited, nor tags that were not
	// given, and ends with what the replay gave back; streams are numbered as
	// they come.
	numbers := map[uint32]uint32{}
	var want []trace.Op
	for _, op := range tr.Ops {
		if op.Kind == trace.Sync {
			continue
		}
		op.Tag = 0
		if op.Kind == trace.Alloc || op.Kind == trace.Use {
			n, known := numbers[op.Stream]
			if !known {
				n = uint32(len(numbers))
				numbers[op.Stream] = n
			}
			op.Stream = n
		}
		want = append(want, op)
	}
	require.Greater(t, len(want), len(tr.Ops)*9/10)
	require.Equal(t, want, recorded.Ops[:len(want)])
	s, err := recorded.Summary()
	require.NoError(t, err)
	require.Zero(t, s.LiveBlocks)
	_, err = trace.Replay(recorded, r)
	require.NoError(t, err)
}
