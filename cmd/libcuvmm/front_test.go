//go:build linux && cgo && (amd64 || arm64) && !cuvmm_nocgo

package main

import (
	"context"
	"math/rand/v2"
	"os/exec"
	"path/filepath"
	"sync"
	"testing"

	"github.com/cuvmm/cuvmm/cuda"
	"github.com/cuvmm/cuvmm/cuda/sim"
	"github.com/cuvmm/cuvmm/internal/core"
	"github.com/cuvmm/cuvmm/internal/driver"
	"github.com/cuvmm/cuvmm/internal/test/gputest"
	"github.com/cuvmm/cuvmm/internal/test/needs"
	"github.com/cuvmm/cuvmm/vmm"
	"github.com/cuvmm/cuvmm/vmm/pool"
	"github.com/stretchr/testify/require"
)

// The C front and its cache, on a pool that refuses every wrong free, in several threads under
// the compiler's sanitizers: testdata/front/front_test.c.
func TestTheFrontUnderSanitizers(t *testing.T) {
	gcc := needs.Program(t, "gcc")
	needs.File(t, "front.c")
	for _, sanitizers := range []string{"address,undefined", "thread"} {
		t.Run(sanitizers, func(t *testing.T) {
			t.Parallel()
			program := filepath.Join(t.TempDir(), "front_test")
			build := exec.Command(gcc, "-std=gnu11", "-g", "-O1", "-Wall", "-Wextra", "-Werror", "-Wno-unused-parameter", "-fsanitize="+sanitizers,
				"-fno-sanitize-recover=all", "-I", "testdata/front", "-I", ".", "-o", program, "testdata/front/front_test.c", "front.c", "-lpthread")
			out, err := build.CombinedOutput()
			require.NoError(t, err, "%s", out)
			out, err = exec.Command(program, "1", "2").CombinedOutput()
			require.NoError(t, err, "%s", out)
			t.Logf("%s", out)
		})
	}
}

// world is a pool of the library on a test's device, with streams and blocks.
type world struct {
	t       *testing.T
	d       *cuda.Device
	handle  uint64
	e       *entry
	streams []*cuda.Stream
}

func newWorld(t *testing.T, d *cuda.Device, streams int) *world {
	t.Helper()
	w := &world{t: t, d: d}
	before := sys
	sys = d.System()
	h, err := openPool(d.Ordinal(), 0, "")
	require.NoError(t, err)
	w.handle = h
	w.e, err = poolOf(h)
	require.NoError(t, err)
	for range streams {
		s, err := d.NewStream(cuda.StreamOptions{})
		require.NoError(t, err)
		w.streams = append(w.streams, s)
	}
	t.Cleanup(func() {
		defer func() { sys = before }()
		require.NoError(t, w.e.pool.Check())
		require.NoError(t, closePool(h))
		for _, s := range w.streams {
			require.NoError(t, s.Close())
		}
	})
	return w
}

// block is a live block as its user knows it.
type block struct {
	ptr    uintptr
	bytes  int
	stream int
}

// alloc requests a block and writes to it.
func (w *world) alloc(bytes, stream int) block {
	p, status := cAlloc(w.handle, bytes, w.streams[stream].Handle())
	require.EqualValues(w.t, cOK, status)
	b := block{p, bytes, stream}
	w.write(b, stream)
	return b
}

// write puts work on a stream: two streams that had the memory of one block unordered would
// race.
func (w *world) write(b block, stream int) {
	if b.bytes > 0 {
		require.NoError(w.t, w.streams[stream].Memset(cuda.Ptr(b.ptr), 1, b.bytes))
	}
}

func (w *world) free(b block) { require.EqualValues(w.t, cOK, cFree(w.handle, b.ptr)) }

// lend writes to a block on another stream, behind what the others did, and says so to the pool.
func (w *world) lend(b block, to int) {
	for _, s := range w.streams {
		e, err := w.d.NewEvent(cuda.EventOptions{})
		require.NoError(w.t, err)
		require.NoError(w.t, e.Record(s))
		require.NoError(w.t, w.streams[to].Wait(e))
		require.NoError(w.t, e.Close())
	}
	w.write(b, to)
	require.EqualValues(w.t, cOK, cUse(w.handle, b.ptr, w.streams[to].Handle()))
}

