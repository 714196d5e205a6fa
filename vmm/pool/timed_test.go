package pool_test

import (
	"flag"
	"maps"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/cuvmm/cuvmm/cuda"
	"github.com/cuvmm/cuvmm/cuda/sim"
	"github.com/cuvmm/cuvmm/internal/core"
	"github.com/cuvmm/cuvmm/internal/driver"
	"github.com/cuvmm/cuvmm/internal/poolreplay"
	"github.com/cuvmm/cuvmm/internal/tracegen"
	"github.com/cuvmm/cuvmm/vmm/pool"
	"github.com/cuvmm/cuvmm/vmm/pool/trace"
	"github.com/stretchr/testify/require"
)

// timed is a software driver with a clock of its own. The clock counts what driver calls
// take on an H200, and its GPU works as fast as that one, so how far it is behind the
// program, and what that costs, does not depend on the machine that runs the test.
type timed struct {
	driver.Driver
	mu     sync.Mutex
	now    time.Duration // the program's clock
	idle   time.Duration // when the GPU has done all that was submitted
	done   map[driver.Stream]time.Duration
	events map[driver.Event]time.Duration
	spent  time.Duration // in driver calls
	paused time.Duration // of requests that wait
	calls  map[string]int
}

const (
	createTime  = 10 * time.Microsecond
	mapTime     = 28 * time.Microsecond // with the grant; of any size
	unmapTime   = 14 * time.Microsecond // for each chunk
	recordTime  = 2 * time.Microsecond
	queryTime   = time.Microsecond
	pauseTime   = 20 * time.Microsecond // after a query, of a request that waits
	launchTime  = 2 * time.Microsecond
	requestTime = 100 * time.Nanosecond
	bandwidth   = 3600 // bytes a nanosecond, of setting memory
)

func (d *timed) spend(call string, n int, each time.Duration) {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.now += time.Duration(n) * each
	d.spent += time.Duration(n) * each
	d.calls[call] += n
}

func (d *timed) MemCreate(size uint64, prop driver.AllocationProp) (driver.MemHandle, driver.Result) {
	d.spend("create", 1, createTime)
	return d.Driver.MemCreate(size, prop)
}

func (d *timed) MemMap(p driver.Ptr, size, offset uint64, h driver.MemHandle) driver.Result {
	d.spend("map", 1, mapTime)
	return d.Driver.MemMap(p, size, offset, h)
}

func (d *timed) MemUnmap(p driver.Ptr, size uint64) driver.Result {
	d.spend("unmap", int(max(1, size/(32*mib))), unmapTime)
	return d.Driver.MemUnmap(p, size)
}

func (d *timed) EventRecord(_ driver.Context, e driver.Event, s driver.Stream) driver.Result {
	d.spend("record", 1, recordTime)
	d.mu.Lock()
	defer d.mu.Unlock()
	d.events[e] = d.done[s]
	return driver.Success
}

func (d *timed) EventQuery(_ driver.Context, e driver.Event) driver.Result {
	d.spend("query", 1, queryTime)
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.events[e] > d.now {
		d.now += pauseTime
		d.paused += pauseTime
		return driver.NotReady
	}
	return driver.Success
}

// follower replays on a timed driver. If works is set each block is set over its length,
// as far as the clock is concerned.
type follower struct {
	poolreplay.Replayer
	d       *timed
	works   bool
	handles []driver.Stream
}

func (f *follower) After(op trace.Op, _ pool.Block) error {
	f.d.mu.Lock()
	defer f.d.mu.Unlock()
	f.d.now += requestTime
	if f.works && op.Kind == trace.Alloc {
		f.d.now += launchTime
		f.d.idle = max(f.d.idle, f.d.now) + launchTime + time.Duration(op.Bytes/bandwidth)
		f.d.done[f.handles[op.Stream]] = f.d.idle
	}
	return nil
}

func (f *follower) Sync() error {
	f.d.mu.Lock()
	defer f.d.mu.Unlock()
	f.d.now = max(f.d.now, f.d.idle)
	return nil
}

