package pool

import (
	"context"
	"fmt"
	"math"
	"slices"
	"time"

	"github.com/cuvmm/cuvmm/cuda"
	"github.com/cuvmm/cuvmm/internal/bulk"
	"github.com/cuvmm/cuvmm/internal/core"
	"github.com/cuvmm/cuvmm/internal/driver"
	"github.com/cuvmm/cuvmm/internal/errs"
	"github.com/cuvmm/cuvmm/internal/phys"
	"github.com/cuvmm/cuvmm/internal/suspend"
	"github.com/cuvmm/cuvmm/internal/vrange"
)

// sleeper is the pool as what vmm.Suspend takes.
type sleeper = suspend.Holder

// listed is the pool in the System's list of live objects.
type listed struct {
	core.Object
	p *Pool
}

// Memory implements suspend.Listed.
func (l *listed) Memory() suspend.Sealed {
	if l.p.closer.Closed() {
		return nil
	}
	return l.p
}

// member is the pool as a member of a Suspension. Blocks are freed in every state, which edits
// lists alone; requests are refused by the shards, and everything else that maps or unmaps asks
// for the state under the locks that it holds meanwhile. So the pool is locked for a moment only,
// in which what began before comes to its end:
//
//	              requests, captures,  frees, arenas  Trim, Close        upkeep, pressure
//	              Grant
//	awake         served               lists          unmap              unmap
//	suspending    ErrSuspended         lists          Trim ErrSuspended  nothing
//	                                                  Close waits
//	suspended     ErrSuspended         lists          lists              nothing
//	resuming      as suspending
//
// Free chunks go without their bytes. What is free when the pool is resumed, or trimmed while
// it sleeps, leaves the lists then, and does not come back.
type member Pool

var (
	_ suspend.Member = (*member)(nil)
	_ suspend.Listed = (*listed)(nil)
)

func (m *member) pool() *Pool { return (*Pool)(m) }

// Status implements suspend.Member.
func (m *member) Status() *suspend.Status { return &m.status }

// System implements suspend.Member.
func (m *member) System() *core.System { return m.sys }

// Device implements suspend.Member.
func (m *member) Device() *cuda.Device { return m.dev }

// What names the pool in errors and reports.
func (m *member) What() string {
	if m.o.Name == "" {
		return fmt.Sprintf("pool %d", m.serial)
	}
	return "the " + m.object.Title()
}

// Base is the lowest address of the pool, or 0 before its first request.
func (m *member) Base() driver.Ptr {
	if all := *m.places.Load(); len(all) > 0 {
		return all[0].from
	}
	return 0
}

// Used implements suspend.Member: up to the highest address, since Kept says more.
func (m *member) Used() uint64 {
	if all := *m.places.Load(); len(all) > 0 {
		return uint64(all[len(all)-1].to - all[0].from)
	}
	return 0
}

// Addresses returns the pool's regions. While it sleeps none is made.
func (m *member) Addresses() (all []bulk.Segment) {
	for _, pl := range *m.places.Load() {
		all = append(all, bulk.Segment{Ptr: pl.from, Bytes: uint64(pl.to - pl.from)})
	}
	return all
}

// Acquire also has the cache in front of the pool free what it keeps, which would count as live.
func (m *member) Acquire(op string) error {
	if !m.closer.Acquire() {
		return errs.ClosedError(op, m.object.Title())
	}
	m.pool().aside(false)()
	return nil
}

// Release implements suspend.Member. A pool that is awake again has its cache back.
func (m *member) Release() {
	m.mu.Lock()
	back := func() {}
	if m.cacheAside != nil && m.status.State() == suspend.Awake {
		back, m.cacheAside = m.cacheAside, nil
	}
	m.mu.Unlock()
	back()
	m.closer.Release()
}

// Closed implements suspend.Member.
func (m *member) Closed() bool { return m.closer.Closed() }

