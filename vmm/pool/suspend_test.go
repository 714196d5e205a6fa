package pool_test

import (
	"bytes"
	"context"
	"errors"
	"os"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/cuvmm/cuvmm/cuda"
	"github.com/cuvmm/cuvmm/cuda/sim"
	"github.com/cuvmm/cuvmm/internal/test/gputest"
	"github.com/cuvmm/cuvmm/vmm"
	"github.com/cuvmm/cuvmm/vmm/pool"
	"github.com/stretchr/testify/require"
)

// written is a block and what it holds.
type written struct {
	pool.Block
	data []byte
}

// write allocates a block and writes it.
func (w *world) write(s *cuda.Stream, n int, value byte) written {
	w.t.Helper()
	require.NoError(w.t, w.alloc(s, n))
	b := w.live[len(w.live)-1]
	require.NoError(w.t, s.Memset(b.Ptr(), value, n))
	return written{b, bytes.Repeat([]byte{value}, n)}
}

// holds compares blocks with what was written.
func (w *world) holds(blocks ...written) {
	w.t.Helper()
	for _, b := range blocks {
		got, err := w.m.Bytes(b.Ptr(), b.Bytes())
		require.NoError(w.t, err)
		require.True(w.t, bytes.Equal(b.data, got), "the bytes of the block at %v", b.Ptr())
	}
}

func (w *world) suspend(o vmm.SuspendOptions) *vmm.Suspension {
	w.t.Helper()
	s, err := vmm.Suspend(context.Background(), o, w.p)
	require.NoError(w.t, err)
	require.NoError(w.t, s.Released().Wait(context.Background()))
	return s
}

func (w *world) resume(s *vmm.Suspension) {
	w.t.Helper()
	require.NoError(w.t, s.Resume(context.Background()))
}

// release frees a block that the world counts as live.
func (w *world) release(b pool.Block, streams ...*cuda.Stream) {
	w.t.Helper()
	require.NoError(w.t, w.p.Free(b, streams...))
	w.live = slices.DeleteFunc(w.live, func(l pool.Block) bool { return l == b })
}

func TestSuspendKeepsTheBytesOfLiveBlocksAlone(t *testing.T) {
	w := newWorld(t, scenario{})
	small := w.write(w.s, 700, 1)
	large := w.write(w.s, 5*kib64, 2)
	other := w.write(w.other, 3*kib64, 3)
	gone := w.write(w.s, 8*kib64, 4)
	w.release(gone.Block)
	before := w.p.Stats()

	preview, err := vmm.Preview(vmm.SuspendOptions{}, w.p)
	require.NoError(t, err)
	z := w.suspend(vmm.SuspendOptions{})
	require.Equal(t, w.base, w.free(), "all memory is back")
	r := z.Report()
	require.Equal(t, before.Reserved, r.Given)
	require.Zero(t, r.Held)
	require.Equal(t, preview.Given, r.Given)
	require.Equal(t, preview.Host, r.Host)
	require.Less(t, r.Host, 9*kib64, "free memory is not kept")
	require.GreaterOrEqual(t, r.Host, 700+8*kib64)
	st := w.p.Stats()
	require.Equal(t, before.Reserved, st.Suspended)
	require.Equal(t, before.Requested, st.Requested)
	require.NoError(t, w.p.Check())

	w.resume(z)
	w.holds(small, large, other)
	require.Zero(t, w.p.Stats().Suspended)
	require.Less(t, w.p.Stats().Reserved, before.Reserved, "free chunks do not come back")
	w.sane("resumed")
	w.goOn("a suspension")
	w.end("a suspension")
}

