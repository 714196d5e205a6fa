package pool_test

import (
	"bytes"
	"context"
	"slices"
	"testing"
	"time"

	"github.com/cuvmm/cuvmm/cuda"
	"github.com/cuvmm/cuvmm/cuda/sim"
	"github.com/cuvmm/cuvmm/vmm"
	"github.com/cuvmm/cuvmm/vmm/pool"
	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"
)

// kib64 is the granularity of the machines in these tests, so that little
// memory has many chunks.
const kib64 = 64 * kib

// model is a pool beside what is known of its blocks.
type model struct {
	rt      *rapid.T
	m       *sim.Machine
	sys     *cuda.System
	d       *cuda.Device
	p       *pool.Pool
	streams []*cuda.Stream
	held    map[*cuda.Stream]bool

	live   []live
	freed  []freed
	graphs []graph
	arena  *pool.Arena // which some of the graphs share
	// no request gets these until the running capture has ended
	postponed []span
	stale     []pool.Block
	asleep    *vmm.Suspension // nil while the pool is awake
	dropped   bool            // by that
	left      bool            // of failures, when that began: the driver had not unmapped all
	base      int             // of the device's memory, free without the pool
	total     uint64          // requested
	peak      uint64
	count     uint64
}

type live struct {
	b pool.Block
	s *cuda.Stream
	// value is in all bytes of the block; 0 if that is not known.
	value byte
}

type span struct{ from, to uint64 }

func spanOf(b pool.Block) span {
	return span{uint64(b.Ptr()), uint64(b.Ptr()) + uint64(max(1, b.Bytes()))}
}

func (s span) meets(o span) bool { return s.from < o.to && o.from < s.to }

// graph is one that keeps the addresses that its capture was served.
type graph struct {
	g      *cuda.Graph
	spans  []span
	shared bool // the arena with others: they never run together
}

// freed is a range of addresses with what must have passed before another stream has it,
// or, for the events of other streams, before any stream has it.
type freed struct {
	from, to uint64
	s        *cuda.Stream
	own      *cuda.Event
	others   []*cuda.Event
}

func newModel(rt *rapid.T) *model {
	m, err := sim.New(sim.Options{Devices: []sim.DeviceOptions{{Granularity: kib64, Memory: 64 * kib64}}, Seed: rapid.Uint64().Draw(rt, "seed")})
	require.NoError(rt, err)
	sys, err := m.Open(cuda.Options{})
	require.NoError(rt, err)
	w := &model{rt: rt, m: m, sys: sys, d: sys.Devices()[0], held: map[*cuda.Stream]bool{}}
	for range 3 {
		w.addStream()
	}
	w.p, err = pool.New(w.d, pool.Options{Statistics: true, Track: true,
		Chunk: rapid.IntRange(1, 3).Draw(rt, "chunk") * kib64,
		Wait:  rapid.SampledFrom([]time.Duration{-1, time.Microsecond}).Draw(rt, "wait"),
		Decay: rapid.SampledFrom([]time.Duration{-1, time.Millisecond}).Draw(rt, "decay"),
	})
	require.NoError(rt, err)
	w.arena, err = w.p.NewArena()
	require.NoError(rt, err)
	w.base = w.free64()
	return w
}

func (w *model) addStream() {
	s, err := w.d.NewStream(cuda.StreamOptions{})
	require.NoError(w.rt, err)
	w.streams = append(w.streams, s)
}

func (w *model) stream(name string) *cuda.Stream {
	return rapid.SampledFrom(w.streams).Draw(w.rt, name)
}

func (w *model) newEvent() *cuda.Event {
	e, err := w.d.NewEvent(cuda.EventOptions{})
	require.NoError(w.rt, err)
	return e
}

// event marks what is on the stream now.
func (w *model) event(s *cuda.Stream) *cuda.Event {
	e := w.newEvent()
	require.NoError(w.rt, e.Record(s))
	return e
}

func (w *model) done(e *cuda.Event) bool {
	done, err := e.Done()
	require.NoError(w.rt, err)
	return done
}

func (w *model) alloc() { w.allocOn(w.stream("stream")) }

