package pool_test

import (
	"errors"
	"fmt"
	"log"

	"github.com/cuvmm/cuvmm/cuda"
	"github.com/cuvmm/cuvmm/cuda/auto"
	"github.com/cuvmm/cuvmm/vmm/pool"
)

func fatal(err error) {
	if err != nil {
		log.Fatal(err)
	}
}

// firstStream opens the driver for an example, and makes a stream of its first device.
func firstStream() (dev *cuda.Device, s *cuda.Stream, done func()) {
	sys, err := auto.Open(auto.Options{Driver: auto.Software})
	fatal(err)
	dev = sys.Devices()[0]
	s, err = dev.NewStream(cuda.StreamOptions{})
	fatal(err)
	return dev, s, func() {
		fatal(s.Close())
		fatal(sys.Close())
	}
}

// A block is allocated for a stream, used, and freed at once: the stream's order is
// enough. A free names other streams that used the block.
func Example() {
	dev, s, done := firstStream()
	defer done()
	p, err := pool.New(dev, pool.Options{})
	fatal(err)
	defer p.Close()

	first, err := p.Alloc(pool.Request{Bytes: 3 << 20, Stream: s})
	if err != nil {
		log.Fatal(err)
	}
	if err := s.Memset(first.Ptr(), 1, first.Bytes()); err != nil {
		log.Fatal(err)
	}
	if err := p.Free(first); err != nil { // while the GPU still works on it
		log.Fatal(err)
	}
	var second pool.Block
	second, err = p.Alloc(pool.Request{Bytes: 3 << 20, Stream: s})
	fatal(err)
	fmt.Println("the same memory:", first.Ptr() == second.Ptr())
	fmt.Println(p.Free(second))
	fmt.Println("freed twice:", errors.Is(p.Free(second), cuda.ErrClosed))
	// Output:
	// the same memory: true
	// <nil>
	// freed twice: true
}

// The completion ends when the pool has given all of its memory back.
func ExamplePool_Released() {
	dev, _, done := firstStream()
	defer done()
	var p *pool.Pool
	p, err := pool.New(dev, pool.Options{})
	fatal(err)
	released := p.Released()
	fatal(p.Close())
	<-released.Done()
	fmt.Println(dev.System().Stats().AllocatedBytes)
	// Output: 0
}

// Statistics and refusals name what memory is for.
func ExampleNewTag() {
	dev, s, done := firstStream()
	defer done()
	p, err := pool.New(dev, pool.Options{Statistics: true})
	fatal(err)
	defer p.Close()
	weights := pool.NewTag("weights")
	b, err := p.Alloc(pool.Request{Bytes: 3 << 20, Stream: s, Tag: weights})
	fatal(err)

	show := func(s pool.Stats, of func(t pool.TagStats)) {
		fmt.Println(s.Reserved>>20, "MiB reserved")
		for _, t := range s.Tags {
			of(t)
		}
	}
	show(p.Stats(), func(t pool.TagStats) { fmt.Println(t.Tag, t.Blocks, t.Requested>>20, "MiB") })
	fatal(p.Free(b))
	// Output:
	// 32 MiB reserved
	// weights 1 3 MiB
}

// A program frees what it can do without, and the request is tried again.
func ExampleExhausted() {
	dev, s, done := firstStream()
	defer done()
	var p *pool.Pool
	var cache pool.Block
	p, err := pool.New(dev, pool.Options{Limit: 64 << 20, OnExhausted: func(e pool.Exhausted) (retry bool) {
		fmt.Println(e.Bytes>>20, "MiB, over budget:", errors.Is(e.Reason, cuda.ErrBudget))
		return p.Free(cache) == nil
	}})
	fatal(err)
	defer p.Close()
	cache, err = p.Alloc(pool.Request{Bytes: 48 << 20, Stream: s})
	fatal(err)
	b, err := p.Alloc(pool.Request{Bytes: 40 << 20, Stream: s})
	fatal(err)
	fatal(p.Free(b))
	// Output: 40 MiB, over budget: true
}

// With Options.Track the pool knows where each live block was allocated.
func ExamplePool_Live() {
	dev, s, done := firstStream()
	defer done()
	p, err := pool.New(dev, pool.Options{Track: true})
	fatal(err)
	defer p.Close()
	b, err := p.Alloc(pool.Request{Bytes: 1000, Stream: s})
	fatal(err)
	show := func(l pool.Live) { fmt.Println(l.Block == b, l.Stack[0].Function) }
	for _, l := range p.Live() {
		show(l)
	}
	fatal(p.Free(b))
	// Output: true github.com/cuvmm/cuvmm/vmm/pool_test.ExamplePool_Live
}

