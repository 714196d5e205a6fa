package pool

import (
	"errors"
	"fmt"
	"slices"
	"sync/atomic"

	"github.com/cuvmm/cuvmm/cuda"
	"github.com/cuvmm/cuvmm/internal/core"
	"github.com/cuvmm/cuvmm/internal/driver"
	"github.com/cuvmm/cuvmm/internal/errs"
	"github.com/cuvmm/cuvmm/internal/life"
	"github.com/cuvmm/cuvmm/internal/lock"
)

// CaptureOptions change how a capture is served. With the zero value it has an arena of
// its own.
type CaptureOptions struct {
	// Mode is how Capture captures; see cuda.CaptureMode.
	Mode cuda.CaptureMode
	// Arena is shared with captures whose graphs never run at the same time as this
	// one's. nil is an arena of its own.
	Arena *Arena
	// Nodes makes the capture's allocations and frees nodes of the graph. The driver
	// serves them with memory of its own each time the graph runs. Blocks that are not
	// freed in the capture are freed at its end.
	Nodes bool
	// Workspaces cannot be closed before the graph.
	Workspaces *Workspaces
}

// CaptureStats count what a capture took from the pool. Sizes are in bytes.
type CaptureStats struct {
	// ID is the driver's id of the capture.
	ID uint64
	// Served is the number of requests that were served, and Bytes their sum.
	Served int
	Bytes  int
	// Refused is the number of requests that were refused.
	Refused int
	// Grown is the physical memory that was made for the capture while it ran. It is
	// zero if the pool had the memory.
	Grown int
	// Tags are the served requests by tag, in the order of their first request.
	Tags []CaptureTag
}

// CaptureTag counts the requests of a capture under one tag.
type CaptureTag struct {
	Tag    Tag
	Served int
	Bytes  int
}

// Capture is a graph capture that the pool serves. Every stream that takes part in it,
// as the driver reports, gets its blocks from the capture's arena. Their addresses are
// baked into the graph, so they stay mapped, and nothing else uses them, until Close
// says that the graph and its executables are gone. All methods are safe for concurrent
// use.
type Capture struct {
	pool   *Pool
	id     uint64
	origin *core.Stream // nil if only the id is known
	arena  *arena
	o      CaptureOptions
	dog    *watchdog
	over   atomic.Bool
	life   life.Closer
	// calls is held shared over the driver calls that make or free a node. End
	// waits for them, so that none comes behind the end of the driver's capture.
	calls lock.RWMutex[lock.Long]

	mu    lock.Mutex[lock.Leaf]
	stats CaptureStats
	nodes []*extent
	grown map[*shard]uint64 // what the arena's shards had made before
}

const captureOp = "pool.Capture"

// Capture captures the work that body submits to the stream, as Stream.WithCapture does,
// and returns the graph. An arena serves the streams that take part, and is declared as memory
// that the graph uses: while the pool is suspended the graph's launch returns
// cuda.ErrSuspended. The graph keeps the arena: when the graph is closed and its last launch has passed, the memory is the
// pool's again. Blocks that body leaves live stay live, and are freed like others.
//
// Blocks from before the capture that are freed during it, on streams that take part,
// wait for its end. Other streams allocate and free as usual.
//
// The statistics are valid even if the capture fails.
func (p *Pool) Capture(s *cuda.Stream, o CaptureOptions, body func() error) (*cuda.Graph, CaptureStats, error) {
	if err := p.made(captureOp); err != nil {
		return nil, CaptureStats{}, err
	}
	if s == nil || body == nil {
		return nil, CaptureStats{}, errs.Invalid(captureOp, "no stream, or no function", "pass the stream to capture, and the function whose work is captured")
	}
	if err := p.prime(core.StreamOf(s)); err != nil {
		return nil, CaptureStats{}, err
	}
	var c *Capture
	defer func() {
		if c != nil { // a panic, or a capture that came to nothing
			_, _ = c.End()
			_ = c.Close()
		}
	}()
	g, err := s.WithCapture(cuda.CaptureOptions{Mode: o.Mode}, func() (err error) {
		if c, err = p.BeginCapture(s, o); err != nil {
			return err
		}
		defer func() { // before the capture itself ends, also in a panic
			_, end := c.End()
			err = errors.Join(err, end)
		}()
		return body()
	})
	var stats CaptureStats
	if c != nil {
		stats = c.Stats()
	}
	if err != nil {
		return nil, stats, err
	}
	if err := g.AddUses(c.arena.uses()...); err != nil {
		return nil, stats, errors.Join(err, g.Close())
	}
	of := c
	if err := g.OnClose(func() { _ = of.Close() }); err != nil {
		return nil, stats, errors.Join(err, g.Close())
	}
	c = nil
	return g, stats, nil
}

