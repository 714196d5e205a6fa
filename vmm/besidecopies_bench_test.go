package vmm_test

import (
	"context"
	"slices"
	"strconv"
	"sync"
	"sync/atomic"
	"testing"
	"time"
	"unsafe"

	"github.com/cuvmm/cuvmm/internal/driver"
	"github.com/cuvmm/cuvmm/internal/host"
	"github.com/cuvmm/cuvmm/vmm"
	"github.com/stretchr/testify/require"
)

// chunkCopies copies chunks between the device and the host by raw driver calls, and makes their
// memory or gives it back before, beside or after the copies.
type chunkCopies struct {
	*benchSleeper
	drv     driver.Driver
	prop    driver.AllocationProp
	base    driver.Ptr
	host    []byte // for the chunks in turn
	streams [2]driver.Stream
	handles []driver.MemHandle
}

// inFlight is how many chunks the copies are ahead of those that have passed.
const inFlight = 4

func (m *chunkCopies) ok(r driver.Result) {
	if r != driver.Success {
		panic(r) // on whatever goroutine
	}
}

func (m *chunkCopies) at(i int) driver.Ptr { return m.base + driver.Ptr(i*sleepChunk) }

// count is how many of the chunks, from the first on, have come so far.
type count struct{ atomic.Int64 }

func (c *count) wait(n int) {
	for c.Load() < int64(n) {
		host.Pause(20 * time.Microsecond)
	}
}

// threads calls f for every chunk on n threads.
func (m *chunkCopies) threads(n int, f func(i int)) {
	var next atomic.Int64
	var all sync.WaitGroup
	for range n {
		all.Go(func() {
			for i := int(next.Add(1)) - 1; i < len(m.handles); i = int(next.Add(1)) - 1 {
				f(i)
			}
		})
	}
	all.Wait()
}

func (m *chunkCopies) create(i int) {
	h, r := m.drv.MemCreate(sleepChunk, m.prop)
	m.ok(r)
	m.handles[i] = h
}

func (m *chunkCopies) release(i int) { m.ok(m.drv.MemRelease(m.handles[i])) }

// mapRun maps the n chunks from i on, and grants them in one call.
func (m *chunkCopies) mapRun(i, n int) {
	for j := i; j < i+n; j++ {
		m.ok(m.drv.MemMap(m.at(j), sleepChunk, 0, m.handles[j]))
	}
	access := []driver.AccessDesc{{Location: m.prop.Location, Flags: driver.AccessReadWrite}}
	m.ok(m.drv.MemSetAccess(m.at(i), uint64(n)*sleepChunk, access))
}

func (m *chunkCopies) unmapRun(i, n int) { m.ok(m.drv.MemUnmap(m.at(i), uint64(n)*sleepChunk)) }

// runs calls f for runs of n chunks, each once all of its chunks are in after, if that is not nil,
// and counts them in done.
func (m *chunkCopies) runs(n int, after, done *count, f func(i, n int)) {
	for i := 0; i < len(m.handles); i += n {
		k := min(n, len(m.handles)-i)
		if after != nil {
			after.wait(i + k)
		}
		f(i, k)
		done.Store(int64(i + k))
	}
}

// copy copies each chunk in pieces on two streams once it is in ready, if that is not nil, and
// counts those that have passed.
func (m *chunkCopies) copy(out bool, ready, passed *count) {
	c := m.ctx.Handle
	var sent [][2]driver.Event
	pass := func(most int) {
		for len(sent) > most {
			for _, e := range sent[0] {
				for m.drv.EventQuery(c, e) == driver.NotReady {
					host.Pause(50 * time.Microsecond)
				}
				m.ok(m.drv.EventDestroy(c, e))
			}
			sent = sent[1:]
			passed.Add(1)
		}
	}
	for i := range m.handles {
		if ready != nil {
			ready.wait(i + 1)
		}
		pass(inFlight - 1)
		for at := 0; at < sleepChunk; at += rawPiece {
			p, dev, s := unsafe.Pointer(&m.host[(i*sleepChunk+at)%len(m.host)]), m.at(i)+driver.Ptr(at), m.streams[at/rawPiece%2]
			if out {
				m.ok(m.drv.MemcpyDtoHAsync(c, p, dev, rawPiece, s))
			} else {
				m.ok(m.drv.MemcpyHtoDAsync(c, dev, p, rawPiece, s))
			}
		}
		var both [2]driver.Event
		for j, s := range m.streams {
			e, r := m.drv.EventCreate(c, driver.EventDisableTiming)
			m.ok(r)
			m.ok(m.drv.EventRecord(c, e, s))
			both[j] = e
		}
		sent = append(sent, both)
	}
	pass(0)
}

func (m *chunkCopies) make() {
	m.threads(1, m.create)
	m.mapRun(0, len(m.handles))
}

func (m *chunkCopies) drop() {
	m.unmapRun(0, len(m.handles))
	m.threads(1, m.release)
}

// sideBySide runs f on a goroutine beside g.
func sideBySide(f, g func()) {
	var both sync.WaitGroup
	both.Go(f)
	g()
	both.Wait()
}

// way is one order of things. before and after are not timed.
type way struct {
	name                 string
	before, timed, after func()
}

// watched is how many of the ways, the first ones, are measured beside other work.
const watched = 4

