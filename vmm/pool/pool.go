package pool

import (
	"fmt"
	"math"
	"slices"
	"sync/atomic"
	"time"

	"github.com/cuvmm/cuvmm/cuda"
	"github.com/cuvmm/cuvmm/internal/budget"
	"github.com/cuvmm/cuvmm/internal/core"
	"github.com/cuvmm/cuvmm/internal/driver"
	"github.com/cuvmm/cuvmm/internal/errs"
	"github.com/cuvmm/cuvmm/internal/front"
	"github.com/cuvmm/cuvmm/internal/life"
	"github.com/cuvmm/cuvmm/internal/lock"
	"github.com/cuvmm/cuvmm/internal/memspec"
	"github.com/cuvmm/cuvmm/internal/phys"
	"github.com/cuvmm/cuvmm/internal/suspend"
	"github.com/cuvmm/cuvmm/vmm"
)

type holder = front.Holder

// Pool allocates device memory in blocks of any size, and reuses freed blocks in the
// order of streams. It makes no driver call as long as freed memory serves the requests.
// All methods are safe for concurrent use. The caller closes it.
type Pool struct {
	holder
	sleeper
	// Set by New.
	dev                         *cuda.Device
	sys                         *core.System
	serial                      int
	home                        *cuda.Device // whose memory it is, which may be another than dev; nil for host memory
	on                          []driver.Device
	prop                        driver.AllocationProp
	gran                        uint64 // of the memory, and of dev's address ranges
	local                       int
	classes                     classes
	smallMax, midQuantum, chunk uint64
	wait, decay                 time.Duration
	o                           Options
	stats                       *statistics
	keeper                      *core.Keeper
	account                     *budget.Account // nil without a budget
	unbudget                    func()          // ends what the budget calls
	lacking                     atomic.Int32    // requests that the budget makes room for
	hide                        func()          // from snapshots of the System

	closer life.Closer
	status suspend.Status
	upkeep upkeep // which has a lock of its own

	access   atomic.Pointer[memspec.Access] // replaced by Grant, which holds misses
	reserved atomic.Uint64                  // changed by admit and gave
	mostHeld atomic.Uint64
	limit    atomic.Uint64
	history  atomic.Pointer[ring]
	cache    atomic.Pointer[front.Cache] // in front of the pool; nil for most
	emptied  atomic.Int64                // requests that what it gave back served; see beforeMiss
	spared   atomic.Uint64               // bytes of slabs that were made instead
	kept     []uint64                    // sizes of the classes that it keeps
	keptOf   []uint8                     // the class, by the size in quanta, rounded up
	places   atomic.Pointer[[]place]     // regions, and what graphs allocate, by address
	// passes counts how often more of what was freed became free for all. It only
	// grows, so no two changes cancel.
	passes atomic.Uint64

	misses    lock.RWMutex[lock.Misses]
	addresses lock.Mutex[lock.Addresses]
	// pressing is held for reading while others have free memory given back, and
	// for writing by what must not meet that.
	pressing lock.RWMutex[lock.Pressing]

	// mu guards what follows.
	mu            lock.Mutex[lock.Pool]
	closed        bool
	pruneAt       int                    // how many shards there are when prune looks at them again
	nodes         map[driver.Ptr]*extent // what graphs allocate
	shards        []*shard               // appended to, or replaced, so that all need not copy it
	regions       [kinds][]*region       // by what they serve
	idle          []*phys.Handle         // chunks that are mapped nowhere
	deferred      []run                  // old places of chunks that moved, whose unmap is deferred
	deferredBytes uint64
	leaving       []run     // set apart, to be trimmed once the GPU has passed them
	missed        time.Time // when a chunk moved last
	retired       totals    // of shards that are gone
	retiredTags   []TagStats
	captures      map[uint64]*Capture
	arenas        int
	cacheBack     func() // ends that the cache stands aside, for the history; nil without one
	cacheAside    func() // the same while the pool sleeps

	// offersMu, a leaf, guards offers.
	offersMu lock.Mutex[lock.Leaf]
	offers   []*shard // that may have something for others

	// holding is held over changes of reserved and of the object's size.
	holding lock.Mutex[lock.Stem]
	object  listed
}

