package pool

import (
	"fmt"
	"math/bits"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/cuvmm/cuvmm/cuda"
	"github.com/cuvmm/cuvmm/internal/core"
	"github.com/cuvmm/cuvmm/internal/driver"
	"github.com/cuvmm/cuvmm/internal/phys"
	"github.com/cuvmm/cuvmm/internal/ranges"
	"github.com/cuvmm/cuvmm/vmm"
)

// Options change how a pool works. The zero value works.
type Options struct {
	// Memory is what the pool's memory is like; see vmm.Properties.
	Memory vmm.Properties
	// Access says who may touch all of the pool's memory, beside the device. A
	// peer costs about a millisecond for every chunk that is made, and chunks
	// that a peer was granted never move.
	Access []vmm.Access

	// SmallMax is up to which size, in bytes, requests are served from slabs of
	// a size class: at most the granularity; 0 is an eighth of it (256 KiB).
	SmallMax int
	// Chunk is the size in bytes of the chunks that larger requests are served
	// from, and that move; a multiple of the granularity; 0 is 16 times that
	// (32 MiB). See the package documentation for what it trades.
	Chunk int
	// ExactFrom is the size in bytes from which a request gets a chunk of its
	// own; 0 is 512 times the granularity (1 GiB).
	ExactFrom int
	// Slack is how much more memory than the most that was ever requested at
	// once the pool makes before it moves free chunks together instead, as a
	// share of that: 0 is 1/32, a negative value is none at all.
	Slack float64

	// Limit is the most physical memory, in bytes, that the pool may have; 0 is
	// no limit. SetLimit changes it.
	Limit int
	// Wait is how long a request that finds no memory waits for blocks that were
	// freed and that the GPU still uses: 0 is a second, a negative value not at
	// all.
	Wait time.Duration
	// OnExhausted is asked before a request is refused; see Exhausted.
	OnExhausted func(Exhausted) (retry bool)
	// Statistics counts by tag, and the pool's peaks over all streams. It costs
	// some ten nanoseconds a request, and more where several goroutines allocate
	// at once.
	Statistics bool
	// Track keeps the stack that allocated each live block. It costs about a
	// microsecond a request.
	Track bool
	// CaptureLimit has captures that take longer reported through the System's
	// logger; 0 is a minute, a negative value never.
	CaptureLimit time.Duration
}

// Pool gives out device memory in blocks of any size and takes them back in the
// order of streams, without the driver as long as what was freed serves what is
// asked. All methods may be called from any goroutine. The caller closes it.
//
// # Locks
//
// From first to last: slow, which lets one miss be served at a time and is let
// go while it waits; a shard's markMu; mu; a shard's mu; the leaves of captures,
// statistics and regions' lists. Driver calls are made under slow and markMu
// alone, never under mu nor a shard's mu, so that no free and no warm request
// ever waits for one.
type Pool struct {
	dev     *cuda.Device
	sys     *core.System
	on      []driver.Device
	prop    driver.AllocationProp
	access  []driver.AccessDesc
	gran    uint64
	local   int
	classes classes

	smallMax, midQuantum, chunk, exactFrom uint64

	slack float64
	wait  time.Duration
	o     Options

	reserved atomic.Uint64
	mostHeld atomic.Uint64
	limit    atomic.Uint64
	stats    *statistics
	history  atomic.Pointer[ring]

	slow sync.Mutex

	mu          sync.Mutex
	closed      bool
	shards      []*shard
	mids        []*region
	smalls      []*region
	lostExacts  []*exact
	idle        []*phys.Handle // chunks that are mapped nowhere
	retired     totals         // of shards that are gone
	retiredTags []TagStats
	most        uint64 // requested at once, as far as misses saw
	captures    map[uint64]*Capture
	arenas      int
	remove      func() // from those who are asked under pressure
	relieve     atomic.Bool

	places atomic.Pointer[[]place] // regions and exact chunks, by address
}

const (
	// maxAlign is what Request.Align can be at most.
	maxAlign = 2 << 20
	// maxBytes is more than any device has; sizes above it would overflow.
	maxBytes = 1 << 46
	// exactWaste is the part of a request that an exact chunk may be larger by.
	exactWaste = 16
)

