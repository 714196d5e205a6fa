package pool_test

import (
	"fmt"
	"slices"
	"testing"
	"time"

	"github.com/cuvmm/cuvmm/cuda"
	"github.com/cuvmm/cuvmm/cuda/sim"
	"github.com/cuvmm/cuvmm/vmm/pool"
	"github.com/stretchr/testify/require"
)

// BenchmarkCurve is what an operation takes beside n of something, on the
// software driver. Promised: no more than logarithmic growth. Each point is
// measured once, whatever the benchmark's time is: run it with -benchtime 1x.
func BenchmarkCurve(b *testing.B) {
	for _, c := range []struct {
		name    string
		sizes   []int
		measure func(c *curve, n int) time.Duration // of one operation
	}{
		{"request/live", []int{1_000, 10_000, 100_000, 1_000_000}, requestBesideLive},
		{"request/holes", []int{1_000, 10_000, 100_000}, requestBesideHoles},
		{"miss/holes-of-another-stream", []int{1_000, 10_000, 100_000}, missBesideHoles},
		{"miss/waiting-frees", []int{1_000, 10_000, 100_000}, missBesideWaiting},
		{"miss/streams", []int{100, 1_000, 10_000}, missBesideStreams},
		{"miss/graphs", []int{10, 100, 1_000}, missBesideGraphs},
		{"first-request/streams", []int{100, 1_000, 10_000}, firstBesideStreams},
		{"capture/graphs", []int{10, 100, 1_000}, captureBesideGraphs},
		{"node/nodes", []int{100, 1_000, 10_000}, nodeBesideNodes},
		{"refusal/live", []int{1_000, 10_000, 100_000, 1_000_000}, refusalBesideLive},
		{"trim-of-each/free-chunks", []int{100, 1_000, 10_000}, trimOfChunks},
		{"trim-of-each/empty-slabs", []int{100, 1_000, 10_000}, trimOfSlabs},
	} {
		for _, n := range c.sizes {
			var took time.Duration
			b.Run(fmt.Sprintf("%s/%d", c.name, n), func(b *testing.B) {
				if took == 0 {
					m, d := open(b, sim.Options{Devices: []sim.DeviceOptions{{Memory: 1 << 40}}})
					cv := &curve{b: b, m: m, d: d}
					cv.p = benchPool(b, d, pool.Options{Wait: -1})
					b.Cleanup(cv.freeAll) // before the pool is closed
					took = max(c.measure(cv, n), 1)
				}
				b.ReportMetric(0, "ns/op")
				b.ReportMetric(took.Seconds()*1e6, "us")
			})
		}
	}
}

// curve is where a point of a curve is measured.
type curve struct {
	b    *testing.B
	m    *sim.Machine
	d    *cuda.Device
	p    *pool.Pool
	live []pool.Block
}

// alloc is a block that is freed when the benchmark ends.
func (c *curve) alloc(s *cuda.Stream, bytes int) {
	blk, err := c.p.Alloc(pool.Request{Bytes: bytes, Stream: s})
	must(c.b, err)
	c.live = append(c.live, blk)
}

func (c *curve) freeAll() {
	for _, blk := range c.live {
		must(c.b, c.p.Free(blk))
	}
	c.live = nil
}

func (c *curve) stream() *cuda.Stream { return stream(c.b, c.d) }

// holes leaves n free blocks of the stream, none beside another.
func (c *curve) holes(s *cuda.Stream, n int, bytes func(i int) int) {
	for i := range n {
		c.alloc(s, bytes(i))
		c.alloc(s, bytes(i))
	}
	kept := c.live[:0]
	for i, blk := range c.live {
		if i%2 == 0 {
			must(c.b, c.p.Free(blk))
		} else {
			kept = append(kept, blk)
		}
	}
	c.live = kept
	must(c.b, s.Synchronize())
}

// median measures several times, because single times mean nothing on a loaded machine.
func median(measure func() time.Duration) time.Duration {
	var all []time.Duration
	for range 15 {
		all = append(all, measure())
	}
	slices.Sort(all)
	return all[len(all)/2]
}

func since(do func()) time.Duration {
	start := time.Now()
	do()
	return time.Since(start)
}

// requests is the time of a request that is freed at once, and of its free.
func (c *curve) requests(s *cuda.Stream, bytes func(i int) int) time.Duration {
	const n = 1000
	return median(func() time.Duration {
		return since(func() {
			for i := range n {
				cycle(c.b, c.p, pool.Request{Bytes: bytes(i), Stream: s})
			}
		}) / n
	})
}