// Blocks come back with their bytes, at their addresses, and can be used at once.
func TestAPoolSleepsOnADevice(t *testing.T) {
	gputest.Each(t, func(t *testing.T, d *cuda.Device) {
		s := stream(t, d)
		p := newPool(t, d, pool.Options{})
		var blocks []written
		for i := range 24 {
			b := alloc(t, p, s, []int{300, 100 * kib, 3 * mib}[i%3])
			require.NoError(t, s.Memset(b.Ptr(), byte(i+1), b.Bytes()))
			blocks = append(blocks, written{b, bytes.Repeat([]byte{byte(i + 1)}, b.Bytes())})
		}
		for i := 23; i >= 0; i -= 2 {
			free(t, p, blocks[i].Block)
			blocks = slices.Delete(blocks, i, i+1)
		}
		for range 2 { // the second time with memory that is pinned already
			z, err := vmm.Suspend(context.Background(), vmm.SuspendOptions{}, p)
			require.NoError(t, err)
			require.Equal(t, p.Stats().Reserved, p.Stats().Suspended)
			_, err = p.Alloc(pool.Request{Bytes: 100, Stream: s})
			require.ErrorIs(t, err, cuda.ErrSuspended)
			require.NoError(t, z.Resume(context.Background()))
			require.NoError(t, p.Check())
			for _, b := range blocks {
				got := make([]byte, b.Bytes())
				require.NoError(t, s.Download(got, b.Ptr()))
				require.True(t, bytes.Equal(b.data, got), "the bytes of the block at %v", b.Ptr())
			}
		}
		free(t, p, alloc(t, p, s, 8*mib))
		for _, b := range blocks {
			free(t, p, b.Block)
		}
	})
}

// A chunk that moved is mapped at its old place, too, and is free only when it is unmapped there.
func TestSuspendUnmapsOldPlacesFirst(t *testing.T) {
	t.Cleanup(pool.SetUpkeep(testTimeout))
	w := newWorld(t, scenario{})
	w.fill(w.s, 24, 2*kib64) // holes
	moved := w.write(w.s, 12*kib64, 7)
	require.Positive(t, w.p.Deferred())
	w.m.Hold(w.s.Handle()) // the GPU has not passed the old places
	require.NoError(t, w.s.Memset(moved.Ptr(), 8, 10))
	copy(moved.data, bytes.Repeat([]byte{8}, 10))
	z, err := vmm.SuspendAfter(vmm.SuspendOptions{}, []*cuda.Stream{w.other}, w.p)
	require.NoError(t, err, "which waits for nothing")
	require.ErrorIs(t, w.alloc(w.s, 10), cuda.ErrSuspended)
	w.m.Release(w.s.Handle())
	require.NoError(t, z.Released().Wait(context.Background()))
	require.Zero(t, w.p.Deferred())
	require.Equal(t, w.base, w.free(), "all memory is back")
	w.resume(z)
	w.holds(moved)
	w.goOn("a suspension")
	w.end("a suspension")
}