// New makes a pool of the device's memory. It takes no memory yet.
func New(d *cuda.Device, o Options) (*Pool, error) {
	const op = "pool.New"
	prop, gran, err := ranges.Resolve(op, d, o.Memory)
	if err != nil {
		return nil, err
	}
	if _, err := core.ContextOf(d); err != nil {
		return nil, err
	}
	p := &Pool{dev: d, sys: core.SystemOf(d), on: core.DevicesOf(prop.Location), prop: prop, gran: gran, o: o,
		captures: map[uint64]*Capture{}}
	if err := p.sizes(op); err != nil {
		return nil, err
	}
	if p.access, err = ranges.Access(op, d, prop.Location, withDevice(d, o.Access)); err != nil {
		return nil, err
	}
	p.slack, p.wait = o.Slack, o.Wait
	switch {
	case o.Slack == 0:
		p.slack = 1.0 / 32
	case o.Slack < 0:
		p.slack = 0
	}
	if o.Wait == 0 {
		p.wait = time.Second
	}
	p.limit.Store(uint64(o.Limit))
	if o.Statistics {
		p.stats = new(statistics)
	}
	p.places.Store(new([]place))
	p.local = p.sys.NewLocal()
	p.remove = p.sys.OnPressure(p.underPressure)
	return p, nil
}

func withDevice(d *cuda.Device, access []vmm.Access) []vmm.Access {
	for _, a := range access {
		if a.Location == d.Location() {
			return access
		}
	}
	return append([]vmm.Access{{Location: d.Location(), Mode: vmm.ReadWrite}}, access...)
}

// sizes checks the sizes among the options and decides the defaults.
func (p *Pool) sizes(op string) error {
	bad := func(name string, n int, hint string) error {
		return core.Invalid(op, fmt.Sprintf("Options.%s is %d", name, n), hint)
	}
	or := func(n int, def uint64) uint64 {
		if n == 0 {
			return def
		}
		return uint64(n)
	}
	o := p.o
	switch {
	case o.SmallMax < 0 || uint64(o.SmallMax) > p.gran || o.SmallMax%quantum != 0:
		return bad("SmallMax", o.SmallMax, fmt.Sprintf("use a multiple of %d up to the granularity, %s", quantum, core.Bytes(p.gran)))
	case o.Chunk < 0 || uint64(o.Chunk)%p.gran != 0 || o.Chunk > maxBytes:
		return bad("Chunk", o.Chunk, fmt.Sprintf("use a multiple of the granularity, %s", core.Bytes(p.gran)))
	case o.ExactFrom < 0:
		return bad("ExactFrom", o.ExactFrom, "use a size in bytes, or 0 for the default")
	case o.Limit < 0:
		return bad("Limit", o.Limit, "use a size in bytes, or 0 for no limit")
	}
	p.smallMax = or(o.SmallMax, p.gran/8)
	p.midQuantum = max(quantum, uint64(1)<<(bits.Len64(p.smallMax)-1)/64)
	p.chunk = or(o.Chunk, 16*p.gran)
	p.exactFrom = max(or(o.ExactFrom, 512*p.gran), p.smallMax+1)
	p.classes = newClasses(p.smallMax)
	return nil
}

// Device is the pool's device.
func (p *Pool) Device() *cuda.Device { return p.dev }

func (p *Pool) lost() driver.Result { return p.sys.DeviceLost(p.on...) }

// Request is what Alloc is asked for.
type Request struct {
	// Bytes may be zero: such a block has an address of its own, too.
	Bytes int
	// Align is a power of two up to 2 MiB; 0 is 512.
	Align int
	// Stream is whose work uses the block first, and in whose order it is freed.
	Stream *cuda.Stream
	// Tag says what it is for; see NewTag.
	Tag Tag
}

// Alloc gives a block, for the work that is put on the request's stream from
// now on; other streams are made to wait for that stream first, as for any
// memory. Its contents are undefined. Where there is no memory it does all that
// Exhausted lists before it refuses with cuda.ErrOutOfMemory,
// cuda.ErrOutOfAddressSpace or cuda.ErrBudget.
//
// What was freed on the stream is used again at once, whatever the GPU does.
// While the stream takes part in a capture, the block is of the capture's
// arena; see Capture.
func (p *Pool) Alloc(r Request) (Block, error) {
	var w want
	if err := p.want(&w, r); err != nil {
		return Block{}, err
	}
	st := core.StreamOf(r.Stream)
	sh, _ := st.Locals.Get(p.local).(*shard)
	if sh == nil || sh.pool != p || st.MayCapture() {
		return p.allocSlowly(st, w)
	}
	return p.allocFrom(sh, &w)
}

