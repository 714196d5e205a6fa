package pool_test

import (
	"encoding/json"
	"slices"
	"sync"
	"testing"

	"github.com/cuvmm/cuvmm/cuda"
	"github.com/cuvmm/cuvmm/cuda/sim"
	"github.com/cuvmm/cuvmm/internal/test/gputest"
	"github.com/cuvmm/cuvmm/vmm/pool"
	"github.com/cuvmm/cuvmm/vmm/pool/trace"
	"github.com/stretchr/testify/require"
	"golang.org/x/sync/errgroup"
)

func TestHistory(t *testing.T) {
	gputest.Each(t, func(t *testing.T, d *cuda.Device) {
		s, other := stream(t, d), stream(t, d)
		p := newPool(t, d, pool.Options{})
		before := alloc(t, p, s, 100)
		require.Empty(t, p.History())

		p.StartHistory(pool.HistoryOptions{Stacks: true})
		a, err := p.Alloc(pool.Request{Bytes: 3 * mib, Stream: s, Tag: pool.NewTag("weights")})
		require.NoError(t, err)
		free(t, p, before)
		b := alloc(t, p, other, 0)
		free(t, p, a, other)
		h := p.History()
		require.Len(t, h, 4)
		require.Equal(t, []trace.Kind{trace.Alloc, trace.Free, trace.Alloc, trace.Free}, []trace.Kind{h[0].Op, h[1].Op, h[2].Op, h[3].Op})
		require.Equal(t, a.Ptr(), h[0].Ptr)
		require.Equal(t, 3*mib, h[0].Bytes)
		require.Equal(t, "weights", h[0].Tag.String())
		require.Equal(t, s.Handle(), h[0].Stream)
		require.Equal(t, before.Ptr(), h[1].Ptr)
		require.Equal(t, other.Handle(), h[2].Stream)
		require.Equal(t, []uintptr{other.Handle()}, h[3].Used)
		require.False(t, h[3].Time.Before(h[0].Time))
		for _, e := range h {
			require.Contains(t, e.Stack[0], "_test.go:")
		}

		// What was allocated before is left out of the trace.
		tr := h.Trace("mine")
		require.NoError(t, tr.Check())
		require.Equal(t, &trace.Trace{
			Name: "mine", Streams: 2, Tags: []string{"weights", ""},
			Ops: []trace.Op{
				{Kind: trace.Alloc, Bytes: 3 * mib},
				{Kind: trace.Alloc, ID: 1, Stream: 1, Tag: 1},
				{Kind: trace.Use, Stream: 1},
				{Kind: trace.Free},
			},
		}, tr)

		p.StartHistory(pool.HistoryOptions{Events: 3})
		require.Empty(t, p.History(), "a new one begins")
		for i := range 4 {
			free(t, p, alloc(t, p, s, 1000+i))
		}
		h = p.History()
		require.Len(t, h, 3, "the latest are kept")
		require.Equal(t, []int{1002, 1003, 1003}, []int{h[0].Bytes, h[1].Bytes, h[2].Bytes})
		require.Nil(t, h[0].Stack)

		p.StopHistory()
		free(t, p, b)
		require.Nil(t, p.History())
	})
}

// A snapshot of many blocks is read in steps, between which blocks come and go.
func TestSnapshotOfManyBlocksThatChange(t *testing.T) {
	_, sys := sim.Open(t)
	d := sys.Devices()[0]
	p := newPool(t, d, pool.Options{SmallMax: 4 << 10, Track: true})
	p.StartHistory(pool.HistoryOptions{Events: 5000, Stacks: true})
	var blocks []pool.Block
	s := stream(t, d)
	for i := range 6000 {
		size := 5 << 10 * (1 + i%3)
		if i%4 == 0 {
			size = 600
		}
		blocks = append(blocks, alloc(t, p, s, size))
	}
	require.Len(t, p.History(), 5000)
	for i := 0; i < len(blocks); i += 5 {
		free(t, p, blocks[i])
	}
	check := func(quiet bool) {
		snap := p.Snapshot()
		var at cuda.Ptr
		live, parts := 0, 0
		for _, g := range snap.Segments {
			require.GreaterOrEqual(t, g.Ptr, at, "sorted and apart")
			at = g.Ptr
			parts = max(parts, len(g.Parts))
			for _, part := range g.Parts {
				if at != part.Ptr {
					t.Fatalf("a gap between %v and %v", at, part.Ptr)
				}
				at += cuda.Ptr(part.Bytes)
				if part.State == pool.LiveBlock {
					live++
					if len(part.Stack) == 0 {
						t.Fatalf("no stack at %v", part.Ptr)
					}
				}
			}
			require.Equal(t, g.Ptr+cuda.Ptr(g.Bytes), at)
		}
		if quiet {
			require.Greater(t, parts, 2000, "one segment takes several steps")
			require.Equal(t, snap.Stats.Blocks, live)
		}
	}
	check(true)
	stop := make(chan struct{})
	var changing sync.WaitGroup
	for range 3 {
		on := stream(t, d)
		changing.Go(func() {
			var mine []pool.Block
			for i := 0; ; i++ {
				select {
				case <-stop:
					for _, b := range mine {
						free(t, p, b)
					}
					return
				default:
				}
				mine = append(mine, alloc(t, p, on, 5<<10*(1+i%700)))
				if len(mine) > 40 {
					free(t, p, mine[i%len(mine)])
					mine = slices.Delete(mine, i%len(mine), i%len(mine)+1)
				}
			}
		})
	}
	for range 10 {
		check(false)
		p.History()
	}
	for i, b := range blocks {
		if i%5 != 0 && i%7 == 0 {
			free(t, p, b)
			if i%350 == 0 {
				check(false)
			}
		}
	}
	close(stop)
	changing.Wait()
	check(false)
	for i, b := range blocks {
		if i%5 != 0 && i%7 != 0 {
			free(t, p, b)
		}
	}
	require.NoError(t, p.Check())
}

