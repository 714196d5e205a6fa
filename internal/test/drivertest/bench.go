package drivertest

import (
	"fmt"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/cuvmm/cuvmm/internal/driver"
)

// runLimit is how much memory a benchmark takes at once, in bytes: a small part
// of any GPU that the library is for.
const runLimit = 2 << 30

var benchChunks = []uint64{2 << 20, 8 << 20, 32 << 20, 64 << 20, 1 << 30}

// Bench runs the rules about cost. What they measure is the driver through this
// library's interface; the software driver's numbers say nothing of a GPU's.
func Bench(b *testing.B, env Env) {
	// First, while this process has no context either.
	b.Run("cycle without any context", func(b *testing.B) { benchWithoutContext(b, env) })
	s := newSuite(b, env)
	b.Run("chunk in a run", func(b *testing.B) {
		for _, size := range benchChunks {
			if size%s.devices[0].chunk == 0 {
				b.Run(sizeName(size), func(b *testing.B) { s.benchRun(b, size) })
			}
		}
	})
	b.Run("peer access of a run", s.benchPeer)
	b.Run("cycle on several threads", func(b *testing.B) {
		for _, threads := range []int{1, 8} {
			b.Run(fmt.Sprint(threads), func(b *testing.B) { s.benchThreads(b, threads) })
		}
	})
	b.Run("reserve and free", s.benchReserve)
	b.Run("export and import", func(b *testing.B) { s.benchShare(b, false) })
	b.Run("export and import beside an open descriptor", func(b *testing.B) { s.benchShare(b, true) })
	b.Run("stream and event", s.benchStream)
	b.Run("launch", func(b *testing.B) {
		for _, size := range []uint64{0, 2 << 20, 64 << 20, 1 << 30} {
			b.Run(launchName(size), func(b *testing.B) { s.benchLaunch(b, size) })
		}
	})
	b.Run("cuMemAlloc and cuMemFree", func(b *testing.B) {
		for _, size := range []uint64{2 << 20, 1 << 30} {
			b.Run(sizeName(size), func(b *testing.B) { s.benchAlloc(b, size) })
		}
	})
	b.Run("granularity", func(b *testing.B) {
		for b.Loop() {
			_, r := s.D.MemGetAllocationGranularity(onDevice(s.devices[0].Device), driver.GranularityMinimum)
			ok(b, r)
		}
	})
}

func sizeName(n uint64) string {
	if n >= 1<<30 {
		return fmt.Sprintf("%d GiB", n>>30)
	}
	return fmt.Sprintf("%d MiB", n>>20)
}

func ok(b *testing.B, r driver.Result) {
	b.Helper()
	if r != driver.Success {
		b.Fatal(r)
	}
}

// stopwatch adds up the time of each phase of a cycle.
type stopwatch struct {
	phases []string
	spent  map[string]time.Duration
}

func newStopwatch(phases ...string) *stopwatch {
	return &stopwatch{phases, map[string]time.Duration{}}
}

func (w *stopwatch) time(phase string, f func()) {
	start := time.Now()
	f()
	w.spent[phase] += time.Since(start)
}

// report gives each phase in microseconds for one of n chunks.
func (w *stopwatch) report(b *testing.B, n int) {
	for _, p := range w.phases {
		b.ReportMetric(float64(w.spent[p].Nanoseconds())/1e3/float64(n), p+"-µs")
	}
	b.ReportMetric(0, "ns/op")
}

// benchRun is a run of chunks, created, mapped, opened, unmapped and released,
// each phase over the whole run as a growing array does it.
func (s *suite) benchRun(b *testing.B, size uint64) {
	d := s.devices[0]
	n := max(1, min(64, runLimit/size))
	p, r := s.D.MemAddressReserve(n*size, 0, 0)
	ok(b, r)
	defer func() { ok(b, s.D.MemAddressFree(p, n*size)) }()
	handles := make([]driver.MemHandle, n)
	self := grant(driver.AccessReadWrite, deviceLocation(d.Device))
	at := func(i int) driver.Ptr { return p + driver.Ptr(uint64(i)*size) }
	w := newStopwatch("create", "map", "access", "unmap", "release")
	chunks := 0
	for b.Loop() {
		w.time("create", func() {
			for i := range handles {
				handles[i], r = s.D.MemCreate(size, onDevice(d.Device))
				ok(b, r)
			}
		})
		w.time("map", func() {
			for i, h := range handles {
				ok(b, s.D.MemMap(at(i), size, 0, h))
			}
		})
		w.time("access", func() { ok(b, s.D.MemSetAccess(p, n*size, self)) })
		w.time("unmap", func() { ok(b, s.D.MemUnmap(p, n*size)) })
		w.time("release", func() {
			for _, h := range handles {
				ok(b, s.D.MemRelease(h))
			}
		})
		chunks += len(handles)
	}
	w.report(b, chunks)
}