const allocOp = "pool.Alloc"

func (p *Pool) allocFrom(sh *shard, w *want) (Block, error) {
	sh.mu.Lock()
	if sh.closed {
		sh.mu.Unlock()
		return Block{}, core.ClosedError(allocOp, "pool or the stream")
	}
	if h := sh.take(w); h != nil {
		b := h.block()
		sh.mu.Unlock()
		p.verify()
		return b, nil
	}
	sh.mu.Unlock()
	b, err := p.miss(sh, *w)
	p.verify()
	return b, err
}

// want checks a request, and decides what serves it.
func (p *Pool) want(w *want, r Request) error {
	if r.Stream == nil {
		return core.Invalid(allocOp, "no stream", "name the stream whose work uses the block: one of Device.NewStream or BorrowStream")
	}
	w.bytes, w.align, w.tag = uint64(r.Bytes), quantum, r.Tag
	if r.Align != 0 {
		if r.Align < 0 || r.Align > maxAlign || r.Align&(r.Align-1) != 0 {
			return core.Invalid(allocOp, fmt.Sprintf("an alignment of %d", r.Align), "use a power of two up to 2 MiB, or 0 for 512")
		}
		w.align = max(quantum, uint64(r.Align))
	}
	if w.bytes <= p.smallMax { // negative ones are beyond all
		if w.align == quantum {
			w.kind, w.class = small, p.classes.find(w.bytes)
			return nil
		}
		if w.class = p.classes.aligned(w.bytes, w.align); w.class >= 0 {
			w.kind = small
			return nil
		}
	}
	switch {
	case r.Bytes < 0:
		return core.Invalid(allocOp, fmt.Sprintf("%d bytes", r.Bytes), "sizes are not negative")
	case r.Bytes > maxBytes:
		return core.Invalid(allocOp, fmt.Sprintf("%d bytes", r.Bytes), "no device has that much: ask for less")
	case w.bytes >= p.exactFrom && w.align <= p.gran:
		w.kind, w.size = large, (w.bytes+p.gran-1)/p.gran*p.gran
	default:
		w.kind, w.size = mid, (max(w.bytes, p.smallMax)+p.midQuantum-1)/p.midQuantum*p.midQuantum
	}
	return nil
}

// allocSlowly serves a stream that the pool does not know yet, or that may take
// part in a capture.
func (p *Pool) allocSlowly(st *core.Stream, w want) (Block, error) {
	if err := st.Use(allocOp, p.sys); err != nil {
		return Block{}, err
	}
	defer st.Drop()
	if st.MayCapture() {
		c, err := p.capturing(allocOp, st, &w)
		if err != nil {
			return Block{}, err
		}
		if c != nil {
			return c.alloc(st, &w)
		}
	}
	sh, err := p.shardOf(allocOp, st)
	if err != nil {
		return Block{}, err
	}
	return p.allocFrom(sh, &w)
}