func sizeOf(r *rand.Rand) int {
	switch r.IntN(10) {
	case 0:
		return r.IntN(4 << 20)
	case 1, 2:
		return r.IntN(600 << 10)
	default:
		return r.IntN(20 << 10)
	}
}

// Random requests of one thread have the outcome of the same requests to a pool without a
// cache: the same counts after each, and a snapshot with the same blocks; and the cache makes
// the pool hold no more than the memory of a slab for each class.
func TestTheCacheShowsInNothing(t *testing.T) {
	gputest.Each(t, func(t *testing.T, d *cuda.Device) {
		w := newWorld(t, d, 3)
		plain, err := pool.New(d, pool.Options{Statistics: true})
		require.NoError(t, err)
		r := rand.New(rand.NewPCG(1, 2))
		var live []block
		var twins []pool.Block
		for i := range 6000 {
			switch k := r.IntN(len(live) + 1); {
			case len(live) > 0 && r.IntN(100) < 45+len(live)/10:
				w.free(live[k%len(live)])
				require.NoError(t, plain.Free(twins[k%len(live)]))
				last := len(live) - 1
				live[k%len(live)], twins[k%len(live)] = live[last], twins[last]
				live, twins = live[:last], twins[:last]
			case len(live) > 0 && r.IntN(30) == 0:
				w.lend(live[k%len(live)], r.IntN(3))
			default:
				b := w.alloc(sizeOf(r), r.IntN(3))
				twin, err := plain.Alloc(pool.Request{Bytes: b.bytes, Stream: w.streams[b.stream]})
				require.NoError(t, err)
				live, twins = append(live, b), append(twins, twin)
			}
			if r.IntN(100) == 0 {
				w.e.pool.ResetPeaks()
				plain.ResetPeaks()
			}
			got, want := w.e.pool.Stats(), plain.Stats()
			require.Equal(t, [...]int{want.Requested, want.PeakRequested, want.Blocks, want.PeakBlocks, want.Allocs, want.Frees, want.AllocatedBytes},
				[...]int{got.Requested, got.PeakRequested, got.Blocks, got.PeakBlocks, got.Allocs, got.Frees, got.AllocatedBytes})
			require.LessOrEqual(t, got.Reserved, want.Reserved+(32+40*2)<<20)
			if i%500 == 0 {
				snapshot := w.e.pool.Snapshot()
				require.NoError(t, w.e.pool.Check())
				require.Equal(t, blocksIn(plain.Snapshot()), blocksIn(snapshot))
				requested := 0
				for _, s := range snapshot.Streams {
					requested += s.Requested
				}
				require.Equal(t, want.Requested, requested)
			}
		}
		for i, b := range live {
			w.free(b)
			require.NoError(t, plain.Free(twins[i]))
		}
		w.free(w.alloc(5000, 0)) // gets what the cache may not have had
		before := centries()
		for range 100 {
			w.free(w.alloc(5000, 0))
		}
		if _, direct := core.SystemOf(d).Drv.(driver.Direct); direct {
			require.Equal(t, before, centries(), "the steady state does not enter Go")
		}
		require.NoError(t, w.streams[0].Synchronize())
		require.NoError(t, plain.Close())
		_, err = w.e.pool.Trim(0)
		require.NoError(t, err)
	})
}

// blocksIn counts a snapshot's live blocks by their requested size.
func blocksIn(s pool.Snapshot) map[int]int {
	n := map[int]int{}
	for _, g := range s.Segments {
		for _, p := range g.Parts {
			if p.State == pool.LiveBlock {
				n[p.Requested]++
			}
		}
	}
	return n
}

