package pool

import (
	"cmp"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/cuvmm/cuvmm/cuda"
	"github.com/cuvmm/cuvmm/internal/driver"
	"github.com/cuvmm/cuvmm/internal/errs"
)

// shortage is why no chunk could be had.
type shortage struct {
	kind   errs.Kind
	size   uint64 // of the chunk, or of the address range
	call   driver.Call
	result driver.Result
	err    error
}

func (s *shortage) Error() string { return "no memory" }

func (s *shortage) Unwrap() error { return s.err }

func addressShortage(err error, size uint64) error {
	if errors.Is(err, cuda.ErrOutOfAddressSpace) {
		return &shortage{kind: errs.OutOfAddressSpace, size: size, err: err}
	}
	return err
}

func join(err error, more ...error) error {
	for _, m := range more {
		if m != nil {
			return errors.Join(append([]error{err}, more...)...)
		}
	}
	return err
}

// miss serves a request that the shard has no memory for, by the cheapest means first:
// waiting blocks that have passed; free memory of other streams that has passed; chunks,
// moved or new. Misses go on side by side. One that finds no memory goes on alone,
// so that it does not lack chunks that another miss has gathered; see escalation.
func (p *Pool) miss(sh *shard, request want) (Block, error) {
	w := &request // only here does it outlive the call
	r := escalation{p: p, sh: sh, w: w, impatient: p.wait < 0}
	r.lock()
	defer r.unlock()
	if !sh.keep(1) {
		return Block{}, errs.ClosedError(allocOp, "pool or the stream")
	}
	defer sh.keep(-1)
	for s := p.impossible(w); s != nil; s = p.impossible(w) {
		if s.kind != errs.Budget || p.o.OnExhausted == nil || !r.ask(s) { // which may raise the limit
			return Block{}, p.refusal(sh, w, s)
		}
	}
	for {
		sh.settle()
		if b, ok, err := p.again(sh, w, r.alone); ok || err != nil {
			return b, err
		}
		if p.steal(sh, w) || r.alone && p.stealSlab(sh, w) {
			continue
		}
		r.seen, r.pending = p.passes.Load(), p.sys.PendingReclaims() > 0
		err := p.provide(sh, w, !r.impatient)
		if errors.Is(err, errLag) {
			r.impatient = !r.waiting(r.catchUp)
			continue
		}
		if err == nil || errors.Is(err, errAgain) {
			continue
		}
		var s *shortage
		if !errors.As(err, &s) {
			return Block{}, err
		}
		if !r.alone {
			r.unlock()
			r.alone = true
			r.lock()
			continue
		}
		if err := r.find(s); err != nil {
			return Block{}, err
		}
	}
}

// lock takes part in Pool.misses.
func (r *escalation) lock() {
	if r.alone {
		r.p.misses.Lock()
	} else {
		r.p.misses.RLock()
	}
}

func (r *escalation) unlock() {
	if r.alone {
		r.p.misses.Unlock()
	} else {
		r.p.misses.RUnlock()
	}
}

// sleep sleeps without the lock.
func (r *escalation) sleep(d time.Duration) {
	r.unlock()
	defer r.lock()
	time.Sleep(d)
}

// ask calls the user's function without the lock.
func (r *escalation) ask(s *shortage) (again bool) {
	r.unlock()
	defer r.lock()
	st := r.p.Stats()
	r.p.sys.Hook("pool.Options.OnExhausted", func() {
		again = r.p.o.OnExhausted(Exhausted{Bytes: int(r.w.bytes), Tag: r.w.tag, Reason: s.reason(), Limit: st.Limit, Reserved: st.Reserved, Requested: st.Requested})
	})
	return again
}

// escalation is what a request does that finds no memory. It tries again after each step:
// look what has passed meanwhile; trim free memory that cannot move; free memory of other
// pools and of closed objects; wait for the GPU; call the user's function. After the last
// two it begins anew.
type escalation struct {
	p       *Pool
	sh      *shard
	w       *want
	alone   bool // it holds Pool.misses exclusively
	step    int
	seen    uint64 // passes, before the latest try
	trimmed uint64 // passes, before the latest trim
	pending bool   // whether closed objects were to give memory back, likewise
	// impatient: it waits for other streams only if there is no memory.
	impatient bool
	lagged    time.Time // when it began to wait for them; zero: not yet
	lagging   patience
	patience
}

const (
	lookAgain = iota + 1
	trimOwn
	askOthers
	waitForGPU
)