// shardOf is the stream's shard, made when it is first asked for.
func (p *Pool) shardOf(op string, st *core.Stream) (*shard, error) {
	if sh, ok := st.Locals.Get(p.local).(*shard); ok && sh.pool == p {
		return sh, nil
	}
	if !slices.ContainsFunc(p.access, func(a driver.AccessDesc) bool {
		return a.Location == driver.Location{Type: driver.LocationDevice, ID: int32(st.Ctx.Device)}
	}) {
		return nil, core.Invalid(op, fmt.Sprintf("a stream of device %d for memory of %v", st.Ctx.Device, p.dev),
			"grant that device access in Options.Access, or use a stream of the pool's device")
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.closed {
		return nil, core.ClosedError(op, "pool")
	}
	return p.attach(st), nil
}

// attach is the stream's shard. The caller holds mu.
func (p *Pool) attach(st *core.Stream) *shard {
	sh, ok := st.Locals.Get(p.local).(*shard)
	if !ok || sh.pool != p {
		p.prune()
		sh = p.newShard(st, nil)
		p.shards = append(p.shards, sh)
		st.Locals.Set(p.local, sh)
	}
	return sh
}

// Free gives a block back. It may be used again when the work that is on its
// stream now is done, and the work that is on the streams named besides: name
// those that used it, other than its own. Free waits for nothing, and it makes
// no driver call. A block that was freed before is cuda.ErrClosed.
//
// Where a stream that is named takes part in a capture, the block waits for the
// end of it; see Capture.
func (p *Pool) Free(b Block, streams ...*cuda.Stream) error {
	h := b.h
	if h == nil || h.home.shard.pool != p {
		return p.notOurs(b)
	}
	sh := h.home.shard
	if len(streams) > 0 {
		return p.freeAfter(b, streams)
	}
	sh.mu.Lock()
	if h.gen != b.gen {
		sh.mu.Unlock()
		return stale(b)
	}
	sh.retire(h, nil)
	if sh.arena != nil {
		sh.mu.Unlock()
		return p.freeCaptured(h)
	}
	sh.put(h, sh.epoch)
	sh.mu.Unlock()
	p.verify()
	return nil
}

const freeOp = "pool.Free"

func (p *Pool) notOurs(b Block) error {
	if b.h == nil {
		return core.Invalid(freeOp, "the zero block", "pass a block that Alloc gave")
	}
	return core.Error(core.Failure{Op: freeOp, Kind: core.Foreign, Asked: fmt.Sprintf("the block at %v is another pool's", b.ptr),
		Hint: "free it where it was allocated"})
}

func stale(b Block) error {
	return core.Error(core.Failure{Op: freeOp, Kind: core.Closed, Asked: fmt.Sprintf("%s at %v were freed before", core.Bytes(b.bytes), b.ptr),
		Hint: "free a block once; with Options.Track the pool knows where live blocks came from"})
}

// freeAfter frees a block that other streams use, too.
func (p *Pool) freeAfter(b Block, streams []*cuda.Stream) error {
	h := b.h
	points := make([]point, 0, len(streams))
	for _, s := range streams {
		if s == nil {
			return core.Invalid(freeOp, "a nil stream", "name streams made with Device.NewStream or BorrowStream")
		}
		st := core.StreamOf(s)
		if st.Ctx.System() != p.sys {
			return core.ForeignError(freeOp, "stream")
		}
		if st == h.home.shard.stream || st.Gone() {
			continue
		}
		sh, err := p.shardOf(freeOp, st)
		if err != nil {
			return err
		}
		sh.mu.Lock()
		points = append(points, point{sh, sh.epoch})
		sh.touched = sh.epoch
		sh.mu.Unlock()
	}
	sh := h.home.shard
	sh.mu.Lock()
	if h.gen != b.gen {
		defer sh.mu.Unlock()
		return stale(b)
	}
	sh.retire(h, points)
	if sh.arena != nil {
		sh.mu.Unlock()
		return p.freeCaptured(h, points...)
	}
	if len(points) == 0 {
		sh.put(h, sh.epoch)
	} else {
		h.waiting = true
		sh.waiting = append(sh.waiting, waiting{h: h, epoch: sh.epoch, until: points})
	}
	sh.mu.Unlock()
	p.verify()
	return nil
}

// FreePtr is Free for callers that know only the address, which is that of the
// first byte of a live block; any other is cuda.ErrInvalidArgument. An address
// that was freed may be another block's by now, which nobody can tell.
func (p *Pool) FreePtr(ptr cuda.Ptr, streams ...*cuda.Stream) error {
	b, ok := p.Find(ptr)
	if !ok {
		return core.Invalid("pool.FreePtr", fmt.Sprintf("no live block begins at %v", ptr),
			"pass the address that Alloc gave, once")
	}
	return p.Free(b, streams...)
}

// Find is the live block that begins at an address.
func (p *Pool) Find(ptr cuda.Ptr) (Block, bool) {
	at := driver.Ptr(ptr)
	all := *p.places.Load()
	i, found := slices.BinarySearchFunc(all, at, func(pl place, at driver.Ptr) int {
		switch {
		case at < pl.from:
			return 1
		case at >= pl.to:
			return -1
		}
		return 0
	})
	if !found {
		return Block{}, false
	}
	return all[i].find(at)
}