// asleep are the rows of the table in docs/suspend.md that says what a pool does while it sleeps.
var asleep = []struct {
	what string
	test func(w *world)
}{
	{"Alloc, Prepare", func(w *world) {
		block := w.write(w.s, 5*kib64, 1)
		z := w.suspend(vmm.SuspendOptions{})
		fresh, err := w.d.NewStream(cuda.StreamOptions{})
		require.NoError(w.t, err)
		w.ends = append(w.ends, fresh.Close)
		for _, s := range []*cuda.Stream{w.s, w.other, fresh} {
			for _, n := range []int{0, 100, kib64, 5 * kib64} {
				err := w.alloc(s, n)
				require.ErrorIs(w.t, err, cuda.ErrSuspended)
				require.ErrorContains(w.t, err, "pool")
				require.ErrorContains(w.t, err, "Resume")
			}
		}
		_, err = w.p.Prepare(w.s, pool.Workspace{Name: "a", Bytes: 100})
		require.ErrorIs(w.t, err, cuda.ErrSuspended)
		w.resume(z)
		w.holds(block)
		for _, s := range []*cuda.Stream{w.s, w.other, fresh} {
			require.NoError(w.t, w.alloc(s, 100))
		}
	}},
	{"Free, FreePtr", func(w *world) {
		var blocks []written
		for i, n := range []int{100, 200, 3 * kib64, 4 * kib64, 5 * kib64} {
			blocks = append(blocks, w.write(w.s, n, byte(i+1)))
		}
		z := w.suspend(vmm.SuspendOptions{})
		reserved := w.p.Stats().Reserved
		w.release(blocks[0].Block)
		w.release(blocks[2].Block, w.other) // of which the other stream has used nothing since
		w.release(blocks[3].Block)
		require.ErrorIs(w.t, w.p.Free(blocks[3].Block), cuda.ErrClosed)
		require.Equal(w.t, w.base, w.free())
		w.resume(z)
		w.holds(blocks[1], blocks[4])
		require.Less(w.t, w.p.Stats().Reserved, reserved, "what was free by then did not come back")
	}},
	{"waiting frees", func(w *world) {
		kept, freed := w.write(w.s, 3*kib64, 1), w.write(w.s, 2*kib64, 2)
		require.NoError(w.t, w.alloc(w.s, kib64))
		require.NoError(w.t, w.s.Synchronize())
		w.m.Hold(w.other.Handle())
		require.NoError(w.t, w.other.Memset(freed.Ptr(), 3, 1))
		w.release(freed.Block, w.other)
		require.Equal(w.t, 1, w.p.Stats().Waiting)
		z, err := vmm.SuspendAfter(vmm.SuspendOptions{}, []*cuda.Stream{w.s}, w.p)
		require.NoError(w.t, err)
		w.release(w.live[1], w.other) // while it is on its way
		require.Equal(w.t, 2, w.p.Stats().Waiting)
		w.m.Release(w.other.Handle())
		require.NoError(w.t, z.Released().Wait(context.Background()))
		w.resume(z)
		for w.p.Ask() {
		}
		require.Zero(w.t, w.p.Stats().Waiting)
		w.holds(kept)
	}},
	{"Capture, BeginCapture", func(w *world) {
		block := w.write(w.s, 3*kib64, 1)
		graph, _, err := w.p.Capture(w.s, pool.CaptureOptions{}, func() error {
			_, err := vmm.Suspend(context.Background(), vmm.SuspendOptions{}, w.p)
			require.ErrorIs(w.t, err, cuda.ErrCapturing)
			_, err = vmm.Preview(vmm.SuspendOptions{}, w.p)
			require.ErrorIs(w.t, err, cuda.ErrCapturing)
			_, err = vmm.SuspendAfter(vmm.SuspendOptions{}, []*cuda.Stream{w.other}, w.p)
			require.ErrorIs(w.t, err, cuda.ErrCapturing)
			return w.alloc(w.s, kib64)
		})
		require.NoError(w.t, err)
		w.graphs = append(w.graphs, graph)
		z := w.suspend(vmm.SuspendOptions{})
		_, _, err = w.p.Capture(w.s, pool.CaptureOptions{}, func() error { panic("the body runs") })
		require.ErrorIs(w.t, err, cuda.ErrSuspended)
		outside, err := w.s.WithCapture(cuda.CaptureOptions{}, func() error {
			_, err := w.p.BeginCapture(w.s, pool.CaptureOptions{})
			require.ErrorIs(w.t, err, cuda.ErrSuspended)
			return nil
		})
		require.NoError(w.t, err)
		require.NoError(w.t, outside.Close())
		w.resume(z)
		w.holds(block)
	}},
	{"arenas, and the graphs that use them", func(w *world) {
		var kept, scratch pool.Block
		graph, _, err := w.p.Capture(w.s, pool.CaptureOptions{}, func() (err error) {
			if scratch, err = w.p.Alloc(pool.Request{Bytes: 5 * kib64, Stream: w.s}); err != nil {
				return err
			}
			if err := w.s.Memset(scratch.Ptr(), 9, scratch.Bytes()); err != nil {
				return err
			}
			if err := w.alloc(w.s, 3*kib64); err != nil {
				return err
			}
			kept = w.live[len(w.live)-1]
			return w.p.Free(scratch)
		})
		require.NoError(w.t, err)
		gone, _, err := w.p.Capture(w.s, pool.CaptureOptions{}, func() error {
			require.NoError(w.t, w.alloc(w.s, 4*kib64))
			b := w.live[len(w.live)-1]
			require.NoError(w.t, w.s.Memset(b.Ptr(), 1, b.Bytes()))
			w.release(b)
			return nil
		})
		require.NoError(w.t, err)
		w.graphs = append(w.graphs, graph)
		require.NoError(w.t, graph.Launch(w.s))
		require.NoError(w.t, w.s.Memset(kept.Ptr(), 4, kept.Bytes()))
		z := w.suspend(vmm.SuspendOptions{})
		require.Equal(w.t, w.base, w.free())
		require.ErrorIs(w.t, graph.Launch(w.s), cuda.ErrSuspended)
		require.NoError(w.t, gone.Close())
		require.NoError(w.t, w.sys.Drain(context.Background()))
		w.resume(z)
		w.holds(written{kept, bytes.Repeat([]byte{4}, kept.Bytes())},
			written{scratch, bytes.Repeat([]byte{9}, scratch.Bytes())}) // the graph may rely on it
		require.NoError(w.t, graph.Launch(w.s))
		require.NoError(w.t, w.s.Synchronize())
	}},
	{"workspaces", func(w *world) {
		ready, err := w.p.Prepare(w.s, pool.Workspace{Name: "a", Bytes: 3 * kib64})
		require.NoError(w.t, err)
		b, _ := ready.Get("a")
		z := w.suspend(vmm.SuspendOptions{})
		same, ok := ready.Get("a")
		require.True(w.t, ok)
		require.Equal(w.t, b, same)
		require.NoError(w.t, ready.Close())
		w.resume(z)
	}},
	{"Trim", func(w *world) {
		keep, freed := w.write(w.s, 3*kib64, 1), w.write(w.s, 5*kib64, 2)
		z := w.suspend(vmm.SuspendOptions{})
		w.release(freed.Block)
		reserved := w.p.Stats().Reserved
		n, err := w.p.Trim(0)
		require.NoError(w.t, err)
		require.Zero(w.t, n, "the driver has the memory")
		require.Less(w.t, w.p.Stats().Reserved, reserved)
		require.Equal(w.t, w.p.Stats().Reserved, w.p.Stats().Suspended)
		require.NoError(w.t, w.p.Check())
		w.resume(z)
		w.holds(keep)
	}},
	{"SetLimit", func(w *world) {
		block := w.write(w.s, 5*kib64, 1)
		z := w.suspend(vmm.SuspendOptions{})
		require.NoError(w.t, w.p.SetLimit(kib64))
		w.resume(z)
		w.holds(block)
		require.ErrorIs(w.t, w.alloc(w.s, kib64), cuda.ErrBudget)
		require.NoError(w.t, w.p.SetLimit(0))
	}},
	{"Grant", func(w *world) {
		block := w.write(w.s, 5*kib64, 1)
		z := w.suspend(vmm.SuspendOptions{})
		peer := vmm.Access{Location: w.sys.Devices()[1].Location(), Mode: vmm.ReadWrite}
		require.ErrorIs(w.t, w.p.Grant(peer), cuda.ErrSuspended)
		w.resume(z)
		require.NoError(w.t, w.p.Grant(peer))
		w.resume(w.suspend(vmm.SuspendOptions{})) // which brings the peer's access back
		far, err := w.sys.Devices()[1].NewStream(cuda.StreamOptions{})
		require.NoError(w.t, err)
		require.NoError(w.t, far.Memset(block.Ptr(), 1, 10))
		require.NoError(w.t, far.Synchronize())
		require.NoError(w.t, far.Close())
		w.holds(block)
	}},
	{"upkeep, decay, and others' lack of memory", func(w *world) {
		block, freed := w.write(w.s, 5*kib64, 1), w.write(w.s, 5*kib64, 2)
		z := w.suspend(vmm.SuspendOptions{})
		w.release(freed.Block)
		reserved := w.p.Stats().Reserved
		w.p.Tend(1 << 30)
		big, err := vmm.Create(w.d, 80*kib64, vmm.Properties{})
		require.ErrorIs(w.t, err, cuda.ErrOutOfMemory) // the pool was asked
		require.Nil(w.t, big)
		require.Equal(w.t, reserved, w.p.Stats().Reserved)
		w.resume(z)
		w.holds(block)
	}},
	{"Stats, Snapshot, Live, History, Find, Check", func(w *world) {
		w.p.StartHistory(pool.HistoryOptions{})
		block := w.write(w.s, 5*kib64, 1)
		z := w.suspend(vmm.SuspendOptions{})
		require.Equal(w.t, w.p.Stats().Reserved, w.p.Snapshot().Stats.Suspended)
		require.Len(w.t, w.p.Live(), 1)
		found, ok := w.p.Find(block.Ptr())
		require.True(w.t, ok)
		require.Equal(w.t, block.Block, found)
		require.NoError(w.t, w.p.Check())
		w.release(block.Block)
		require.Len(w.t, w.p.History(), 2)
		require.NoError(w.t, w.p.Check())
		w.resume(z)
	}},
	{"Close", func(w *world) {
		block := w.write(w.s, 5*kib64, 1)
		z := w.suspend(vmm.SuspendOptions{})
		require.ErrorIs(w.t, w.p.Close(), cuda.ErrInUse)
		require.ErrorIs(w.t, w.alloc(w.s, 10), cuda.ErrSuspended, "it sleeps on")
		w.release(block.Block)
		require.NoError(w.t, w.p.Close())
		require.NoError(w.t, w.p.Check())
		require.Zero(w.t, w.p.Stats().Reserved)
		require.NoError(w.t, z.Resume(context.Background()), "nothing of it is left")
		require.ErrorIs(w.t, z.Resume(context.Background(), w.p), cuda.ErrClosed)
	}},
	{"Suspend", func(w *world) {
		block := w.write(w.s, 5*kib64, 1)
		z := w.suspend(vmm.SuspendOptions{})
		_, err := vmm.Suspend(context.Background(), vmm.SuspendOptions{}, w.p)
		require.ErrorIs(w.t, err, cuda.ErrSuspended)
		_, err = vmm.SuspendAfter(vmm.SuspendOptions{}, []*cuda.Stream{w.s}, w.p)
		require.ErrorIs(w.t, err, cuda.ErrSuspended)
		w.resume(z)
		w.holds(block)
	}},
	{"work on addresses of the pool", func(w *world) {
		block := w.write(w.s, 5*kib64, 1)
		z := w.suspend(vmm.SuspendOptions{})
		require.ErrorIs(w.t, w.s.Memset(block.Ptr(), 1, 1), cuda.ErrSuspended)
		w.resume(z)
		require.NoError(w.t, w.s.Memset(block.Ptr(), 1, 1))
		w.holds(block)
	}},
	{"nodes of graphs", func(w *world) {
		var node pool.Block
		graph, _, err := w.p.Capture(w.s, pool.CaptureOptions{Nodes: true}, func() (err error) {
			if node, err = w.p.Alloc(pool.Request{Bytes: kib64, Stream: w.s}); err != nil {
				return err
			}
			return w.s.Memset(node.Ptr(), 1, kib64)
		})
		require.NoError(w.t, err)
		block := w.write(w.s, 2*kib64, 1)
		z := w.suspend(vmm.SuspendOptions{})
		require.NoError(w.t, graph.Launch(w.s), "its memory is the driver's")
		require.NoError(w.t, w.s.Synchronize())
		w.resume(z)
		w.holds(block)
		require.NoError(w.t, graph.Close())
	}},
}