const (
	// maxAlign is what Request.Align can be at most.
	maxAlign = 2 << 20
	// maxBytes is more than any device has; sizes above it would overflow.
	maxBytes = 1 << 46
)

var lastPool atomic.Int64

// New returns a pool of the device's memory. It takes no memory yet. The caller closes
// it.
func New(d *cuda.Device, o Options) (*Pool, error) {
	const op = "pool.New"
	if o.Memory.RDMA == vmm.RDMADefault {
		o.Memory.RDMA = vmm.RDMAOff
	}
	label := life.Label{Name: o.Name, Tag: string(o.Tag)}
	if err := label.Check(op); err != nil {
		return nil, err
	}
	within, err := budget.Of(op, o.Budget)
	if err != nil {
		return nil, err
	}
	prop, gran, err := memspec.Resolve(op, d, o.Memory)
	if err != nil {
		return nil, err
	}
	addresses, err := vmm.GranularityOf(d, vmm.Properties{})
	if err != nil {
		return nil, err
	}
	if _, err := core.ContextOf(op, d); err != nil {
		return nil, err
	}
	p := &Pool{dev: d, sys: core.SystemOf(d), on: core.DevicesOf(prop.Location), prop: prop, gran: max(gran, uint64(addresses)), o: o,
		captures: map[uint64]*Capture{}, nodes: map[driver.Ptr]*extent{}}
	switch {
	case len(p.on) == 0:
	case int(p.on[0]) == d.Ordinal():
		p.home = d
	default:
		p.home = d.System().Devices()[p.on[0]]
	}
	if err := p.sizes(op); err != nil {
		return nil, err
	}
	granted, err := memspec.CheckAccess(op, d.System(), prop.Location, withDevice(d, o.Access))
	if err != nil {
		return nil, err
	}
	p.access.Store(&granted)
	p.wait = o.Wait
	if o.Wait == 0 {
		p.wait = time.Second
	}
	if p.decay = o.Decay; o.Decay == 0 {
		p.decay = time.Minute
	}
	p.limit.Store(uint64(o.Limit))
	if o.Statistics {
		p.stats = new(statistics)
	}
	p.holder, p.sleeper = front.NewHolder((*behind)(p)), suspend.Hold((*member)(p))
	p.object.p = p
	p.places.Store(new([]place))
	p.serial = int(lastPool.Add(1))
	p.local = p.sys.NewStreamKey()
	p.object.SetLabel(label)
	p.sys.Track(&p.object, life.KindPool, 0)
	p.keeper = p.sys.OnPressure(p.underPressure)
	p.unbudget = func() {}
	if within != nil {
		p.account = within.Account(life.KindPool, label, p.inUse)
		p.unbudget = within.OnPressure(math.MinInt, func(need uint64) uint64 { // before it asks users
			if p.lacking.Load() > 0 {
				return 0 // it has given back what it could, and keeps what it gathers
			}
			freed, _ := p.underPressure(need)
			return freed
		})
	}
	p.hide = p.sys.Show(p)
	return p, nil
}

// Name returns the name that the pool was given, if any.
func (p *Pool) Name() string { return p.o.Name }

// Tag returns the tag that the pool was given, if any.
func (p *Pool) Tag() cuda.Tag { return p.o.Tag }

// Device returns the pool's device.
func (p *Pool) Device() *cuda.Device { return p.dev }

func (p *Pool) lost() driver.Result { return p.sys.DeviceLost(p.on...) }

// Request describes a block.
type Request struct {
	// Bytes is the size. It may be zero: even such a block has an address of its own.
	Bytes int
	// Align is the alignment of the address: a power of two up to 2 MiB. 0 is 512.
	Align int
	// Stream is the stream whose work uses the block first, and in whose order it is
	// freed.
	Stream *cuda.Stream
	// Tag says what the block is for, in statistics and errors; see NewTag.
	Tag Tag
}

// Alloc returns a block for work that is submitted to the request's stream from now on.
// Another stream may use it once it waits for that stream. Its contents are undefined.
//
// Memory that was freed on the stream is used again at once, whatever the GPU does. If
// there is no memory, Alloc moves and gives back free memory, waits for memory that the
// GPU still uses (Options.Wait), and calls Options.OnExhausted, before it returns
// cuda.ErrOutOfMemory, cuda.ErrOutOfAddressSpace or cuda.ErrBudget.
//
// While the stream takes part in a capture, the block comes from the capture's arena; see
// Capture. Alloc is safe for concurrent use.
func (p *Pool) Alloc(r Request) (Block, error) {
	var w want
	if err := p.want(&w, r); err != nil {
		return Block{}, err
	}
	return p.allocWant(core.StreamOf(r.Stream), &w)
}

