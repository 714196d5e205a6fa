package pool_test

import (
	"fmt"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/cuvmm/cuvmm/cuda"
	"github.com/cuvmm/cuvmm/cuda/sim"
	"github.com/cuvmm/cuvmm/internal/core"
	"github.com/cuvmm/cuvmm/internal/driver"
	"github.com/cuvmm/cuvmm/internal/test/cbench"
	"github.com/cuvmm/cuvmm/internal/test/gputest"
	"github.com/cuvmm/cuvmm/vmm"
	"github.com/cuvmm/cuvmm/vmm/pool"
	"github.com/stretchr/testify/require"
)

// plain is the memory of the C loops: neither shareable nor RDMA-capable.
var plain = vmm.Properties{Handles: vmm.NoHandles, RDMA: vmm.RDMAOff}

// BenchmarkCold is a request that gets a new chunk of its size, beside the
// same chunk created, mapped and granted by a C loop in a range that is there.
// Promised: at most 1.1.
func BenchmarkCold(b *testing.B) {
	for _, size := range []int{2 * mib, 64 * mib, 1024 * mib} {
		b.Run(fmt.Sprintf("%dMiB", size/mib), func(b *testing.B) {
			d := gputest.RealWith(b, cuda.Options{NamedStreamsOnly: true})
			if !cbench.Available {
				b.Skip("built without cgo: no C to compare with")
			}
			lib, err := cbench.Open(d.System().Driver().Path)
			must(b, err)
			s := stream(b, d)
			p := benchPool(b, d, pool.Options{Memory: plain, Chunk: size})
			n := min(32, 8192*mib/size)
			ours := func() time.Duration {
				live := make([]pool.Block, n)
				var err error
				start := time.Now()
				for i := range live {
					if live[i], err = p.Alloc(pool.Request{Bytes: size, Stream: s}); err != nil {
						b.Fatal(err)
					}
				}
				took := time.Since(start)
				for _, blk := range live {
					must(b, p.Free(blk))
				}
				must(b, s.Synchronize())
				for p.Stats().Reserved > 0 {
					_, err := p.Trim(0)
					must(b, err)
				}
				return took / time.Duration(n)
			}
			steps := make([][]uint64, n)
			for i := range steps {
				steps[i] = []uint64{uint64(size)}
			}
			theirs := func() time.Duration {
				t, r := lib.GrowLoop(driver.Device(d.Ordinal()), uint64(n*size), steps)
				require.Equal(b, driver.Success, r)
				return t / time.Duration(n)
			}
			compare(b, ours, theirs)
		})
	}
}

// compare runs two ways in turn and reports their medians.
func compare(b *testing.B, ours, theirs func() time.Duration) {
	b.Helper()
	var as, bs []time.Duration
	for b.Loop() {
		as, bs = as[:0], bs[:0]
		ours()
		theirs()
		for range 11 {
			as = append(as, ours())
			bs = append(bs, theirs())
		}
	}
	slices.Sort(as)
	slices.Sort(bs)
	mine, base := as[len(as)/2], bs[len(bs)/2]
	b.ReportMetric(0, "ns/op")
	b.ReportMetric(mine.Seconds()*1e6, "us")
	b.ReportMetric(base.Seconds()*1e6, "baseline-us")
	b.ReportMetric(float64(mine)/float64(base), "ratio")
}

// BenchmarkStitch is a request that moves chunks from holes into one range,
// beside the bare calls that unmap as many runs, and map and grant the chunks.
// Promised: at most 1.1.
func BenchmarkStitch(b *testing.B) {
	for _, chunk := range []int{2 * mib, 16 * mib} {
		b.Run(fmt.Sprintf("%dMiB", chunk/mib), func(b *testing.B) {
			d := gputest.RealWith(b, cuda.Options{NamedStreamsOnly: true})
			s := stream(b, d)
			const runs, each = 8, 4
			ours := func() time.Duration {
				p := benchPool(b, d, pool.Options{Memory: plain, Chunk: chunk, Limit: (2*runs*each + 2) * chunk})
				var live, gone []pool.Block
				for i := range 2 * runs {
					blk := alloc(b, p, s, each*chunk)
					if i%2 == 0 {
						live = append(live, blk)
					} else {
						gone = append(gone, blk)
					}
				}
				rest := alloc(b, p, s, 2*chunk) // so that the limit is reached
				for _, blk := range gone {
					must(b, p.Free(blk))
				}
				must(b, s.Synchronize())
				start := time.Now()
				big := alloc(b, p, s, runs*each*chunk)
				took := time.Since(start)
				require.LessOrEqual(b, p.Stats().Reserved, (2*runs*each+2)*chunk)
				for _, blk := range append(live, big, rest) {
					must(b, p.Free(blk))
				}
				must(b, p.Close())
				return took
			}
			theirs := func() time.Duration { return stitchByHand(b, d, chunk, runs, each) }
			compare(b, ours, theirs)
		})
	}
}