func TestWhatAPoolDoesWhileItSleeps(t *testing.T) {
	for _, row := range asleep {
		t.Run(row.what, func(t *testing.T) {
			w := newWorld(t, scenario{})
			row.test(w)
			require.NoError(t, w.s.Synchronize())
			if !w.closed() {
				w.sane(row.what)
				w.goOn(row.what)
			}
			w.end(row.what)
		})
	}
}

// closed reports whether the pool serves nothing any more.
func (w *world) closed() bool { return w.p.Stats().Streams == 0 }

// The table of docs/suspend.md has the rows that are tested, and no others.
func TestTheTableOfASleepingPoolIsComplete(t *testing.T) {
	if _, err := os.Stat("suspend_test.go"); err != nil {
		t.Skip("the repository's sources are not here: this test binary runs away from its checkout")
	}
	text, err := os.ReadFile("../../docs/suspend.md")
	require.NoError(t, err)
	_, rest, ok := strings.Cut(string(text), "| of a pool | while it sleeps |\n| --- | --- |\n")
	require.True(t, ok, "docs/suspend.md has no table of a pool")
	table, _, _ := strings.Cut(rest, "\n\n")
	var documented, tested []string
	for _, line := range strings.Split(table, "\n") {
		documented = append(documented, strings.ReplaceAll(strings.TrimSpace(strings.Split(line, "|")[1]), "`", ""))
	}
	for _, row := range asleep {
		tested = append(tested, row.what)
	}
	require.ElementsMatch(t, documented, tested)
}