func (p *Pool) allocWant(st *core.Stream, w *want) (Block, error) {
	sh, _ := st.Locals.Get(p.local).(*shard)
	if sh == nil || sh.pool != p || st.MayCapture() {
		return p.allocSlowly(st, *w)
	}
	return p.allocFrom(sh, w)
}

const allocOp = "pool.Alloc"

func (p *Pool) allocFrom(sh *shard, w *want) (Block, error) {
	sh.mu.Lock()
	if !sh.closed { // or Close runs and may be refused, or the pool sleeps, so that miss decides
		if h := sh.takeLocked(w); h != nil {
			b := h.block()
			sh.mu.Unlock()
			p.verify()
			return b, nil
		}
	}
	sh.mu.Unlock()
	b, err := p.miss(sh, *w)
	p.verify()
	return b, err
}

// want checks a request, and decides what serves it.
func (p *Pool) want(w *want, r Request) error {
	if p == nil || p.smallMax == 0 {
		return p.made(allocOp)
	}
	if core.StreamOf(r.Stream) == nil {
		return errs.Invalid(allocOp, "no stream", "name the stream whose work uses the block: one of Device.NewStream or BorrowStream")
	}
	w.bytes, w.align, w.tag = uint64(r.Bytes), quantum, r.Tag
	if r.Align != 0 {
		if r.Align < 0 || r.Align > maxAlign || r.Align&(r.Align-1) != 0 {
			return errs.Invalid(allocOp, fmt.Sprintf("an alignment of %d", r.Align), "use a power of two up to 2 MiB, or 0 for 512")
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
		return errs.Invalid(allocOp, fmt.Sprintf("%d bytes", r.Bytes), "sizes are not negative")
	case r.Bytes > maxBytes:
		return errs.Invalid(allocOp, fmt.Sprintf("%d bytes", r.Bytes), "no device has that much: ask for less")
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
	defer st.Release()
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

// shardOf returns the stream's shard, and makes it on first use.
func (p *Pool) shardOf(op string, st *core.Stream) (*shard, error) {
	if sh, ok := st.Locals.Get(p.local).(*shard); ok && sh.pool == p {
		return sh, nil
	}
	if !slices.ContainsFunc(*p.access.Load(), func(a driver.AccessDesc) bool {
		return a.Location == driver.Location{Type: driver.LocationDevice, ID: int32(st.Ctx.Device)}
	}) {
		return nil, errs.Invalid(op, fmt.Sprintf("a stream of device %d for a pool of %v", st.Ctx.Device, p.dev),
			"grant that device access in Options.Access, or use a stream of the pool's device")
	}
	if err := p.lockOpen(op); err != nil {
		return nil, err
	}
	defer p.mu.Unlock()
	return p.attachLocked(st), nil
}

// made refuses a pool that New did not make.
func (p *Pool) made(op string) error {
	if p == nil || p.sys == nil {
		return errs.Invalid(op, "a nil or zero pool", "make it with pool.New")
	}
	return nil
}

// lockOpen takes mu, unless the pool is closed. It waits for a Close that runs,
// since that may be refused. The caller does not hold misses.
func (p *Pool) lockOpen(op string) error {
	if err := p.made(op); err != nil {
		return err
	}
	p.mu.Lock()
	if !p.closed {
		return nil
	}
	p.mu.Unlock()
	p.misses.Lock()
	defer p.misses.Unlock()
	p.mu.Lock()
	if p.closed {
		p.mu.Unlock()
		return errs.ClosedError(op, p.object.Title())
	}
	return nil
}

// attachLocked is the stream's shard. The caller holds mu.
func (p *Pool) attachLocked(st *core.Stream) *shard {
	sh, ok := st.Locals.Get(p.local).(*shard)
	if !ok || sh.pool != p {
		p.pruneLocked()
		sh = p.newShard(st, nil)
		p.shards = append(p.shards, sh)
		st.Locals.Set(p.local, sh)
	}
	return sh
}