func TestSnapshot(t *testing.T) {
	gputest.Each(t, func(t *testing.T, d *cuda.Device) {
		s, other := stream(t, d), stream(t, d)
		p := newPool(t, d, pool.Options{Track: true, Statistics: true})
		require.Empty(t, p.Snapshot().Segments)
		tag := pool.NewTag("kv")
		var blocks []pool.Block
		for _, bytes := range []int{700, 800, 5 * mib, 3 * mib, 64 * mib, 1000} {
			b, err := p.Alloc(pool.Request{Bytes: bytes, Stream: s, Tag: tag})
			require.NoError(t, err)
			blocks = append(blocks, b)
		}
		blocks = append(blocks, alloc(t, p, other, 10*mib))
		free(t, p, blocks[0])
		free(t, p, blocks[2])

		snap := p.Snapshot()
		live := map[cuda.Ptr]int{}
		var mapped, requested int
		for i, g := range snap.Segments {
			if i > 0 {
				before := snap.Segments[i-1]
				require.GreaterOrEqual(t, uint64(g.Ptr), uint64(before.Ptr)+uint64(before.Bytes), "sorted and apart")
			}
			at := g.Ptr
			largest := 0
			for j, part := range g.Parts {
				require.Equal(t, at, part.Ptr, "without a gap")
				at += cuda.Ptr(part.Bytes)
				switch part.State {
				case pool.LiveBlock:
					live[part.Ptr] = part.Requested
					requested += part.Requested
					require.Contains(t, part.Stack[0], "_test.go")
				case pool.Hole:
					largest = max(largest, part.Bytes)
					require.False(t, j > 0 && g.Parts[j-1].State == pool.Hole, "holes that touch are one")
				}
			}
			require.Equal(t, g.Ptr+cuda.Ptr(g.Bytes), at)
			require.Equal(t, largest, g.Hole())
			require.Zero(t, g.Bytes%g.Chunk)
			mapped += g.Bytes
		}
		require.Equal(t, snap.Stats.Reserved, mapped)
		require.Equal(t, snap.Stats.Requested, requested)
		want := map[cuda.Ptr]int{}
		for i, b := range blocks {
			if i != 0 && i != 2 {
				want[b.Ptr()] = b.Bytes()
			}
		}
		require.Equal(t, want, live)
		require.Len(t, snap.Streams, 2)
		require.Equal(t, s.Handle(), snap.Streams[0].Stream)
		require.Equal(t, 4, snap.Streams[0].Blocks)

		var back map[string]any
		text, err := json.Marshal(snap)
		require.NoError(t, err)
		require.NoError(t, json.Unmarshal(text, &back))
		require.Contains(t, string(text), `"state":"live","requested":800,"tag":"kv"`)
		require.Len(t, back["segments"], len(snap.Segments))

		for i, b := range blocks {
			if i != 0 && i != 2 {
				free(t, p, b)
			}
		}
	})
}

// Snapshots and the history delay no request.
func TestLookingWhileOthersAllocate(t *testing.T) {
	_, d := open(t)
	p := newPool(t, d, pool.Options{Track: true})
	var g errgroup.Group
	rounds := 300
	if thorough {
		rounds = 30
	}
	var streams []*cuda.Stream
	for range 4 {
		streams = append(streams, stream(t, d))
	}
	for i, s := range streams {
		g.Go(func() error {
			for j := range rounds {
				b, err := p.Alloc(pool.Request{Bytes: 1 << (8 + j%15), Stream: s})
				if err == nil {
					err = p.Free(b, streams[(i+j)%4])
				}
				if err != nil {
					return err
				}
			}
			return nil
		})
	}
	g.Go(func() error {
		for i := range 40 {
			p.StartHistory(pool.HistoryOptions{Events: 100, Stacks: i%2 == 0})
			s := p.Snapshot()
			if err := s.History.Trace("now").Check(); err != nil {
				return err
			}
			if i%3 == 0 {
				p.StopHistory()
			}
		}
		return nil
	})
	require.NoError(t, g.Wait())
	p.StopHistory()
}