// Scratch memory under the addresses is in no one's way: chunks can leave the lists above it.
func TestAGuardLiesUnderASleepingPool(t *testing.T) {
	w := newWorld(t, scenario{})
	kept, freed := w.write(w.s, 35*kib64, 1), w.write(w.s, 34*kib64, 2)
	z := w.suspend(vmm.SuspendOptions{Guard: true})
	require.Less(t, w.free(), w.base, "the guard")
	require.NoError(t, w.p.Check())
	w.release(freed.Block)
	_, err := w.p.Trim(0)
	require.NoError(t, err)
	require.NoError(t, w.p.Check())
	w.resume(z)
	w.holds(kept)
	w.sane("resumed")
	w.goOn("a guard")
	w.end("a guard")
}

// Memory that comes back is other memory, which holds the bytes of blocks that changed owners.
func TestChunksArePrivateAgainAfterResume(t *testing.T) {
	w := newWorld(t, scenario{})
	block := w.write(w.s, 5*kib64, 1)
	before := map[uint64]bool{}
	for _, h := range w.p.Handles() {
		before[h.ID()] = true
	}
	w.resume(w.suspend(vmm.SuspendOptions{}))
	require.Len(t, w.p.Handles(), len(before))
	for _, h := range w.p.Handles() {
		require.NotContains(t, before, h.ID())
		require.True(t, h.Recycle())
		_, err := h.Export("test")
		require.Error(t, err, "an export would show what earlier owners left")
	}
	w.holds(block)
	w.end("")
}