// timing is what a replay of a trace took in each of two passes, in µs an operation.
type timing struct {
	held   float64    // the most reserved over the most requested
	us     [2]float64 // in driver calls
	waited [2]float64 // for the GPU
	calls  [2]map[string]int
}

// times replays a trace twice through a pool of an H200.
func times(tb testing.TB, tr *trace.Trace, behind bool) (r timing) {
	tb.Helper()
	m, err := sim.New(sim.Options{Devices: []sim.DeviceOptions{{Memory: 140 << 30}}})
	must(tb, err)
	d := &timed{Driver: driver.Of(m), done: map[driver.Stream]time.Duration{}, events: map[driver.Event]time.Duration{}, calls: map[string]int{}}
	var o cuda.Options
	core.UseDriver(&o, d, m.Close)
	sys, err := cuda.Open(o)
	must(tb, err)
	dev, err := sys.Device(0)
	must(tb, err)
	p, err := pool.New(dev, pool.Options{})
	must(tb, err)
	f := &follower{Replayer: poolreplay.Replayer{Pool: p}, d: d, works: behind}
	for range tr.Streams {
		s, err := dev.NewStream(cuda.StreamOptions{})
		must(tb, err)
		f.Streams = append(f.Streams, s)
		f.handles = append(f.handles, core.StreamOf(s).Handle)
	}
	want, err := tr.Summary()
	must(tb, err)
	for pass := range 2 {
		d.mu.Lock()
		d.spent, d.paused, d.calls = 0, 0, map[string]int{}
		d.mu.Unlock()
		_, err := trace.Replay(tr, f)
		must(tb, err)
		must(tb, f.Sync())
		d.mu.Lock()
		r.us[pass] = d.spent.Seconds() * 1e6 / float64(want.Allocs+want.Frees)
		r.waited[pass] = d.paused.Seconds() * 1e6 / float64(want.Allocs+want.Frees)
		r.calls[pass] = maps.Clone(d.calls)
		d.mu.Unlock()
	}
	r.held = float64(p.Stats().PeakReserved) / float64(want.PeakBytes)
	must(tb, p.Close())
	for _, s := range f.Streams {
		must(tb, s.Close())
	}
	must(tb, sys.Close())
	return r
}

var traceFiles = flag.String("traces", "testdata/traces/*.gz", "the files of the traces that BenchmarkTraces replays")

// recorded are the traces in some files.
func recorded(tb testing.TB, files string) (all []*trace.Trace) {
	tb.Helper()
	names, err := filepath.Glob(files)
	must(tb, err)
	require.NotEmpty(tb, names)
	for _, name := range names {
		file, err := os.Open(name)
		must(tb, err)
		tr, err := trace.Read(file, strings.TrimSuffix(filepath.Base(name), ".json.gz"))
		must(tb, err)
		must(tb, file.Close())
		all = append(all, tr)
	}
	return all
}

// BenchmarkTraces is what the pool holds on an H200, and what its driver calls take for an
// operation, by the clock of a timed driver: of the recorded traces, and the worst and the
// mean of 20 seeds of each generator. The recorded ones are also spread over four streams.
// Each is measured once: run it with -benchtime 1x.
func BenchmarkTraces(b *testing.B) {
	defer pool.SetUpkeep(time.Hour)()
	defer pool.SetMostLag(time.Minute)() // by the machine's clock, of which the GPU's is a part
	families := map[string][]*trace.Trace{}
	var names []string
	for _, tr := range recorded(b, *traceFiles) {
		names = append(names, tr.Name)
		families[tr.Name] = []*trace.Trace{tr}
	}
	for _, g := range tracegen.Generators() {
		names = append(names, g.Name)
		for seed := range uint64(20) {
			families[g.Name] = append(families[g.Name], g.Make(tracegen.Config{Seed: seed}))
		}
	}
	for _, name := range names {
		for _, mode := range []string{"idle", "behind", "streams"} {
			if mode == "streams" && len(families[name]) > 1 {
				continue
			}
			b.Run(name+"/"+mode, func(b *testing.B) {
				var held, worst float64
				var us, waited [2]float64
				seed, n := 0, float64(len(families[name]))
				for i, tr := range families[name] {
					if mode == "streams" {
						tr = poolreplay.Spread(tr, 4)
					}
					r := times(b, tr, mode != "idle")
					if r.held > worst {
						worst, seed = r.held, i
					}
					held += r.held / n
					us[0] += r.us[0] / n
					us[1] += r.us[1] / n
					waited[0] += r.waited[0] / n
					waited[1] += r.waited[1] / n
				}
				b.ReportMetric(0, "ns/op")
				b.ReportMetric(held, "held")
				b.ReportMetric(worst, "worst")
				b.ReportMetric(float64(seed), "seed")
				b.ReportMetric(us[0], "µs-first")
				b.ReportMetric(us[1], "µs-second")
				b.ReportMetric(waited[0], "µs-waited-first")
				b.ReportMetric(waited[1], "µs-waited-second")
			})
		}
	}
}