// benchPeer grants a run of 64 chunks to its own device, then to the peer, then
// takes the peer's access away.
func (s *suite) benchPeer(b *testing.B) {
	if !twoDevices.Met(s) {
		b.Skipf("needs %s", twoDevices.What)
	}
	const n = 64
	size := roundUp(16<<20, s.devices[0].chunk)
	p, r := s.D.MemAddressReserve(n*size, 0, 0)
	ok(b, r)
	defer func() { ok(b, s.D.MemAddressFree(p, n*size)) }()
	self, peer := deviceLocation(s.devices[0].Device), deviceLocation(s.devices[1].Device)
	w := newStopwatch("self", "peer", "revoke")
	chunks := 0
	for b.Loop() {
		for i := range uint64(n) {
			h, r := s.D.MemCreate(size, onDevice(s.devices[0].Device))
			ok(b, r)
			ok(b, s.D.MemMap(p+driver.Ptr(i*size), size, 0, h))
			ok(b, s.D.MemRelease(h))
		}
		w.time("self", func() { ok(b, s.D.MemSetAccess(p, n*size, grant(driver.AccessReadWrite, self))) })
		w.time("peer", func() { ok(b, s.D.MemSetAccess(p, n*size, grant(driver.AccessReadWrite, peer))) })
		w.time("revoke", func() { ok(b, s.D.MemSetAccess(p, n*size, grant(driver.AccessNone, peer))) })
		ok(b, s.D.MemUnmap(p, n*size))
		chunks += n
	}
	w.report(b, chunks)
}

// benchThreads is the wall time of a chunk's whole cycle while so many threads
// make cycles.
func (s *suite) benchThreads(b *testing.B, threads int) {
	const each = 16
	dev := s.devices[0].Device
	for b.Loop() {
		var all sync.WaitGroup
		results := make([]driver.Result, threads)
		for i := range threads {
			all.Go(func() {
				for range each {
					if _, r := timedCycle(s.D, dev, s.devices[0].chunk); r != driver.Success {
						results[i] = r
					}
				}
			})
		}
		all.Wait()
		for _, r := range results {
			ok(b, r)
		}
	}
	b.ReportMetric(float64(b.Elapsed().Nanoseconds())/1e3/float64(b.N*threads*each), "µs/chunk")
	b.ReportMetric(0, "ns/op")
}

// cycleTimes are how long the parts of a cycle took.
type cycleTimes struct {
	Access, Unmap time.Duration
}

// timedCycle is one chunk's cycle, from reservation to address-free.
func timedCycle(d driver.Driver, dev driver.Device, size uint64) (w cycleTimes, r driver.Result) {
	p, r := d.MemAddressReserve(size, 0, 0)
	if r != driver.Success {
		return w, r
	}
	h, r := d.MemCreate(size, onDevice(dev))
	if r != driver.Success {
		return w, r
	}
	if r := d.MemMap(p, size, 0, h); r != driver.Success {
		return w, r
	}
	start := time.Now()
	if r := d.MemSetAccess(p, size, grant(driver.AccessReadWrite, deviceLocation(dev))); r != driver.Success {
		return w, r
	}
	w.Access = time.Since(start)
	start = time.Now()
	if r := d.MemUnmap(p, size); r != driver.Success {
		return w, r
	}
	w.Unmap = time.Since(start)
	if r := d.MemRelease(h); r != driver.Success {
		return w, r
	}
	return w, d.MemAddressFree(p, size)
}

// benchWithoutContext is the cycle in a process that has no context, and in the
// same process once it has one.
func benchWithoutContext(b *testing.B, env Env) {
	const cycles = 50
	w := newStopwatch("access-without", "unmap-without", "access-with", "unmap-with")
	n := 0
	for b.Loop() {
		c := env.child(b, "time cycles")
		c.Start()
		c.Send(cycles)
		var without, with cycleTimes
		c.Recv(&without)
		c.Recv(&with)
		c.Wait()
		w.spent["access-without"] += without.Access
		w.spent["unmap-without"] += without.Unmap
		w.spent["access-with"] += with.Access
		w.spent["unmap-with"] += with.Unmap
		n += cycles
	}
	w.report(b, n)
}

func init() {
	roles["time cycles"] = func(c *child) {
		var n int
		c.recv(&n)
		dev, r := c.d.DeviceGet(0)
		c.ok(r, "cuDeviceGet")
		size, r := c.d.MemGetAllocationGranularity(onDevice(dev), driver.GranularityMinimum)
		c.ok(r, "granularity")
		total := func() (sum cycleTimes) {
			for range n {
				w, r := timedCycle(c.d, dev, size)
				c.ok(r, "cycle")
				sum.Access += w.Access
				sum.Unmap += w.Unmap
			}
			return sum
		}
		c.send(total())
		c.device(0)
		c.send(total())
	}
}

func (s *suite) benchReserve(b *testing.B) {
	w := newStopwatch("reserve", "free")
	n := 0
	for b.Loop() {
		var p driver.Ptr
		var r driver.Result
		w.time("reserve", func() { p, r = s.D.MemAddressReserve(1<<40, 0, 0) })
		ok(b, r)
		w.time("free", func() { r = s.D.MemAddressFree(p, 1<<40) })
		ok(b, r)
		n++
	}
	w.report(b, n)
}