// prime makes what would be made lazily, before a capture begins, and asks how
// far the streams are while their events can still be recorded.
func (p *Pool) prime(st *core.Stream) error {
	if err := st.Use(captureOp, p.sys); err != nil {
		return err
	}
	defer st.Release()
	sh, err := p.shardOf(captureOp, st)
	if err != nil {
		return err
	}
	if err := p.firstRegion(sh); err != nil {
		return p.refusalOf(captureOp, err)
	}
	sh.clock.Advance()
	p.pollStreams(p.offering(sh))
	return nil
}

// firstRegion reserves a region if there is none.
func (p *Pool) firstRegion(sh *shard) error {
	p.misses.Lock()
	defer p.misses.Unlock()
	if err := p.awake(captureOp); err != nil {
		return err
	}
	p.mu.Lock()
	closed, none := p.closed, len(p.regions[mid]) == 0
	p.pruneLocked()
	p.mu.Unlock()
	if closed {
		return errs.ClosedError(captureOp, p.object.Title())
	}
	if none {
		if err := p.addRegion(sh, &want{size: p.chunk, align: quantum}); !errors.Is(err, errAgain) {
			return err
		}
	}
	return nil
}

// refusalOf is the error for the user of something that failed beside requests.
func (p *Pool) refusalOf(op string, err error) error {
	var s *shortage
	if errors.As(err, &s) {
		return errs.New(errs.Failure{Op: op, Kind: s.kind, Call: s.call, Result: s.result, Err: s.err,
			Asked: errs.Bytes(s.size), Hint: "close other pools, or ask for less"})
	}
	return err
}

// BeginCapture makes the pool serve a capture that other code began and that the stream
// takes part in. If it takes part in none, the error is cuda.ErrInvalidArgument. The
// caller calls End before the capture itself ends, and Close when the graph is gone.
func (p *Pool) BeginCapture(s *cuda.Stream, o CaptureOptions) (*Capture, error) {
	const op = "pool.BeginCapture"
	if err := p.made(op); err != nil {
		return nil, err
	}
	if s == nil {
		return nil, errs.Invalid(op, "a nil stream", "name a stream that takes part in the capture")
	}
	st := core.StreamOf(s)
	if err := st.Use(op, p.sys); err != nil {
		return nil, err
	}
	defer st.Release()
	status, id, r := st.Capture()
	if r != driver.Success {
		return nil, st.Ctx.CallError(op, driver.CallStreamGetCaptureInfo, r, streamName(st))
	}
	if status != driver.CaptureActive || id == 0 {
		return nil, errs.Invalid(op, streamName(st)+" takes part in no capture that goes on",
			"begin the capture first, or let the stream wait for an event of it")
	}
	return p.begin(op, id, st, o)
}

func (p *Pool) begin(op string, id uint64, origin *core.Stream, o CaptureOptions) (*Capture, error) {
	c := &Capture{pool: p, id: id, origin: origin, o: o, stats: CaptureStats{ID: id}, grown: map[*shard]uint64{}}
	if err := c.register(op); err != nil {
		return nil, err
	}
	c.dog = p.watchOver(fmt.Sprintf("capture %d", id), c.pending)
	return c, nil
}

func (c *Capture) register(op string) error {
	c.pool.aside(false)()
	// Before the pool's lock, since Workspaces.Close frees under its own.
	if err := c.o.Workspaces.hold(op, c.pool); err != nil {
		return err
	}
	err := c.enter(op)
	if err != nil {
		c.o.Workspaces.drop()
	}
	return err
}