// Begin refuses a pool that serves a capture, whose work has yet to be submitted. Memory that
// could not be unmapped after a failure stays, among the System's leftovers.
func (m *member) Begin(op string, step func()) error {
	m.mu.Lock()
	defer m.mu.Unlock()
	if s := m.status.Sleep(); s != nil {
		return s.Error(op)
	}
	for id := range m.captures {
		return errs.New(errs.Failure{Op: op, Object: m.object.Called(), Kind: errs.Capturing, Asked: fmt.Sprintf("%s, which serves capture %d", m.What(), id),
			Hint: "end the capture first"})
	}
	step()
	m.gateLocked()
	return nil
}

// Step implements suspend.Member.
func (m *member) Step(step func()) {
	m.mu.Lock()
	defer m.mu.Unlock()
	step()
	m.gateLocked()
	if m.status.State() == suspend.Awake {
		m.upkeep.Wake(busyUpkeep, m.pool().tend)
	}
}

// gateLocked has the shards serve requests while the pool is awake, and refuse them otherwise. The
// caller holds mu.
func (m *member) gateLocked() {
	sleep := m.status.Sleep()
	for _, sh := range m.shards {
		sh.mu.Lock()
		sh.sleep = sleep
		sh.closed = m.closed || sleep != nil
		sh.mu.Unlock()
	}
}

// Lock waits for what has begun to map or unmap: what comes later asks for the state. From now
// on until the pool is awake no cache serves requests.
func (m *member) Lock() {
	m.awaitDriverCalls()
	m.mu.Lock()
	aside := m.cacheAside != nil
	m.mu.Unlock()
	if aside {
		return
	}
	back := m.pool().aside(false)
	m.mu.Lock()
	defer m.mu.Unlock()
	m.cacheAside = back
}

// awaitDriverCalls waits for whoever maps or unmaps.
func (m *member) awaitDriverCalls() {
	m.misses.Lock()
	defer m.misses.Unlock()
	m.pressing.Lock()
	defer m.pressing.Unlock()
}

// Unlock implements suspend.Member.
func (m *member) Unlock() {}

// Settle leaves each chunk mapped once, and none unmapped: memory is gone only if all of its
// mappings are. Before the pool is resumed it gives up free chunks instead, which are away.
func (m *member) Settle(ctx context.Context, op string) error {
	p := m.pool()
	if p.status.State() == suspend.Resuming {
		return p.unchecked(func() error { return p.trimLists(op) })
	}
	p.stay()
	if err := p.unmapOld(ctx, op); err != nil {
		return err
	}
	return p.unchecked(func() error {
		_, err := trimBy(op, maxBytes, p.trimIdle)
		return err
	})
}

// unchecked runs what leaves places that are no shard's meanwhile, which Check must not meet.
func (p *Pool) unchecked(work func() error) error {
	p.pressing.RLock()
	defer p.pressing.RUnlock()
	return work()
}

// unmapOld unmaps all old places of chunks that moved, and waits until the GPU has passed them.
func (p *Pool) unmapOld(ctx context.Context, op string) error {
	for w := (backoff{}); ; w.pause(math.MaxInt64, time.Sleep) {
		p.askDeferred()
		if err := p.unchecked(func() error { return p.unmapAll(op) }); err != nil {
			return err
		}
		p.mu.Lock()
		rest := slices.Clone(p.deferred)
		p.mu.Unlock()
		for _, r := range rest {
			if c := &r.shard.clock; !c.Promises() && !c.Passed(r.epoch) { // the stream captures, or is being closed
				if err := c.Await(op); err != nil {
					return err
				}
			}
		}
		if len(rest) == 0 {
			return nil
		}
		if ctx.Err() != nil {
			return fmt.Errorf("%s: waiting for work of the GPU: %w", op, context.Cause(ctx))
		}
	}
}

// AddTo adds the streams that the pool knows: blocks were used there, whoever freed them.
func (m *member) AddTo(f *core.Fence) {
	for _, sh := range m.pool().all() {
		f.AddStreams([]*core.Stream{sh.stream})
	}
}