// Threads with a stream each request, free, lend and pass blocks on, beside others that trim,
// and take snapshots, whose counts agree.
func TestTheCacheBesideTrimsAndSnapshots(t *testing.T) {
	gputest.Each(t, func(t *testing.T, d *cuda.Device) {
		const workers, rounds = 3, 800
		w := newWorld(t, d, workers)
		passed := make(chan block, 64)
		var all, busy sync.WaitGroup
		done := make(chan bool)
		for n := range workers {
			busy.Go(func() {
				r := rand.New(rand.NewPCG(uint64(n), 7))
				var live []block
				for i := 0; i < rounds || len(live) > 0; i++ {
					switch {
					case len(live) > 0 && (i >= rounds || r.IntN(100) < 45+len(live)/2):
						k := r.IntN(len(live))
						b := live[k]
						live[k] = live[len(live)-1]
						live = live[:len(live)-1]
						switch r.IntN(10) {
						case 0:
							w.lend(b, (n+1)%workers)
						case 1:
							select {
							case passed <- b:
								continue
							default:
							}
						}
						w.free(b)
					case r.IntN(8) == 0:
						select {
						case b := <-passed: // freed by another thread than requested it
							w.free(b)
						default:
						}
					default:
						live = append(live, w.alloc(sizeOf(r), n))
					}
				}
			})
		}
		for n := range 2 {
			all.Go(func() {
				for i := 0; ; i++ {
					select {
					case <-done:
						return
					default:
					}
					if n == 0 && i%3 == 0 {
						_, err := w.e.pool.Trim(0)
						require.NoError(t, err)
						continue
					}
					s := w.e.pool.Stats()
					require.Equal(t, s.Blocks, s.Allocs-s.Frees)
					require.LessOrEqual(t, s.Requested, s.PeakRequested)
					w.e.pool.Snapshot()
				}
			})
		}
		busy.Wait()
		close(done)
		all.Wait()
		close(passed)
		for b := range passed {
			w.free(b)
		}
		require.Zero(t, w.e.pool.Stats().Blocks)
		require.Zero(t, w.e.pool.Stats().Requested)
		require.Empty(t, blocksIn(w.e.pool.Snapshot()))
		require.NoError(t, w.e.pool.Check())
	})
}

// A stream that captures gets nothing from the cache, and what is freed meanwhile is had again
// afterwards.
func TestACapturingStreamGetsNothingCached(t *testing.T) {
	gputest.Each(t, func(t *testing.T, d *cuda.Device) {
		w := newWorld(t, d, 2)
		w.free(w.alloc(1000, 1)) // the request in the capture is no miss, before which the cache is empty
		a, b := w.alloc(1000, 0), w.alloc(1000, 0)
		w.free(a)
		g, err := w.streams[0].WithCapture(cuda.CaptureOptions{}, func() error {
			_, status := cAlloc(w.handle, 1000, w.streams[0].Handle())
			require.EqualValues(t, cCapturing, status, "as the pool refuses it")
			w.free(b)
			_, status = cAlloc(w.handle, 1000, w.streams[0].Handle())
			require.EqualValues(t, cCapturing, status)
			w.free(w.alloc(1000, 1))
			return nil
		})
		require.NoError(t, err)
		require.NoError(t, g.Close())
		var all []block
		for len(all) == 0 || all[len(all)-1].ptr != b.ptr {
			require.Less(t, len(all), 100, "the block that was freed meanwhile is served again")
			all = append(all, w.alloc(900, 0))
		}
		for _, b := range all {
			w.free(b)
		}
	})
}

// A request within the limit is served, though a cache has all of the memory.
func TestALimitCountsCachedBlocksAsFree(t *testing.T) {
	gputest.Each(t, func(t *testing.T, d *cuda.Device) {
		w := newWorld(t, d, 2)
		const limit = 64 << 20 // two chunks
		require.NoError(t, w.e.pool.SetLimit(limit))
		for _, size := range []int{100 << 10, 300 << 10, 100 << 10, 1100 << 10} {
			for stream := range 2 {
				var live []block
				for {
					p, status := cAlloc(w.handle, size, w.streams[stream].Handle())
					if status != cOK {
						require.EqualValues(t, cOutOfMemory, status)
						break
					}
					live = append(live, block{p, size, stream})
				}
				require.Greater(t, len(live)*size, limit/2)
				for _, b := range live {
					w.free(b)
				}
			}
		}
	})
}