// A program whose large blocks vary in size maps little once it has run, because blocks
// that are cut out of a large free one leave it room to grow. If they came from its front,
// speech would map 780 to 820 chunks in its second pass.
func TestWhatHasRunMapsLittle(t *testing.T) {
	if thorough {
		t.Skip("checking everything after each operation, full traces take too long")
	}
	defer pool.SetUpkeep(time.Hour)()
	defer pool.SetMostDeferred(1 << 20)()
	for _, tr := range recorded(t, "testdata/traces/speech.json.gz") {
		for _, behind := range []bool{false, true} {
			r := times(t, tr, behind)
			t.Logf("behind %v: held %.3f, %v", behind, r.held, r.calls)
			require.Less(t, r.calls[1]["map"], 500)
		}
	}
}

// chains is a software driver that counts the chunks that are mapped, or unmapped, under
// one hold of a region's lock.
type chains struct {
	driver.Driver
	mapped, mostMapped int
	mostUnmapped       uint64
}

func (d *chains) MemMap(p driver.Ptr, size, offset uint64, h driver.MemHandle) driver.Result {
	d.mapped++
	d.mostMapped = max(d.mostMapped, d.mapped)
	return d.Driver.MemMap(p, size, offset, h)
}

func (d *chains) MemSetAccess(p driver.Ptr, size uint64, access []driver.AccessDesc) driver.Result {
	d.mapped = 0
	return d.Driver.MemSetAccess(p, size, access)
}

func (d *chains) MemUnmap(p driver.Ptr, size uint64) driver.Result {
	d.mostUnmapped = max(d.mostUnmapped, size)
	return d.Driver.MemUnmap(p, size)
}

// No request waits for more than 16 chunks that are mapped or unmapped for another one,
// however large a block is: while it is mapped, moved, trimmed, and put back because the
// driver refuses it.
func TestOthersWaitForPieces(t *testing.T) {
	defer pool.SetUpkeep(time.Hour)()
	m, err := sim.New(sim.Options{Devices: []sim.DeviceOptions{{Memory: 2 << 30}}})
	require.NoError(t, err)
	d := &chains{Driver: driver.Of(m)}
	var o cuda.Options
	core.UseDriver(&o, d, m.Close)
	sys, err := cuda.Open(o)
	require.NoError(t, err)
	s, err := sys.Devices()[0].NewStream(cuda.StreamOptions{})
	require.NoError(t, err)
	p, err := pool.New(sys.Devices()[0], pool.Options{Chunk: 2 * mib})
	require.NoError(t, err)

	long, shut := alloc(t, p, s, 200*mib), alloc(t, p, s, 4*mib)
	free(t, p, long)
	moved := alloc(t, p, s, 300*mib)
	free(t, p, moved)
	m.Inject(sim.Fault{Call: "cuMemMap", After: 60, Result: code})
	_, err = p.Alloc(pool.Request{Bytes: 500 * mib, Stream: s})
	require.Error(t, err)
	free(t, p, shut)
	require.NoError(t, p.Check())
	_, err = p.Trim(0)
	require.NoError(t, err)
	require.Zero(t, p.Stats().Reserved)

	require.Equal(t, 16, d.mostMapped)
	require.LessOrEqual(t, d.mostUnmapped, uint64(16*2*mib))
	require.NoError(t, p.Close())
	require.NoError(t, s.Close())
	require.NoError(t, sys.Close())
}