// Mappings returns old places of chunks, which only a Preview finds, behind the others, so that
// the first mapping of a chunk is the one at which its blocks lie.
func (m *member) Mappings() []*vrange.Mapping {
	m.mu.Lock()
	defer m.mu.Unlock()
	var all, old []*vrange.Mapping
	for _, pl := range *m.places.Load() {
		r := pl.reg
		for _, at := range r.rng.All() {
			if i := r.find(at.Ptr()); i < len(r.spans) && r.spans[i].freedBy != nil {
				old = append(old, at)
			} else {
				all = append(all, at)
			}
		}
	}
	return append(all, old...)
}

// Kept returns the live blocks, and all memory of arenas, in which the next launch of a graph
// may find what the last one left in memory that was freed since.
func (m *member) Kept() []bulk.Segment {
	m.mu.Lock()
	defer m.mu.Unlock()
	kept := []bulk.Segment{}
	for _, pl := range *m.places.Load() {
		var of []bulk.Segment
		if pl.reg.kind == mid {
			for _, s := range pl.reg.spans {
				of = s.keep(of)
			}
		} else {
			pl.reg.filled(func(at int, c *chunk) { of = c.keep(of, pl.reg, at) })
		}
		kept = append(kept, bulk.Join(of, 0)...)
	}
	return kept
}

// keep appends what is to be kept of a span's memory.
func (s *span) keep(kept []bulk.Segment) []bulk.Segment {
	if s.shard == nil {
		return kept
	}
	s.shard.mu.Lock()
	defer s.shard.mu.Unlock()
	for e := s.head.next; e != s.tail; e = e.next {
		if e.live() || s.shard.arena != nil {
			kept = append(kept, bulk.Segment{Ptr: e.ptr, Bytes: e.size})
		}
	}
	return kept
}

// keep appends what is to be kept of the chunk of a slab.
func (c *chunk) keep(kept []bulk.Segment, r *region, at int) []bulk.Segment {
	sh := c.shard.Load()
	if sh == nil {
		return kept
	}
	sh.mu.Lock()
	defer sh.mu.Unlock()
	s := c.slab.Load()
	switch {
	case sh.arena != nil:
		return append(kept, bulk.Segment{Ptr: r.at(at), Bytes: r.chunk})
	case s == nil:
		return kept
	}
	for i := range s.slots[:s.fresh] {
		if h := &s.slots[i]; h.live() {
			kept = append(kept, bulk.Segment{Ptr: h.at(), Bytes: s.slot})
		}
	}
	return kept
}

// isGone reports whether memory that was unmapped is the pool's no more: it went back, or a
// Suspension has what is kept of it.
func isGone(h *phys.Handle) bool {
	return h.TakeGone() || h.Mappings.Load() == 0 && (h.Away() || h.Taken())
}

// trimAsleep takes free chunks out of a pool that sleeps: their memory is with the driver already.
func (p *Pool) trimAsleep(op string) error {
	if p.status.State() != suspend.Suspended {
		return p.awake(op)
	}
	err := p.trimLists(op)
	p.status.Unmapped()
	return err
}

// trimLists takes free chunks, whose memory is away, from the lists.
func (p *Pool) trimLists(op string) error {
	for _, sh := range p.all() {
		sh.settle()
	}
	_, err := p.trim(op, maxBytes)
	return err
}

// awake refuses an operation while the pool sleeps.
func (p *Pool) awake(op string) error {
	if s := p.status.Sleep(); s != nil {
		return s.Error(op)
	}
	return nil
}

// suspendedBytesLocked returns how much of the pool's memory is away. The caller holds mu.
func (p *Pool) suspendedBytesLocked() (n uint64) {
	if p.status.Sleep() == nil {
		return 0
	}
	for _, r := range slices.Concat(p.regions[:]...) {
		r.filled(func(_ int, c *chunk) {
			if c.handle.Away() {
				n += c.handle.Size
			}
		})
	}
	return n
}