// find takes the next step, or returns why the request is refused.
func (r *escalation) find(s *shortage) error {
	p := r.p
	for r.step++; ; r.step++ {
		switch r.step {
		case lookAgain:
			p.advanceAll()
			if p.stay() || p.passes.Load() != r.seen {
				return nil
			}
		case trimOwn:
			r.trimmed = p.passes.Load()
			if freed, err := p.trimFor(r.w, s); freed > 0 || err != nil {
				return err
			}
		case askOthers:
			if s.kind != errs.OutOfMemory {
				continue
			}
			if p.sys.FreeMemory(p.lacking(r.w), p.keeper) > 0 {
				return nil
			}
		case waitForGPU:
			if r.waiting(func() bool { return r.await(s) }) {
				r.step = 0
				return nil
			}
		default:
			if p.o.OnExhausted != nil && r.ask(s) {
				r.step, r.patience = 0, patience{}
				return nil
			}
			err := p.refusal(r.sh, r.w, s)
			_, undo := trimBy(allocOp, maxBytes, p.trimIdle)
			return join(err, undo)
		}
	}
}

// waiting counts the time of a wait.
func (r *escalation) waiting(wait func() bool) bool {
	start := time.Now()
	defer func() { r.sh.waited.Add(int64(time.Since(start))) }()
	return wait()
}

// await waits until there may be more memory than at the latest try. It returns false if
// there will be none, or none in time.
func (r *escalation) await(s *shortage) bool {
	p := r.p
	bound := p.wait
	if s.kind == errs.OutOfMemory {
		bound = max(bound, p.sys.Config.AllocationWait)
	}
	for {
		inFlight := p.advanceAll()
		// What passed before the latest try, but after the trim, may be memory that only
		// a trim can turn into what is requested.
		if passes := p.passes.Load(); passes != r.seen || passes != r.trimmed {
			return r.pause(bound, func(time.Duration) {})
		}
		if !r.pending && !inFlight && (bound <= 0 || !p.waits()) {
			return false
		}
		if !r.pause(bound, r.sleep) {
			return false
		}
		if r.pending {
			return true
		}
	}
}

// patience counts the looks at what the GPU does. An event is not passed at the
// moment when it is recorded, not even on an idle stream. So whatever the bound,
// an idle stream is given so many looks that only work can keep it from passing.
type patience struct {
	looks int
	since time.Time
}

const (
	idleLooks  = 24
	firstPause = 5 * time.Microsecond
	longPause  = time.Millisecond
)

// pause sleeps before the next look. It returns false if there were enough of them and the
// bound is over.
func (w *patience) pause(bound time.Duration, sleep func(time.Duration)) bool {
	if w.looks == 0 {
		w.since = time.Now()
	}
	if w.looks++; w.looks > idleLooks && time.Since(w.since) >= bound {
		return false
	}
	sleep(min(longPause, firstPause<<min(w.looks, 10)))
	return true
}

// again tries once more what Alloc tried. A request that is not small gets a slot of a slab
// only if there was no memory for it.
func (p *Pool) again(sh *shard, w *want, short bool) (b Block, ok bool, err error) {
	sh.mu.Lock()
	defer sh.mu.Unlock()
	if sh.closed {
		return Block{}, false, errs.ClosedError(allocOp, "pool")
	}
	h := sh.take(w)
	if h == nil && w.kind == mid && short {
		h = sh.takeAbove(w)
	}
	if h == nil {
		return Block{}, false, nil
	}
	return h.block(), true, nil
}

// lacking is what a request takes in chunks.
func (p *Pool) lacking(w *want) uint64 {
	if w.kind == small {
		return p.gran
	}
	return (w.size + p.chunk - 1) / p.chunk * p.chunk
}

// all returns the shards as they are now.
func (p *Pool) all() []*shard {
	p.mu.Lock()
	defer p.mu.Unlock()
	return slices.Clip(p.shards)
}

// advanceAll asks all streams how far they are, and reports whether another look may
// find more: an event that was recorded for that is in flight, or a block waits.
func (p *Pool) advanceAll() (inFlight bool) {
	for _, sh := range p.all() {
		sh.settle()
		inFlight = sh.advance() || inFlight
		sh.settle()
		// A block that waits for a stream further on in the list is had at the next look.
		sh.mu.Lock()
		inFlight = inFlight || sh.waiting.n > 0
		sh.mu.Unlock()
	}
	return inFlight
}

// waits reports whether anything that is free, or is to be, waits for the GPU, or
// closed objects have yet to give theirs back.
func (p *Pool) waits() bool {
	if p.sys.PendingReclaims() > 0 {
		return true
	}
	for _, sh := range p.all() {
		sh.mu.Lock()
		waits := sh.waiting.n > 0 || sh.arena == nil && sh.touched > sh.passed.Load()
		sh.mu.Unlock()
		if waits {
			return true
		}
	}
	return false
}

// Exhausted describes a request that is about to be refused, for Options.OnExhausted. The
// function may free blocks, of this pool and of others, and may call anything. If it returns
// true the request is tried again. The request waits for it, and no lock is held. A panic,
// or runtime.Goexit, is logged and counts as false. A request larger than the device's memory is refused without it.
type Exhausted struct {
	Bytes int
	Tag   Tag
	// Reason is cuda.ErrOutOfMemory, cuda.ErrOutOfAddressSpace or
	// cuda.ErrBudget.
	Reason error
	// Limit is the pool's limit in bytes, or 0. A request of more can only be served if
	// the function raises it (Pool.SetLimit), whatever it frees.
	Limit int
	// Reserved is the pool's physical memory, and Requested the size of its live
	// blocks, in bytes.
	Reserved, Requested int
}