// enter makes it one of the captures that the pool serves.
func (c *Capture) enter(op string) error {
	p := c.pool
	if err := p.lockOpen(op); err != nil {
		return err
	}
	defer p.mu.Unlock()
	if err := p.awake(op); err != nil {
		return err
	}
	switch {
	case p.captures[c.id] != nil:
		return errs.New(errs.Failure{Op: op, Kind: errs.InUse, Asked: fmt.Sprintf("capture %d, which the pool serves already", c.id),
			Hint: "begin a capture once, whatever its streams"})
	case c.o.Arena == nil:
		c.arena = p.newArena()
		c.arena.holds = 0
	case c.o.Arena.pool == nil:
		return c.o.Arena.made(op)
	case c.o.Arena.pool != p:
		return otherPool(op, "the arena is")
	case c.o.Arena.a == nil:
		return errs.ClosedError(op, "arena")
	default:
		c.arena = c.o.Arena.a
	}
	if err := c.arena.begin(op, c); err != nil {
		return err
	}
	for _, sh := range c.arena.shards {
		c.grown[sh] = sh.made.Load()
	}
	p.captures[c.id] = c
	return nil
}

// ID returns the driver's id of the capture.
func (c *Capture) ID() uint64 { return c.id }

// made refuses a capture that no function made.
func (c *Capture) made(op string) error {
	if c == nil || c.pool == nil {
		return errs.Invalid(op, "a nil or zero capture", "make it with Pool.BeginCapture")
	}
	return nil
}

// capturing is the capture that a stream takes part in, or nil. One that the
// pool does not serve is an error: the pool could not tell when its memory may go.
func (p *Pool) capturing(op string, st *core.Stream, w *want) (*Capture, error) {
	capturing, r := st.Capturing() // by the cheaper call: most streams do not
	if r != driver.Success {
		return nil, st.Ctx.CallError(op, driver.CallStreamIsCapturing, r, streamName(st))
	}
	if !capturing {
		return nil, nil
	}
	status, id, r := st.Capture()
	if r != driver.Success {
		return nil, st.Ctx.CallError(op, driver.CallStreamGetCaptureInfo, r, streamName(st))
	}
	if status == driver.CaptureNone {
		return nil, nil
	}
	p.mu.Lock()
	c := p.captures[id]
	p.mu.Unlock()
	if c != nil && status == driver.CaptureActive {
		return c, nil
	}
	f := errs.Failure{Op: op, Kind: errs.Capturing, Asked: fmt.Sprintf("%s for %s, which takes part in a capture that the pool does not serve", errs.Bytes(w.bytes), streamName(st)),
		Hint: "capture with Pool.Capture, say so with BeginCapture, or allocate before the capture begins"}
	if status == driver.CaptureInvalidated {
		f.Asked = fmt.Sprintf("%s for %s, which takes part in a capture that is broken", errs.Bytes(w.bytes), streamName(st))
		f.Hint = "end the capture and capture again"
	}
	p.sys.Config.Log.Warn("cuvmm: a pool refused a request during a capture", "bytes", w.bytes, "tag", w.tag.String(), "reason", f.Asked)
	return nil, errs.New(f)
}

func streamName(st *core.Stream) string { return fmt.Sprintf("stream %#x", uintptr(st.Handle)) }

// alloc serves a request of a stream that takes part.
func (c *Capture) alloc(st *core.Stream, w *want) (Block, error) {
	b, err := c.serve(st, w)
	c.mu.Lock()
	if err != nil {
		c.stats.Refused++
	} else {
		c.stats.served(w)
	}
	c.mu.Unlock()
	if err != nil {
		c.pool.sys.Config.Log.Warn("cuvmm: a pool refused a request of a capture", "capture", c.id, "bytes", w.bytes, "tag", w.tag.String(), "error", err)
	}
	return b, err
}

func (c *Capture) serve(st *core.Stream, w *want) (Block, error) {
	p := c.pool
	p.mu.Lock()
	if c.over.Load() {
		p.mu.Unlock()
		return Block{}, c.overError(w)
	}
	sh := c.arena.shard(st)
	p.mu.Unlock()
	if c.o.Nodes {
		return c.allocNode(st, sh, w)
	}
	return p.allocFrom(sh, w)
}