func isAny(err error, kinds ...error) bool {
	return slices.ContainsFunc(kinds, func(k error) bool { return errors.Is(err, k) })
}

// A pool sleeps with others in one Suspension, and each wakes by itself.
func TestPoolsOfATagSleepTogetherAndWakeOneByOne(t *testing.T) {
	_, d := open(t, sim.Options{Devices: []sim.DeviceOptions{{Granularity: kib64, Memory: 80 * kib64}}})
	s := stream(t, d)
	ctx := context.Background()
	weights, err := vmm.NewBuffer(d, vmm.BufferOptions{Reserve: 8 * kib64, Chunks: vmm.FixedChunks(kib64), Tag: "engine"})
	require.NoError(t, err)
	require.NoError(t, weights.Grow(4*kib64))
	cache := newPool(t, d, pool.Options{Chunk: kib64, Name: "kv", Tag: "engine"})
	alone := newPool(t, d, pool.Options{Chunk: kib64})
	a, b := alloc(t, cache, s, 5*kib64), alloc(t, alone, s, 5*kib64)
	tagged := vmm.Tagged(d.System(), "engine")
	require.ElementsMatch(t, []any{weights.Ptr(), cache}, []any{tagged[0].(*vmm.Buffer).Ptr(), tagged[1]})
	z, err := vmm.Suspend(ctx, vmm.SuspendOptions{}, tagged...)
	require.NoError(t, err)
	require.Equal(t, 10, alloc(t, alone, s, 10).Bytes(), "it has another tag")
	_, err = cache.Alloc(pool.Request{Bytes: 10, Stream: s})
	require.ErrorContains(t, err, `the pool "kv" tagged "engine" was suspended at`)
	require.NoError(t, z.Resume(ctx, tagged[0]))
	require.NoError(t, weights.Grow(kib64))
	_, err = cache.Alloc(pool.Request{Bytes: 10, Stream: s})
	require.ErrorIs(t, err, cuda.ErrSuspended)
	require.NoError(t, z.Resume(ctx))
	free(t, cache, a)
	free(t, alone, b)
	for _, l := range alone.Live() {
		free(t, alone, l.Block)
	}
	require.NoError(t, weights.Close())
}

// A source writes live blocks, and knows them by their addresses.
func TestASourceFillsLiveBlocks(t *testing.T) {
	w := newWorld(t, scenario{})
	a, b := w.write(w.s, 5*kib64, 1), w.write(w.s, 300, 2)
	w.release(w.write(w.s, 4*kib64, 3).Block)
	fill := source(func(s *cuda.Stream, m vmm.Memory, at cuda.Ptr, n int) error {
		require.Same(t, w.p, m)
		for _, l := range []written{a, b} {
			if at <= l.Ptr() && l.Ptr()+cuda.Ptr(l.Bytes()) <= at+cuda.Ptr(n) {
				if err := s.Memset(l.Ptr(), l.data[0], l.Bytes()); err != nil {
					return err
				}
			}
		}
		require.Less(t, n, 7*kib64, "free memory is not filled")
		return nil
	})
	z := w.suspend(vmm.SuspendOptions{Source: fill})
	require.Zero(t, z.Report().Host)
	w.resume(z)
	w.holds(a, b)
	_, err := vmm.Suspend(context.Background(), vmm.SuspendOptions{Source: vmm.SourceAt(strings.NewReader(""))}, w.p)
	require.ErrorIs(t, err, cuda.ErrInvalidArgument)
	w.end("")
}