func (s *shortage) reason() error {
	switch s.kind {
	case errs.Budget:
		return cuda.ErrBudget
	case errs.OutOfAddressSpace:
		return cuda.ErrOutOfAddressSpace
	}
	return cuda.ErrOutOfMemory
}

// holders is how many tags a refusal names.
const holders = 3

// refusal is the error of a request that found no memory.
func (p *Pool) refusal(sh *shard, w *want, s *shortage) error {
	st := p.Stats()
	f := errs.Failure{Op: allocOp, Kind: s.kind, Call: s.call, Result: s.result, Err: s.err}
	f.Asked = fmt.Sprintf("%s for stream %#x on %s; the pool has %s, of which %s are requested by live blocks",
		errs.Bytes(w.bytes), uintptr(sh.stream.Handle), p.where(), errs.Bytes(st.Reserved), errs.Bytes(st.Requested))
	if st.Waiting > 0 {
		f.Asked += ", with " + errs.Count(st.Waiting, "freed block") + " still waiting for other streams"
	}
	if tags := p.largest(&st); tags != "" {
		f.Asked += "; the largest holders: " + tags
	}
	lost := p.lost()
	switch {
	case lost != driver.Success:
		f.Kind, f.Result, f.Hint = errs.DeviceLost, lost, "restart the process; closing the pool drops what lies on the device"
	case s.kind == errs.Budget:
		f.Asked += fmt.Sprintf("; the limit is %s", errs.Bytes(st.Limit))
		f.Hint = "free blocks, or raise the limit with Pool.SetLimit"
		if w.kind == mid && uint64(st.Limit) < s.size {
			f.Hint = p.chunkHint("raise the limit with Pool.SetLimit")
		}
	case s.kind == errs.OutOfAddressSpace:
		f.Hint = "memory is not what ran out: close reservations, or other pools"
	case p.home == nil:
		f.Hint = "free blocks, or host memory that other programs hold"
	default:
		f.Hint = "free blocks, or what others hold of the device's memory"
		if !p.sys.HasContext(p.on[0]) { // asking would make one, which takes memory
			break
		}
		if free, total, err := p.home.MemoryInfo(); err == nil {
			f.Asked += fmt.Sprintf("; the device has %s free of %s", errs.Bytes(free), errs.Bytes(total))
			if w.kind == mid && w.size <= uint64(free) && uint64(free) < p.chunk {
				f.Hint = p.chunkHint("use a smaller Options.Chunk")
			}
			f.Hint = cmp.Or(p.sys.Withheld(s.size, free), f.Hint)
		}
	}
	return errs.New(f)
}

func (p *Pool) chunkHint(remedy string) string {
	return fmt.Sprintf("such requests are served in chunks of %s: %s", errs.Bytes(p.chunk), remedy)
}

// fewBlocks are how many live blocks a refusal goes through at most.
const fewBlocks = 1000

// largest names the tags that hold most: from the statistics, or, in a pool without
// them, if it has few blocks.
func (p *Pool) largest(st *Stats) string {
	type holder struct {
		tag    Tag
		blocks int
		bytes  int
	}
	var by []holder
	add := func(tag Tag, blocks, bytes int) {
		at := slices.IndexFunc(by, func(o holder) bool { return o.tag == tag })
		if at < 0 {
			at = len(by)
			by = append(by, holder{tag: tag})
		}
		by[at].blocks += blocks
		by[at].bytes += bytes
	}
	switch {
	case p.o.Statistics:
		for _, t := range st.Tags {
			if t.Blocks > 0 {
				add(t.Tag, t.Blocks, t.Requested)
			}
		}
	case st.Blocks <= fewBlocks:
		p.each(func(h *header) { add(h.tag, 1, int(h.asked())) })
	default:
		return "not counted without Options.Statistics"
	}
	slices.SortFunc(by, func(a, b holder) int {
		if a.bytes > b.bytes {
			return -1
		}
		return 1
	})
	var names []string
	for _, h := range by[:min(len(by), holders)] {
		name := "without a tag"
		if h.tag != 0 {
			name = fmt.Sprintf("%q", h.tag)
		}
		names = append(names, fmt.Sprintf("%s %s in %d", name, errs.Bytes(h.bytes), h.blocks))
	}
	return strings.Join(names, ", ")
}

// each calls f for every live block, with its shard's lock held.
func (p *Pool) each(f func(h *header)) {
	for _, pl := range *p.places.Load() {
		pl.each(p, f)
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	for _, e := range p.nodes {
		e.home.shard.mu.Lock()
		if e.live() {
			f(&e.header)
		}
		e.home.shard.mu.Unlock()
	}
}