// Memory that a capture allocates lasts as long as the graph. Graphs that never run
// together share an arena.
func ExamplePool_Capture() {
	dev, s, done := firstStream()
	defer done()
	p, err := pool.New(dev, pool.Options{})
	fatal(err)
	defer p.Close()
	var arena *pool.Arena
	arena, err = p.NewArena()
	fatal(err)
	graph, stats, err := p.Capture(s, pool.CaptureOptions{Arena: arena}, func() error {
		b, err := p.Alloc(pool.Request{Bytes: 1 << 20, Stream: s, Tag: pool.NewTag("scratch")})
		if err != nil {
			return err
		}
		return errors.Join(s.Memset(b.Ptr(), 1, b.Bytes()), p.Free(b))
	})
	fatal(err)
	show := func(s pool.CaptureStats, of func(t pool.CaptureTag)) {
		for _, t := range s.Tags {
			of(t)
		}
	}
	show(stats, func(t pool.CaptureTag) { fmt.Println(t.Tag, t.Served, t.Bytes>>20, "MiB") })
	fatal(graph.Launch(s))
	fatal(s.Synchronize())
	fatal(graph.Close())
	fatal(arena.Close())
	// Output: scratch 1 1 MiB
}

// Another library begins the capture, and the pool serves it until End.
func ExamplePool_BeginCapture() {
	dev, s, done := firstStream()
	defer done()
	p, err := pool.New(dev, pool.Options{})
	fatal(err)
	defer p.Close()
	var c *pool.Capture
	graph, err := s.WithCapture(cuda.CaptureOptions{}, func() (err error) {
		if c, err = p.BeginCapture(s, pool.CaptureOptions{}); err != nil {
			return err
		}
		b, err := p.Alloc(pool.Request{Bytes: 1 << 20, Stream: s})
		if err != nil {
			return err
		}
		stats, err := c.End()
		fmt.Println(stats.Served, "served")
		return errors.Join(err, p.Free(b))
	})
	fatal(err)
	fatal(graph.Close())
	fatal(c.Close())
	// Output: 1 served
}

// Workspaces are there before a capture begins, so it asks the pool for nothing.
func ExamplePool_Prepare() {
	dev, s, done := firstStream()
	defer done()
	p, err := pool.New(dev, pool.Options{})
	fatal(err)
	defer p.Close()
	var ready *pool.Workspaces
	ready, err = p.Prepare(s, pool.Workspace{Name: "attention", Bytes: 4 << 20})
	fatal(err)
	b, ok := ready.Get("attention")
	fmt.Println(b.Bytes()>>20, "MiB", ok)
	fatal(ready.Close())
	// Output: 4 MiB true
}

// A history becomes a trace, which can be stored and replayed.
func ExampleHistory() {
	dev, s, done := firstStream()
	defer done()
	p, err := pool.New(dev, pool.Options{})
	fatal(err)
	defer p.Close()
	p.StartHistory(pool.HistoryOptions{Events: 100})
	b, err := p.Alloc(pool.Request{Bytes: 1000, Stream: s})
	fatal(err)
	fatal(p.Free(b))
	history := p.History()
	show := func(e pool.Event) { fmt.Println(e.Op, e.Bytes) }
	for _, e := range history {
		show(e)
	}
	fmt.Println(len(history.Trace("mine").Ops), "operations")
	// Output:
	// alloc 1000
	// free 1000
	// 2 operations
}

// A snapshot shows every block and hole.
func ExamplePool_Snapshot() {
	dev, s, done := firstStream()
	defer done()
	p, err := pool.New(dev, pool.Options{})
	fatal(err)
	defer p.Close()
	b, err := p.Alloc(pool.Request{Bytes: 3 << 20, Stream: s})
	fatal(err)
	part := func(state pool.PartState, p pool.Part) { fmt.Println(state, p.Bytes>>20, "MiB") }
	segment := func(kind pool.SegmentKind, s pool.Segment) {
		fmt.Println(kind, s.Bytes>>20, "MiB, largest hole", s.Hole()>>20, "MiB")
		for _, p := range s.Parts {
			part(p.State, p)
		}
	}
	stream := func(s pool.StreamSummary) { fmt.Println("a stream with", s.Blocks, "block") }
	show := func(s pool.Snapshot) {
		for _, seg := range s.Segments {
			segment(seg.Kind, seg)
		}
		for _, of := range s.Streams {
			stream(of)
		}
	}
	show(p.Snapshot())
	fatal(p.Free(b))
	// Output:
	// region 32 MiB, largest hole 29 MiB
	// live 3 MiB
	// hole 29 MiB
	// a stream with 1 block
}
