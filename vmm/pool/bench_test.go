package pool_test

import (
	"fmt"
	"math/rand/v2"
	"runtime"
	"sync"
	"testing"
	"time"

	"github.com/cuvmm/cuvmm/cuda"
	"github.com/cuvmm/cuvmm/internal/test/gputest"
	"github.com/cuvmm/cuvmm/vmm/pool"
	"github.com/stretchr/testify/require"
)

// each runs a benchmark on the device of each driver.
func each(b *testing.B, bench func(b *testing.B, d *cuda.Device)) {
	b.Run("software", func(b *testing.B) {
		_, d := open(b)
		bench(b, d)
	})
	b.Run("real", func(b *testing.B) { bench(b, gputest.RealWith(b, cuda.Options{NamedStreamsOnly: true})) })
}

func benchPool(b *testing.B, d *cuda.Device, o pool.Options) *pool.Pool {
	p, err := pool.New(d, o)
	must(b, err)
	b.Cleanup(func() { must(b, p.Close()) })
	return p
}

func must(tb testing.TB, err error) {
	if err != nil {
		tb.Helper()
		tb.Fatal(err)
	}
}

// cycle allocates and frees.
func cycle(tb testing.TB, p *pool.Pool, r pool.Request) {
	blk, err := p.Alloc(r)
	if err == nil {
		err = p.Free(blk)
	}
	if err != nil {
		tb.Fatal(err)
	}
}

// BenchmarkWarm allocates and frees what the pool has. Promised: at most 150 ns
// on a stream that only this library can reach, 300 ns on a borrowed one, and no
// Go allocation.
func BenchmarkWarm(b *testing.B) {
	each(b, func(b *testing.B, d *cuda.Device) {
		own := stream(b, d)
		given := stream(b, d)
		borrowed, err := d.BorrowStream(given.Handle())
		must(b, err)
		b.Cleanup(func() { must(b, borrowed.Close()) })
		for _, s := range []struct {
			name   string
			stream *cuda.Stream
		}{{"own", own}, {"borrowed", borrowed}} {
			for _, bytes := range []int{512, 100 * kib, 3 * mib, 64 * mib} {
				b.Run(fmt.Sprintf("%s/%dKiB", s.name, bytes/kib), func(b *testing.B) {
					p := benchPool(b, d, pool.Options{})
					r := pool.Request{Bytes: bytes, Stream: s.stream}
					cycle(b, p, r)
					b.ReportAllocs()
					for b.Loop() {
						cycle(b, p, r)
					}
				})
			}
		}
	})
}

// BenchmarkScaling is the total of goroutines on streams of their own, against
// that of one. Promised: at least as much.
func BenchmarkScaling(b *testing.B) {
	each(b, func(b *testing.B, d *cuda.Device) {
		for _, bytes := range []int{512, 3 * mib} {
			var alone float64
			for _, n := range []int{1, 8} {
				b.Run(fmt.Sprintf("%dKiB/%d", bytes/kib, n), func(b *testing.B) {
					p := benchPool(b, d, pool.Options{})
					var rs []pool.Request
					for range n {
						rs = append(rs, pool.Request{Bytes: bytes, Stream: stream(b, d)})
						cycle(b, p, rs[len(rs)-1])
					}
					const loops = 200_000
					var best float64
					for b.Loop() {
						var wg sync.WaitGroup
						start := time.Now()
						for _, r := range rs {
							wg.Go(func() {
								for range loops {
									cycle(b, p, r)
								}
							})
						}
						wg.Wait()
						best = max(best, float64(n*loops)/time.Since(start).Seconds())
					}
					b.ReportMetric(0, "ns/op")
					b.ReportMetric(best/1e6, "Mcycles/s")
					b.ReportMetric(float64(runtime.GOMAXPROCS(0)), "threads")
					if n == 1 {
						alone = best
					} else {
						b.ReportMetric(best/alone, "of-one")
					}
				})
			}
		}
	})
}

// BenchmarkLiveBlocks allocates and frees beside many live blocks. Promised: with
// a million at most 2 times the cost with a thousand, last in first out, and at
// most 4 times at random.
func BenchmarkLiveBlocks(b *testing.B) {
	each(b, func(b *testing.B, d *cuda.Device) {
		for _, order := range []string{"lifo", "random"} {
			var few float64
			for _, n := range []int{1_000, 1_000_000} {
				b.Run(fmt.Sprintf("%s/%d", order, n), func(b *testing.B) {
					p := benchPool(b, d, pool.Options{})
					r := pool.Request{Bytes: 512, Stream: stream(b, d)}
					live := make([]pool.Block, n)
					var err error
					for i := range live {
						if live[i], err = p.Alloc(r); err != nil {
							b.Fatal(err)
						}
					}
					// The list that the benchmark keeps is walked in order, the blocks in
					// it are at random: what is measured is the pool's memory, not the
					// caller's.
					rand.New(rand.NewPCG(1, 2)).Shuffle(n, func(i, j int) { live[i], live[j] = live[j], live[i] })
					k := 0
					start := time.Now()
					for b.Loop() {
						if order == "lifo" {
							cycle(b, p, r)
							continue
						}
						if err := p.Free(live[k]); err != nil {
							b.Fatal(err)
						}
						if live[k], err = p.Alloc(r); err != nil {
							b.Fatal(err)
						}
						if k++; k == n {
							k = 0
						}
					}
					each := float64(time.Since(start).Nanoseconds()) / float64(b.N)
					if n == 1_000 {
						few = each
					} else {
						b.ReportMetric(each/few, "of-few")
					}
					for _, blk := range live {
						require.NoError(b, p.Free(blk))
					}
				})
			}
		}
	})
}