func (w *model) allocOn(s *cuda.Stream) {
	bytes := rapid.OneOf(rapid.IntRange(0, 8*kib), rapid.IntRange(0, 4*kib64), rapid.IntRange(0, 16*kib64)).Draw(w.rt, "bytes")
	align := rapid.SampledFrom([]int{0, 0, 1, 4096, kib64, 2 * mib}).Draw(w.rt, "align")
	b, err := w.p.Alloc(pool.Request{Bytes: bytes, Align: align, Stream: s, Tag: pool.Tag(bytes % 2)})
	if w.asleep != nil {
		require.ErrorIs(w.rt, err, cuda.ErrSuspended)
		return
	}
	if err != nil {
		// Blocks on streams that are held, and the rests of chunks, can take all.
		require.ErrorIs(w.rt, err, cuda.ErrOutOfMemory)
		return
	}
	w.born(live{b: b, s: s}, false)
}

// born records a block that was served, in a capture of the shared arena or not.
func (w *model) born(l live, shared bool) {
	from, to := uint64(l.b.Ptr()), uint64(l.b.Ptr())+uint64(max(1, l.b.Bytes()))
	for _, o := range w.postponed {
		require.False(w.rt, o.meets(spanOf(l.b)), "%v was freed during the capture that runs", l.b)
	}
	for _, g := range w.graphs {
		if shared && g.shared {
			continue
		}
		for _, o := range g.spans {
			require.False(w.rt, o.meets(spanOf(l.b)), "%v belongs to a graph", l.b)
		}
	}
	for _, o := range w.live {
		require.False(w.rt, from < uint64(o.b.Ptr())+uint64(max(1, o.b.Bytes())) && uint64(o.b.Ptr()) < to, "%v and %v overlap", l.b, o.b)
	}
	w.freed = slices.DeleteFunc(w.freed, func(f freed) bool {
		if f.from >= to || from >= f.to {
			return false
		}
		for _, e := range f.others {
			require.True(w.rt, w.done(e), "%v was freed behind a stream that has not passed", l.b)
			require.NoError(w.rt, e.Close())
		}
		require.True(w.rt, f.s == l.s || w.done(f.own), "%v was freed on another stream, which has not passed", l.b)
		require.NoError(w.rt, f.own.Close())
		// What was freed before there and is not covered stays known.
		return true
	})
	l.value = byte(w.count%250 + 1)
	if l.b.Bytes() > 0 {
		require.NoError(w.rt, l.s.Memset(l.b.Ptr(), l.value, l.b.Bytes()))
	}
	w.live = append(w.live, l)
	w.total += uint64(l.b.Bytes())
	w.peak = max(w.peak, w.total)
	w.count++
}

func (w *model) free() {
	if len(w.live) == 0 {
		return
	}
	i := rapid.IntRange(0, len(w.live)-1).Draw(w.rt, "block")
	l := w.live[i]
	w.live = slices.Delete(w.live, i, i+1)
	var named []*cuda.Stream
	for range rapid.IntRange(0, 2).Draw(w.rt, "named") {
		named = append(named, w.stream("also"))
	}
	f := freed{from: uint64(l.b.Ptr()), to: uint64(l.b.Ptr()) + uint64(max(1, l.b.Bytes())), s: l.s, own: w.event(l.s)}
	for _, s := range named {
		if s != l.s {
			f.others = append(f.others, w.event(s))
		}
	}
	if w.asleep == nil {
		w.freed = append(w.freed, f)
	} else { // nothing has used it since the suspension waited for the GPU
		for _, e := range append(f.others, f.own) {
			require.NoError(w.rt, e.Close())
		}
	}
	if rapid.Bool().Draw(w.rt, "by address") {
		require.NoError(w.rt, w.p.FreePtr(l.b.Ptr(), named...))
	} else {
		done := make(chan error)
		go func() { done <- w.p.Free(l.b, named...) }() // from any goroutine
		require.NoError(w.rt, <-done)
	}
	w.total -= uint64(l.b.Bytes())
	w.stale = append(w.stale, l.b)
}