// ways returns the ways in, which begin without memory, and those out, which end without.
func (m *chunkCopies) ways() (in, out []way) {
	n, none := len(m.handles), func() {}
	mapBeside := func(run int) way {
		return way{"in-map-beside-by-" + strconv.Itoa(run), none, func() {
			m.threads(1, m.create)
			ready := new(count)
			sideBySide(func() { m.runs(run, nil, ready, m.mapRun) }, func() { m.copy(false, ready, new(count)) })
		}, none}
	}
	in = []way{
		{"in-copies", m.make, func() { m.copy(false, nil, new(count)) }, none},
		{"in-make-before", none, func() { m.make(); m.copy(false, nil, new(count)) }, none},
		{"in-make-beside", none, func() {
			ready := new(count)
			sideBySide(func() {
				m.runs(4, nil, ready, func(i, k int) {
					for j := i; j < i+k; j++ {
						m.create(j)
					}
					m.mapRun(i, k)
				})
			}, func() { m.copy(false, ready, new(count)) })
		}, none},
		mapBeside(4), mapBeside(1),
	}
	out = []way{
		{"out-copies", none, func() { m.copy(true, nil, new(count)) }, m.drop},
		{"out-drop-after", none, func() { m.copy(true, nil, new(count)); m.drop() }, none},
		{"out-drop-beside", none, func() {
			passed := new(count)
			sideBySide(func() {
				m.runs(4, passed, new(count), func(i, k int) {
					m.unmapRun(i, k)
					for j := i; j < i+k; j++ {
						m.release(j)
					}
				})
			}, func() { m.copy(true, nil, passed) })
		}, none},
		{"out-unmap-beside-release-after", none, func() {
			passed := new(count)
			sideBySide(func() { m.runs(4, passed, new(count), m.unmapRun) }, func() { m.copy(true, nil, passed) })
			m.threads(1, m.release)
		}, none},
		{"out-unmap-only", none, func() { m.unmapRun(0, n) }, func() { m.threads(1, m.release) }},
	}
	for _, k := range []int{1, 2, 4, 8} {
		in = append(in, way{"in-create-only-threads-" + strconv.Itoa(k), none, func() { m.threads(k, m.create) }, func() { m.mapRun(0, n) }})
		out = append(out, way{"out-release-only-threads-" + strconv.Itoa(k), func() { m.unmapRun(0, n) }, func() { m.threads(k, m.release) }, none})
	}
	return in, out
}

// BenchmarkDriverBesideCopies compares the orders in which the driver can be asked to make memory
// and copy to it, or to copy from it and take it: in ms for all, the copies of two streams of raw
// pieces being the floor. With each goes the 99th percentile of a 4 KiB copy and of a launch of
// another stream meanwhile. It promises nothing, and decides what Suspend and Resume do.
func BenchmarkDriverBesideCopies(b *testing.B) {
	sleepers(b, 0, rawHost, func(s *benchSleeper) {
		z, err := vmm.Suspend(context.Background(), vmm.SuspendOptions{Keep: vmm.Drop}, s.b) // makes room
		require.NoError(s, err)
		m := &chunkCopies{benchSleeper: s, drv: s.ctx.System().Drv, prop: s.prop(), handles: make([]driver.MemHandle, s.n/sleepChunk)}
		var r driver.Result
		m.base, r = m.drv.MemAddressReserve(uint64(s.n), 0, 0)
		m.ok(r)
		pinned, err := s.d.NewHostBuffer(min(s.n, rawHost))
		require.NoError(s, err)
		m.host = pinned.Bytes()
		for i := range m.streams {
			m.streams[i], r = m.drv.StreamCreate(s.ctx.Handle, driver.StreamNonBlocking)
			m.ok(r)
		}
		defer func() {
			for _, st := range m.streams {
				m.ok(m.drv.StreamDestroy(s.ctx.Handle, st))
			}
			require.NoError(s, pinned.Close())
			m.ok(m.drv.MemAddressFree(m.base, uint64(s.n)))
			require.NoError(s, z.Resume(context.Background()))
		}()
		in, out := m.ways()
		times := map[string][]time.Duration{}
		run := func(w way) {
			w.before()
			start := time.Now()
			w.timed()
			times[w.name] = append(times[w.name], time.Since(start))
			w.after()
		}
		round := func(i int) {
			for k := range in { // there are as many ways out
				run(in[(i+k)%len(in)])
				run(out[(i+k)%len(out)])
			}
		}
		for s.Loop() {
			round(0)
		}
		clear(times)
		for i := range rounds {
			round(i)
		}
		probe := newProbe(s)
		defer probe.close()
		for _, w := range slices.Concat(in, out) {
			s.ReportMetric(float64(middle(times[w.name]).Microseconds())/1e3, w.name+"-ms")
		}
		// In turn, each beside small copies and beside launches.
		for _, use := range []struct {
			name  string
			times func(during func()) []time.Duration
		}{{"4KiB-out", probe.out}, {"4KiB-in", probe.in}, {"launch", probe.launches}} {
			s.ReportMetric(p99(use.times(func() { time.Sleep(300 * time.Millisecond) })), "idle-"+use.name+"-p99-µs")
			meanwhile := func(w way) {
				w.before()
				s.ReportMetric(p99(use.times(w.timed)), w.name+"-"+use.name+"-p99-µs")
				w.after()
			}
			for i := range in[:watched] {
				meanwhile(in[i])
				meanwhile(out[i])
			}
		}
	})
}