// benchShare exports memory and imports it, while another descriptor is open, or
// none.
func (s *suite) benchShare(b *testing.B, beside bool) {
	if !shareableByFD.Met(s) {
		b.Skipf("needs %s", shareableByFD.What)
	}
	d := s.devices[0]
	h, r := s.D.MemCreate(d.chunk, shared(onDevice(d.Device), driver.HandlePosixFD))
	ok(b, r)
	defer func() { ok(b, s.D.MemRelease(h)) }()
	if beside {
		other, r := s.D.MemCreate(d.chunk, shared(onDevice(d.Device), driver.HandlePosixFD))
		ok(b, r)
		open, r := s.D.MemExportToShareableHandle(other, driver.HandlePosixFD)
		ok(b, r)
		defer func() {
			if err := closeDescriptor(toFD(open)); err != nil {
				b.Error(err)
			}
			ok(b, s.D.MemRelease(other))
		}()
	}
	w := newStopwatch("export", "import", "release", "close")
	n := 0
	for b.Loop() {
		var fd driver.ShareableHandle
		var i driver.MemHandle
		w.time("export", func() { fd, r = s.D.MemExportToShareableHandle(h, driver.HandlePosixFD) })
		ok(b, r)
		w.time("import", func() { i, r = s.D.MemImportFromShareableHandle(fd, driver.HandlePosixFD) })
		ok(b, r)
		w.time("release", func() { r = s.D.MemRelease(i) })
		ok(b, r)
		var err error
		w.time("close", func() { err = closeDescriptor(toFD(fd)) })
		if err != nil {
			b.Fatal(err)
		}
		n++
	}
	w.report(b, n)
}

func launchName(size uint64) string {
	if size == 0 {
		return "alone"
	}
	return "while another thread runs cycles of " + sizeName(size)
}

// benchLaunch is what a launch takes on the host, alone or while another thread
// creates and gives back memory in chunks of the given size.
func (s *suite) benchLaunch(b *testing.B, size uint64) {
	d := s.devices[0]
	if size > 0 {
		stop, stopped := make(chan struct{}), make(chan driver.Result)
		go func() {
			for {
				select {
				case <-stop:
					stopped <- driver.Success
					return
				default:
				}
				if _, r := timedCycle(s.D, d.Device, roundUp(size, d.chunk)); r != driver.Success {
					<-stop
					stopped <- r
					return
				}
			}
		}()
		defer func() {
			close(stop)
			ok(b, <-stopped)
		}()
	}
	var took []time.Duration
	for b.Loop() {
		start := time.Now()
		r := s.kernels.launchNothing(s.D, d.ctx, d.stream)
		took = append(took, time.Since(start))
		ok(b, r)
		// A stream takes about a thousand launches before it makes its caller
		// wait.
		if len(took)%256 == 0 {
			ok(b, s.D.StreamSynchronize(d.ctx, d.stream))
		}
	}
	ok(b, s.D.StreamSynchronize(d.ctx, d.stream))
	slices.Sort(took)
	for _, p := range []float64{50, 99, 99.9} {
		at := took[min(len(took)-1, int(float64(len(took))*p/100))]
		b.ReportMetric(float64(at.Nanoseconds())/1e3, fmt.Sprintf("p%g-µs", p))
	}
	b.ReportMetric(0, "ns/op")
}

func (s *suite) benchStream(b *testing.B) {
	d := s.devices[0]
	e, r := s.D.EventCreate(d.ctx, driver.EventDisableTiming)
	ok(b, r)
	defer func() { ok(b, s.D.EventDestroy(d.ctx, e)) }()
	b.Run("event record", func(b *testing.B) {
		for b.Loop() {
			ok(b, s.D.EventRecord(d.ctx, e, d.stream))
		}
	})
	ok(b, s.D.StreamSynchronize(d.ctx, d.stream))
	b.Run("event query", func(b *testing.B) {
		for b.Loop() {
			ok(b, s.D.EventQuery(d.ctx, e))
		}
	})
	b.Run("write-value", func(b *testing.B) {
		if !streamMemoryOps.Met(s) {
			b.Skipf("needs %s", streamMemoryOps.What)
		}
		for b.Loop() {
			ok(b, s.D.StreamWriteValue64(d.ctx, d.stream, s.scratch, 1))
		}
		ok(b, s.D.StreamSynchronize(d.ctx, d.stream))
	})
	b.Run("is-capturing", func(b *testing.B) {
		for b.Loop() {
			_, r := s.D.StreamIsCapturing(d.ctx, d.stream)
			ok(b, r)
		}
	})
}

func (s *suite) benchAlloc(b *testing.B, size uint64) {
	d := s.devices[0]
	w := newStopwatch("alloc", "free")
	n := 0
	for b.Loop() {
		var p driver.Ptr
		var r driver.Result
		w.time("alloc", func() { p, r = s.D.MemAlloc(d.ctx, size) })
		ok(b, r)
		w.time("free", func() { r = s.D.MemFree(d.ctx, p) })
		ok(b, r)
		n++
	}
	w.report(b, n)
}