func (c *Capture) overError(w *want) error {
	return errs.New(errs.Failure{Op: allocOp, Kind: errs.Capturing, Asked: fmt.Sprintf("%s in capture %d, which has ended, or is about to", errs.Bytes(w.bytes), c.id),
		Hint: "allocate before Capture.End, and call that before the capture ends"})
}

func (s *CaptureStats) served(w *want) {
	s.Served++
	s.Bytes += int(w.bytes)
	at := slices.IndexFunc(s.Tags, func(t CaptureTag) bool { return t.Tag == w.tag })
	if at < 0 {
		at = len(s.Tags)
		s.Tags = append(s.Tags, CaptureTag{Tag: w.tag})
	}
	s.Tags[at].Served++
	s.Tags[at].Bytes += int(w.bytes)
}

// Stats returns what the capture took so far, or in all once it has ended.
func (c *Capture) Stats() CaptureStats {
	c.mu.Lock()
	defer c.mu.Unlock()
	s := c.stats
	s.Tags = slices.Clone(s.Tags)
	return s
}

// End ends the capture for the pool: blocks that waited for it are free once their
// streams have passed. Call it before the driver's capture ends. End is idempotent, and
// returns the same statistics each time.
func (c *Capture) End() (CaptureStats, error) {
	if err := c.made("pool.Capture.End"); err != nil {
		return CaptureStats{}, err
	}
	p := c.pool
	var err error
	p.mu.Lock()
	ended := c.over.Swap(true)
	if !ended {
		delete(p.captures, c.id)
		c.arena.running = nil
		c.mu.Lock()
		for _, sh := range c.arena.shards {
			c.stats.Grown += int(sh.made.Load() - c.grown[sh])
		}
		c.mu.Unlock()
	}
	p.mu.Unlock()
	if !ended {
		c.dog.stop()
		c.calls.Lock()
		err = c.freeNodes()
		c.calls.Unlock()
		p.verify()
	}
	return c.Stats(), err
}

// Close returns the memory to the pool. The caller asserts that the graph and all of its
// executables are destroyed and that their last launch has passed. A capture that
// Pool.Capture made is closed with its graph. Before End, Close is cuda.ErrInUse. It is
// idempotent.
func (c *Capture) Close() error {
	if err := c.ended("pool.Capture.Close"); err != nil {
		return err
	}
	return c.life.Close(c.gone)
}

// CloseAfter is Close for executables whose launches are still on the streams: the
// memory is the pool's again when the work that is now on the streams is done. It never
// blocks. Without a stream it is cuda.ErrInvalidArgument; with one that captures a graph
// it is cuda.ErrCapturing, and nothing has changed.
func (c *Capture) CloseAfter(streams ...*cuda.Stream) error {
	const op = "pool.Capture.CloseAfter"
	if err := c.ended(op); err != nil {
		return err
	}
	return life.CloseAfter(&c.life, c.pool.sys, func() (*core.Fence, error) { return core.FenceOf(c.pool.sys, op, streams) }, c.gone)
}

// Released returns the end of the capture's closing: then its memory is the pool's
// again.
func (c *Capture) Released() cuda.Completion {
	return c.life.Completion()
}

func (c *Capture) ended(op string) error {
	if err := c.made(op); err != nil {
		return err
	}
	if c.over.Load() {
		return nil
	}
	return errs.New(errs.Failure{Op: op, Kind: errs.InUse, Asked: fmt.Sprintf("capture %d, which goes on", c.id), Hint: "call End first"})
}

func (c *Capture) gone() error {
	c.o.Workspaces.drop()
	c.arena.release()
	return nil
}

// pending says, for the watchdog's report, what waits for the capture's end.
func (c *Capture) pending() []any {
	s := c.Stats()
	st := c.pool.Stats()
	return []any{"served", s.Served, "bytes", s.Bytes, "refused", s.Refused, "waiting frees", st.Waiting}
}