// misses is the time of a request for which memory is mapped.
func (c *curve) misses(s *cuda.Stream) time.Duration {
	return median(func() (took time.Duration) {
		for before := c.m.Count("cuMemMap"); c.m.Count("cuMemMap") == before; {
			took = since(func() { c.alloc(s, 512*kib) })
		}
		return took
	})
}

func fixed(bytes int) func(int) int { return func(int) int { return bytes } }

func requestBesideLive(c *curve, n int) time.Duration {
	s := c.stream()
	for range n {
		c.alloc(s, 512)
	}
	return c.requests(s, fixed(512))
}

func requestBesideHoles(c *curve, n int) time.Duration {
	s := c.stream()
	size := func(i int) int { return 512*kib + i%1000*4*kib }
	c.holes(s, n, size)
	return c.requests(s, size)
}

func missBesideHoles(c *curve, n int) time.Duration {
	c.holes(c.stream(), n, fixed(512*kib))
	return c.misses(c.stream())
}

func missBesideWaiting(c *curve, n int) time.Duration {
	a, other := c.stream(), c.stream()
	for range n {
		c.alloc(a, 512*kib)
	}
	c.m.Hold(other.Handle())
	defer c.m.Release(other.Handle())
	must(c.b, other.Memset(c.live[0].Ptr(), 1, 10))
	for _, blk := range c.live {
		must(c.b, c.p.Free(blk, other))
	}
	c.live = nil
	return c.misses(a)
}

func missBesideStreams(c *curve, n int) time.Duration {
	for range n {
		c.alloc(c.stream(), 512)
	}
	return c.misses(c.stream())
}

func firstBesideStreams(c *curve, n int) time.Duration {
	for range n {
		c.alloc(c.stream(), 512)
	}
	return median(func() time.Duration {
		s := c.stream()
		return since(func() { c.alloc(s, 512) })
	})
}

// graphs are n graphs that live until the benchmark ends. The time is that of the
// last capture.
func (c *curve) graphs(n int) (took time.Duration) {
	s := c.stream()
	for range n {
		start := time.Now()
		g, _, err := c.p.Capture(s, pool.CaptureOptions{}, func() error {
			blk, err := c.p.Alloc(pool.Request{Bytes: 512, Stream: s})
			if err == nil {
				err = c.p.Free(blk)
			}
			return err
		})
		took = time.Since(start)
		must(c.b, err)
		c.b.Cleanup(func() { must(c.b, g.Close()) })
	}
	return took
}

func missBesideGraphs(c *curve, n int) time.Duration {
	c.graphs(n)
	return c.misses(c.stream())
}

func captureBesideGraphs(c *curve, n int) time.Duration {
	c.graphs(n)
	return median(func() time.Duration { return c.graphs(1) })
}

func nodeBesideNodes(c *curve, n int) (took time.Duration) {
	s := c.stream()
	alloc := func() {
		_, err := c.p.Alloc(pool.Request{Bytes: 512, Stream: s})
		must(c.b, err)
	}
	g, _, err := c.p.Capture(s, pool.CaptureOptions{Nodes: true}, func() error {
		for range n {
			alloc()
		}
		took = median(func() time.Duration { return since(alloc) })
		return nil
	})
	must(c.b, err)
	c.b.Cleanup(func() { must(c.b, g.Close()) })
	return took
}

func refusalBesideLive(c *curve, n int) time.Duration {
	s := c.stream()
	var tags [64]pool.Tag
	for i := range tags {
		tags[i] = pool.NewTag(fmt.Sprint("tag ", i))
	}
	for i := range n {
		blk, err := c.p.Alloc(pool.Request{Bytes: 512, Stream: s, Tag: tags[i%len(tags)]})
		must(c.b, err)
		c.live = append(c.live, blk)
	}
	must(c.b, c.p.SetLimit(2*mib))
	return median(func() time.Duration {
		return since(func() {
			_, err := c.p.Alloc(pool.Request{Bytes: 8 * mib, Stream: s})
			require.ErrorIs(c.b, err, cuda.ErrBudget)
		})
	})
}

// trim is the time of Trim(0) for each of n, when everything is free.
func (c *curve) trim(s *cuda.Stream, n int) time.Duration {
	c.freeAll()
	must(c.b, s.Synchronize())
	var took time.Duration
	for c.p.Stats().Reserved > 0 {
		start := time.Now()
		_, err := c.p.Trim(0)
		took += time.Since(start)
		must(c.b, err)
	}
	return took / time.Duration(n)
}

func trimOfChunks(c *curve, n int) time.Duration {
	s := c.stream()
	for range n {
		c.alloc(s, 64*mib)
	}
	return c.trim(s, n)
}

func trimOfSlabs(c *curve, n int) time.Duration {
	s := c.stream()
	for range 8 * n {
		c.alloc(s, 256*kib)
	}
	return c.trim(s, n)
}