// capture makes a graph of work on memory of the pool, while others allocate. A
// second stream may take part.
func (w *model) capture() {
	if w.asleep != nil {
		_, _, err := w.p.Capture(w.stream("captured"), pool.CaptureOptions{}, func() error { return nil })
		require.ErrorIs(w.rt, err, cuda.ErrSuspended)
		return
	}
	s, side := w.stream("captured"), w.stream("joined")
	joins := s != side
	shared := rapid.Bool().Draw(w.rt, "shared")
	var o pool.CaptureOptions
	if shared {
		o.Arena = w.arena
	}
	var mine, outside []live
	var gone []live // freed in the capture, for their own stream; for no stream if s is nil
	var g graph
	fork, joined := w.newEvent(), w.newEvent()
	// What is freed meanwhile was used by work from before the capture.
	var before []*cuda.Event
	for range 8 {
		before = append(before, w.event(s))
	}
	part := func(name string) *cuda.Stream {
		if joins && rapid.Bool().Draw(w.rt, name) {
			return side
		}
		return s
	}
	made, st, err := w.p.Capture(s, o, func() error {
		if joins {
			require.NoError(w.rt, fork.Record(s))
			require.NoError(w.rt, side.Wait(fork))
		}
		for range rapid.IntRange(0, 8).Draw(w.rt, "steps") {
			switch rapid.IntRange(0, 3).Draw(w.rt, "step") {
			case 0, 1:
				on := part("alloc on")
				b, err := w.p.Alloc(pool.Request{Bytes: rapid.IntRange(0, 4*kib64).Draw(w.rt, "bytes"), Stream: on, Tag: 1})
				if err != nil {
					require.ErrorIs(w.rt, err, cuda.ErrOutOfMemory)
					continue
				}
				w.born(live{b: b, s: on}, shared)
				w.live = w.live[:len(w.live)-1]
				for _, o := range mine {
					require.False(w.rt, spanOf(o.b).meets(spanOf(b)))
				}
				for _, o := range gone {
					require.False(w.rt, o.s != on && spanOf(o.b).meets(spanOf(b)), "%v was freed on another stream of the capture", b)
				}
				mine = append(mine, live{b: b, s: on}) // written by launches
				g.spans = append(g.spans, spanOf(b))
			case 2:
				if len(mine) == 0 {
					continue
				}
				l := mine[0]
				mine = mine[1:]
				w.total -= uint64(l.b.Bytes())
				if joins && rapid.Bool().Draw(w.rt, "used by both") {
					require.NoError(w.rt, w.p.Free(l.b, s, side))
					l.s = nil
				} else {
					require.NoError(w.rt, w.p.Free(l.b))
				}
				gone = append(gone, l)
			case 3:
				i := slices.IndexFunc(w.live, func(l live) bool { return l.s == s })
				if i < 0 {
					continue
				}
				require.NoError(w.rt, w.p.Free(w.live[i].b))
				w.total -= uint64(w.live[i].b.Bytes())
				w.postponed = append(w.postponed, spanOf(w.live[i].b))
				outside = append(outside, w.live[i])
				w.live = slices.Delete(w.live, i, i+1)
			}
			if other := w.stream("meanwhile"); other != s && other != side {
				w.allocOn(other)
			}
			require.NoError(w.rt, w.p.Check())
		}
		if joins {
			require.NoError(w.rt, joined.Record(side))
			require.NoError(w.rt, s.Wait(joined))
		}
		return nil
	})
	require.NoError(w.rt, err)
	require.NoError(w.rt, fork.Close())
	require.NoError(w.rt, joined.Close())
	require.Equal(w.rt, len(g.spans), st.Served)
	w.postponed = nil
	for i, l := range outside {
		w.freed = append(w.freed, freed{from: spanOf(l.b).from, to: spanOf(l.b).to, s: s, own: before[i]})
	}
	for _, e := range before[len(outside):] {
		require.NoError(w.rt, e.Close())
	}
	w.live = append(w.live, mine...)
	g.g, g.shared = made, shared
	w.graphs = append(w.graphs, g)
}

func (w *model) launch() {
	if len(w.graphs) == 0 {
		return
	}
	g, on := rapid.SampledFrom(w.graphs).Draw(w.rt, "graph"), w.stream("launch")
	if g.shared {
		w.releaseAll()
	}
	if err := g.g.Launch(on); w.asleep != nil && (err != nil || len(g.spans) > 0) {
		require.ErrorIs(w.rt, err, cuda.ErrSuspended)
		return
	} else {
		require.NoError(w.rt, err)
	}
	if g.shared {
		require.NoError(w.rt, on.Synchronize())
	}
}

// closeGraph gives a graph's memory back, once its launches have passed.
func (w *model) closeGraph() {
	if len(w.graphs) == 0 {
		return
	}
	i := rapid.IntRange(0, len(w.graphs)-1).Draw(w.rt, "graph")
	w.releaseAll()
	require.NoError(w.rt, w.graphs[i].g.Close())
	w.graphs = slices.Delete(w.graphs, i, i+1)
}