type source func(s *cuda.Stream, m vmm.Memory, at cuda.Ptr, n int) error

func (f source) Fill(_ context.Context, s *cuda.Stream, m vmm.Memory, at cuda.Ptr, n int) error {
	return f(s, m, at, n)
}

// A budget has the pool's room while it sleeps, and Resume is charged again.
func TestASleepingPoolLeavesItsBudgetToOthers(t *testing.T) {
	_, d := open(t, sim.Options{Devices: []sim.DeviceOptions{{Granularity: kib64, Memory: 80 * kib64}}})
	s := stream(t, d)
	ctx := context.Background()
	room := cuda.NewBudget(8*kib64, cuda.BudgetOptions{})
	first := newPool(t, d, pool.Options{Chunk: kib64, Budget: room})
	second := newPool(t, d, pool.Options{Chunk: kib64, Budget: room})
	a := alloc(t, first, s, 6*kib64)
	z, err := vmm.Suspend(ctx, vmm.SuspendOptions{}, first)
	require.NoError(t, err)
	require.Zero(t, room.Stats().Committed)
	b := alloc(t, second, s, 6*kib64)
	require.ErrorIs(t, z.Resume(ctx), cuda.ErrBudget)
	_, err = first.Alloc(pool.Request{Bytes: 10, Stream: s})
	require.ErrorIs(t, err, cuda.ErrSuspended)
	free(t, second, b)
	require.NoError(t, z.Resume(ctx))
	require.Equal(t, 6*kib64, first.Stats().Reserved)
	require.Equal(t, 8*kib64, room.Stats().Committed, "the other pool gave back what was lacking")
	free(t, first, a)
}

// Requests that run when a pool goes to sleep are served or refused, and never hold it up for long.
func TestRequestsBesideSuspensions(t *testing.T) {
	w := newWorld(t, scenario{})
	stop := make(chan struct{})
	done := make(chan struct{})
	for range 2 {
		s, err := w.d.NewStream(cuda.StreamOptions{})
		require.NoError(t, err)
		w.ends = append(w.ends, s.Close)
		go func() {
			defer func() { done <- struct{}{} }()
			var mine []pool.Block
			for i := 0; ; i++ {
				select {
				case <-stop:
					for _, b := range mine {
						if err := w.p.Free(b); err != nil {
							t.Error(err)
						}
					}
					return
				default:
				}
				b, err := w.p.Alloc(pool.Request{Bytes: []int{300, 2 * kib64, 9 * kib64}[i%3], Stream: s})
				switch {
				case err == nil:
					mine = append(mine, b)
				case !isAny(err, cuda.ErrSuspended, cuda.ErrOutOfMemory):
					t.Error(err)
				}
				if len(mine) > 3 {
					if err := w.p.Free(mine[0]); err != nil {
						t.Error(err)
					}
					mine = mine[1:]
				}
				if i%7 == 0 {
					if _, err := w.p.Trim(0); err != nil && !isAny(err, cuda.ErrSuspended) {
						t.Error(err)
					}
				}
			}
		}()
	}
	block := w.write(w.s, 3*kib64, 5)
	for range 30 {
		z := w.suspend(vmm.SuspendOptions{})
		require.Equal(t, w.base, w.free())
		w.resume(z)
	}
	close(stop)
	<-done
	<-done
	w.holds(block)
	w.sane("beside requests")
	w.end("beside requests")
}

// Close waits while the bytes of the pool move.
func TestCloseWaitsForASuspension(t *testing.T) {
	w := newWorld(t, scenario{})
	block := w.write(w.s, 3*kib64, 1)
	w.m.Hold(w.s.Handle())
	z, err := vmm.SuspendAfter(vmm.SuspendOptions{}, []*cuda.Stream{w.s}, w.p)
	require.NoError(t, err)
	w.release(block.Block)
	closed := make(chan error, 1)
	go func() { closed <- w.p.Close() }()
	select {
	case err := <-closed:
		t.Fatalf("closed in the middle of a suspension: %v", err)
	case <-time.After(20 * time.Millisecond):
	}
	w.m.Release(w.s.Handle())
	require.NoError(t, <-closed)
	require.NoError(t, z.Released().Wait(context.Background()))
	require.Equal(t, w.base, w.free())
	w.end("")
}