// The legacy stream never captures, so nobody is asked whether it does: not even while a blocking
// stream captures, which no request for cached memory harms.
func TestTheLegacyStreamIsServedUnasked(t *testing.T) {
	gputest.Alone(t) // it uses the legacy stream
	gputest.Each(t, func(t *testing.T, d *cuda.Device) {
		w := newWorld(t, d, 0)
		blocking, err := d.NewStream(cuda.StreamOptions{Blocking: true})
		require.NoError(t, err)
		const legacy = 0
		take := func() uintptr {
			p, status := cAlloc(w.handle, 1000, legacy)
			require.EqualValues(t, cOK, status)
			return p
		}
		p := take()
		require.EqualValues(t, cOK, cFree(w.handle, p))
		g, err := blocking.WithCapture(cuda.CaptureOptions{}, func() error {
			require.Equal(t, p, take())
			require.EqualValues(t, cOK, cFree(w.handle, p))
			_, status := cAlloc(w.handle, 1<<20, legacy)
			require.EqualValues(t, cCapturing, status, "the pool refuses what is not cached")
			return nil
		})
		require.NoError(t, err)
		require.NoError(t, g.Close())
		require.NoError(t, blocking.Close())
		before := centries()
		require.EqualValues(t, cOK, cFree(w.handle, take()))
		require.Equal(t, before, centries())
	})
}

// A stream that is closed leaves nothing to a later one with its handle, and its blocks are
// freed as ever.
func TestAClosedStreamLeavesNothingInTheCache(t *testing.T) {
	gputest.Each(t, func(t *testing.T, d *cuda.Device) {
		w := newWorld(t, d, 2)
		freed, kept := w.alloc(1000, 0), w.alloc(1000, 0)
		w.free(freed)
		require.EqualValues(t, cOK, cStreamClose(w.handle, w.streams[0].Handle()))
		before := centries()
		w.free(kept)
		require.Equal(t, before+1, centries(), "the pool frees it")
		again := w.alloc(1000, 0)
		w.free(again)
		require.EqualValues(t, cInvalid, cFree(w.handle, again.ptr), "freed twice")
		require.EqualValues(t, cInvalid, cFree(w.handle, kept.ptr))
	})
}

// A pool that sleeps keeps nothing in the cache, which serves nothing from then on and warms up
// again once the pool is awake.
func TestAPoolThatSleepsServesNothingCached(t *testing.T) {
	gputest.Each(t, func(t *testing.T, d *cuda.Device) {
		w := newWorld(t, d, 1)
		kept, freed, cached := w.alloc(1000, 0), w.alloc(1000, 0), w.alloc(1000, 0)
		w.free(cached)
		require.Positive(t, w.e.cache.Bytes())
		ctx := context.Background()
		z, err := vmm.Suspend(ctx, vmm.SuspendOptions{}, w.e.pool)
		require.NoError(t, err)
		require.Zero(t, w.e.cache.Bytes(), "its blocks are free")
		w.free(freed)
		require.Zero(t, w.e.cache.Bytes())
		for _, size := range []int{1000, 1 << 20} {
			_, status := cAlloc(w.handle, size, w.streams[0].Handle())
			require.EqualValues(t, cSuspended, status)
		}
		require.NoError(t, z.Resume(ctx))
		w.free(w.alloc(1000, 0))
		full := w.e.cache.Bytes()
		require.Positive(t, full, "it is warm again")
		again := w.alloc(1000, 0)
		require.Less(t, w.e.cache.Bytes(), full, "the cache serves it")
		w.free(again)
		w.free(kept)
	})
}

// A lost device is said by the next request, whatever is cached; freeing goes on.
func TestALostDeviceServesNothingCached(t *testing.T) {
	m, sys := sim.Open(t)
	w := newWorld(t, sys.Devices()[0], 1)
	cached, live := w.alloc(1000, 0), w.alloc(1000, 0)
	w.free(cached)
	m.Inject(sim.Fault{Call: "cuStreamIsCapturing", Times: -1, Result: 719})
	_, status := cAlloc(w.handle, 1000, w.streams[0].Handle())
	require.EqualValues(t, cLost, status)
	w.free(live)
	m.ClearFaults()
}