func (w *model) releaseAll() {
	for s, held := range w.held {
		if held {
			w.m.Release(s.Handle())
		}
	}
	clear(w.held)
}

func (w *model) freeStale() {
	if len(w.stale) > 0 {
		require.ErrorIs(w.rt, w.p.Free(rapid.SampledFrom(w.stale).Draw(w.rt, "stale")), cuda.ErrClosed)
	}
}

func (w *model) hold() {
	s := w.stream("held")
	if w.held[s] {
		w.m.Release(s.Handle())
	} else {
		w.m.Hold(s.Handle())
	}
	w.held[s] = !w.held[s]
}

// closeStream closes a stream that may have live blocks, and makes another.
func (w *model) closeStream() {
	i := rapid.IntRange(0, len(w.streams)-1).Draw(w.rt, "closed")
	s := w.streams[i]
	w.releaseAll() // a launch may wait for one on another stream
	require.NoError(w.rt, s.Close())
	w.streams = slices.Delete(w.streams, i, i+1)
	for j, l := range w.live { // freed from now on without an order
		if l.s == s {
			require.NoError(w.rt, w.p.Free(w.live[j].b))
			w.total -= uint64(l.b.Bytes())
		}
	}
	w.live = slices.DeleteFunc(w.live, func(l live) bool { return l.s == s })
	w.addStream()
}

func (w *model) trim() {
	_, err := w.p.Trim(rapid.IntRange(0, 8*kib64).Draw(w.rt, "need"))
	require.NoError(w.rt, err)
}

// fail makes one driver call of the next operations fail.
func (w *model) failing() {
	call := rapid.SampledFrom([]string{"cuMemCreate", "cuMemMap", "cuMemSetAccess", "cuMemUnmap", "cuMemAddressReserve", "cuEventRecord", "cuEventCreate"}).Draw(w.rt, "call")
	w.m.Inject(sim.Fault{Call: call, After: rapid.IntRange(0, 3).Draw(w.rt, "after"), Result: 999})
	s := w.stream("stream")
	b, err := w.p.Alloc(pool.Request{Bytes: rapid.IntRange(0, 16*kib64).Draw(w.rt, "bytes"), Stream: s})
	w.m.ClearFaults()
	if w.asleep != nil {
		require.ErrorIs(w.rt, err, cuda.ErrSuspended)
		return
	}
	if err == nil {
		w.born(live{b: b, s: s}, false)
	}
}

// free64 returns how much of the device's memory is free, in whole granules.
func (w *model) free64() int {
	free, _ := w.m.Memory(0)
	return (free + kib64 - 1) / kib64
}

// strike has a driver call fail that moves bytes or memory, or none.
func (w *model) strike() {
	if rapid.Bool().Draw(w.rt, "fails") {
		call := rapid.SampledFrom([]string{"cuMemCreate", "cuMemMap", "cuMemSetAccess", "cuMemUnmap", "cuMemRelease", "cuMemcpyDtoHAsync", "cuMemcpyHtoDAsync"}).Draw(w.rt, "call")
		w.m.Inject(sim.Fault{Call: call, After: rapid.IntRange(0, 3).Draw(w.rt, "after"), Result: 999})
	}
}

// sleep suspends the pool, whose streams may be held at first, or fails and changes nothing.
func (w *model) sleep() {
	if w.asleep != nil {
		_, err := vmm.Suspend(context.Background(), vmm.SuspendOptions{}, w.p)
		require.ErrorIs(w.rt, err, cuda.ErrSuspended)
		return
	}
	var o vmm.SuspendOptions
	if w.dropped = rapid.Bool().Draw(w.rt, "dropped"); w.dropped {
		o.Keep = vmm.Drop
	}
	w.left = len(w.sys.Leftovers()) > 0
	w.strike()
	z, err := vmm.SuspendAfter(o, w.streams, w.p)
	w.releaseAll()
	if err == nil {
		if err = z.Released().Wait(context.Background()); err == nil {
			w.asleep = z
		}
	}
	w.m.ClearFaults()
	if w.asleep == nil {
		require.Error(w.rt, err)
	}
	require.NoError(w.rt, w.p.Check())
}