// stitchByHand makes the fewest driver calls that stitch runs of chunks.
func stitchByHand(b *testing.B, d *cuda.Device, chunk, runs, each int) time.Duration {
	drv := core.SystemOf(d).Drv
	size := uint64(chunk)
	access := []driver.AccessDesc{{Location: driver.Location{Type: driver.LocationDevice, ID: int32(d.Ordinal())}, Flags: driver.AccessReadWrite}}
	prop := driver.AllocationProp{Type: driver.AllocationPinned, Location: access[0].Location}
	ok := func(r driver.Result) {
		if r != driver.Success {
			b.Fatal(r)
		}
	}
	span := uint64(runs) * uint64(each) * size
	base, r := drv.MemAddressReserve(4*span, 0, 0)
	ok(r)
	var handles []driver.MemHandle
	at := func(run, i int) driver.Ptr { return base + driver.Ptr(uint64(2*run*each+i)*size) }
	for run := range runs {
		for i := range each {
			h, r := drv.MemCreate(size, prop)
			ok(r)
			ok(drv.MemMap(at(run, i), size, 0, h))
			handles = append(handles, h)
		}
		ok(drv.MemSetAccess(at(run, 0), uint64(each)*size, access))
	}
	to := base + driver.Ptr(2*span)
	start := time.Now()
	for run := range runs {
		ok(drv.MemUnmap(at(run, 0), uint64(each)*size))
	}
	for i, h := range handles {
		ok(drv.MemMap(to+driver.Ptr(uint64(i)*size), size, 0, h))
	}
	ok(drv.MemSetAccess(to, span, access))
	took := time.Since(start)
	ok(drv.MemUnmap(to, span))
	for _, h := range handles {
		ok(drv.MemRelease(h))
	}
	ok(drv.MemAddressFree(base, 4*span))
	return took
}

// BenchmarkFreeWhileBusy frees blocks whose streams have milliseconds of work
// before them, and reports the longest. Promised: at most 100 µs.
func BenchmarkFreeWhileBusy(b *testing.B) {
	each(b, func(b *testing.B, d *cuda.Device) {
		s, other := stream(b, d), stream(b, d)
		p := benchPool(b, d, pool.Options{})
		bytes := 256 * mib
		if d.System().Driver().Software {
			bytes = mib
		}
		work := alloc(b, p, s, bytes)
		var longest time.Duration
		for b.Loop() {
			var live []pool.Block
			for i := range 100 {
				live = append(live, alloc(b, p, s, 512<<(i%12)))
			}
			for range 20 {
				must(b, s.Memset(work.Ptr(), 1, bytes))
				must(b, other.Memset(work.Ptr(), 2, bytes))
			}
			for i, blk := range live {
				start := time.Now()
				if i%2 == 0 {
					must(b, p.Free(blk))
				} else {
					must(b, p.Free(blk, other))
				}
				longest = max(longest, time.Since(start))
			}
			must(b, s.Synchronize())
			must(b, other.Synchronize())
		}
		b.ReportMetric(float64(longest.Microseconds()), "longest-us")
		must(b, p.Free(work))
	})
}

// busy is a software driver on which mapping a chunk takes as long as on an H200, one at a
// time.
type busy struct {
	driver.Driver
	one    sync.Mutex
	mapped atomic.Int64
}

func (d *busy) MemMap(p driver.Ptr, size, offset uint64, h driver.MemHandle) driver.Result {
	d.one.Lock()
	for start := time.Now(); time.Since(start) < mapTime; {
	}
	d.one.Unlock()
	d.mapped.Add(1)
	return d.Driver.MemMap(p, size, offset, h)
}

// BenchmarkBesideALargeRequest is a request that maps a chunk while another goroutine maps
// 1,024 for one request, again and again: the median time, and how many of those chunks are
// mapped meanwhile, in the median and at the 90th percentile. Run it with -benchtime 300x.
func BenchmarkBesideALargeRequest(b *testing.B) {
	m, err := sim.New(sim.Options{Devices: []sim.DeviceOptions{{Memory: 64 << 30}}})
	must(b, err)
	d := &busy{Driver: driver.Of(m)}
	var o cuda.Options
	core.UseDriver(&o, d, m.Close)
	sys, err := cuda.Open(o)
	must(b, err)
	b.Cleanup(func() { must(b, sys.Close()) })
	dev := sys.Devices()[0]
	large, small := stream(b, dev), stream(b, dev)
	p := benchPool(b, dev, pool.Options{Chunk: 2 * mib, Wait: -1})
	var stop atomic.Bool
	var other sync.WaitGroup
	other.Go(func() {
		for !stop.Load() {
			block, err := p.Alloc(pool.Request{Bytes: 2 << 30, Stream: large})
			if err == nil {
				err = p.Free(block)
			}
			if err == nil {
				_, err = p.Trim(0)
			}
			if err != nil {
				b.Error(err)
				return
			}
		}
	})
	var live []pool.Block
	var took []time.Duration
	var meanwhile []int64
	for b.Loop() {
		time.Sleep(3 * time.Millisecond)
		before, start := d.mapped.Load(), time.Now()
		block, err := p.Alloc(pool.Request{Bytes: 3 * mib / 2, Stream: small})
		must(b, err)
		took = append(took, time.Since(start))
		meanwhile = append(meanwhile, d.mapped.Load()-before-1)
		live = append(live, block)
	}
	stop.Store(true)
	other.Wait()
	slices.Sort(took)
	slices.Sort(meanwhile)
	b.ReportMetric(0, "ns/op")
	b.ReportMetric(took[len(took)/2].Seconds()*1e6, "µs-median")
	b.ReportMetric(float64(meanwhile[len(meanwhile)/2]), "chunks-median")
	b.ReportMetric(float64(meanwhile[len(meanwhile)*9/10]), "chunks-90")
	for _, block := range live {
		must(b, p.Free(block))
	}
}