// wake resumes the pool, or fails and changes nothing.
func (w *model) wake() {
	if w.asleep == nil {
		return
	}
	w.releaseAll() // one that fails waits for the device
	if w.strike(); w.asleep.Resume(context.Background()) == nil {
		w.asleep = nil
	}
	w.m.ClearFaults()
	require.NoError(w.rt, w.p.Check())
	if w.asleep != nil {
		return
	}
	for i := range w.live {
		l := &w.live[i]
		if w.dropped {
			l.value = 0
		}
		if l.value != 0 && l.b.Bytes() > 0 {
			got, err := w.m.Bytes(l.b.Ptr(), l.b.Bytes())
			require.NoError(w.rt, err)
			require.Equal(w.rt, l.b.Bytes(), bytes.Count(got, []byte{l.value}), "the bytes of %v", l.b)
		}
	}
}

func (w *model) check() {
	require.NoError(w.rt, w.p.Check())
	st := w.p.Stats()
	require.EqualValues(w.rt, w.total, st.Requested)
	require.Len(w.rt, w.live, st.Blocks)
	require.EqualValues(w.rt, w.peak, st.PeakRequested)
	require.EqualValues(w.rt, w.count, st.Allocs)
	require.EqualValues(w.rt, w.count-uint64(len(w.live)), st.Frees)
	tagged := 0
	for _, t := range st.Tags {
		tagged += t.Requested
	}
	require.EqualValues(w.rt, w.total, tagged)
	if w.asleep != nil && !w.left && len(w.sys.Leftovers()) == 0 {
		require.Equal(w.rt, w.base, w.free64(), "a pool that sleeps has no memory: %+v, %+v", st, w.asleep.Report())
	}
}

func (w *model) end() {
	w.releaseAll()
	if w.asleep != nil && rapid.Bool().Draw(w.rt, "woken") {
		require.NoError(w.rt, w.asleep.Resume(context.Background()))
	}
	for _, g := range w.graphs {
		require.NoError(w.rt, g.g.Close())
	}
	require.NoError(w.rt, w.arena.Close())
	for _, l := range w.live {
		require.NoError(w.rt, w.p.Free(l.b))
	}
	for _, f := range w.freed {
		for _, e := range append(f.others, f.own) {
			require.NoError(w.rt, e.Close())
		}
	}
	require.Empty(w.rt, w.p.Live())
	require.NoError(w.rt, w.sys.Drain(context.Background()))
	require.NoError(w.rt, w.p.Close())
	require.NoError(w.rt, w.p.Check())
	require.Zero(w.rt, w.p.Stats().Reserved)
	for _, s := range w.streams {
		require.NoError(w.rt, s.Close())
	}
	require.Empty(w.rt, w.sys.Live())
	require.NoError(w.rt, w.sys.Close())
	require.NoError(w.rt, w.m.Close())
}

func TestModel(t *testing.T) {
	t.Cleanup(pool.SetMostLag(time.Millisecond))
	pool.NewTag("odd")
	rapid.Check(t, func(rt *rapid.T) {
		w := newModel(rt)
		defer func() {
			if !rt.Failed() {
				w.end()
			}
		}()
		rt.Repeat(map[string]func(*rapid.T){
			"alloc":  func(rt *rapid.T) { w.rt = rt; w.alloc() },
			"alloc2": func(rt *rapid.T) { w.rt = rt; w.alloc() },
			"free":   func(rt *rapid.T) { w.rt = rt; w.free() },
			"stale":  func(rt *rapid.T) { w.rt = rt; w.freeStale() },
			"hold":   func(rt *rapid.T) { w.rt = rt; w.hold() },
			"close":  func(rt *rapid.T) { w.rt = rt; w.closeStream() },
			"graph":  func(rt *rapid.T) { w.rt = rt; w.capture() },
			"launch": func(rt *rapid.T) { w.rt = rt; w.launch() },
			"gone":   func(rt *rapid.T) { w.rt = rt; w.closeGraph() },
			"trim":   func(rt *rapid.T) { w.rt = rt; w.trim() },
			"fail":   func(rt *rapid.T) { w.rt = rt; w.failing() },
			"sleep":  func(rt *rapid.T) { w.rt = rt; w.sleep() },
			"wake":   func(rt *rapid.T) { w.rt = rt; w.wake() },
			"wake2":  func(rt *rapid.T) { w.rt = rt; w.wake() },
			"":       func(rt *rapid.T) { w.rt = rt; w.check() },
		})
	})
}
