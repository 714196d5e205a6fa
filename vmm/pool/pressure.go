package pool

import (
	"errors"
	"slices"
	"time"

	"github.com/cuvmm/cuvmm/cuda"
	"github.com/cuvmm/cuvmm/internal/core"
	"github.com/cuvmm/cuvmm/internal/driver"
)

// shortage is why no chunk could be had.
type shortage struct {
	kind   core.Kind
	size   uint64 // of the chunk, or of the address range
	call   driver.Call
	result driver.Result
	err    error
}

func (s *shortage) Error() string { return "no memory" }

func (s *shortage) Unwrap() error { return s.err }

func addressShortage(err error, size uint64) error {
	if errors.Is(err, cuda.ErrOutOfAddressSpace) {
		return &shortage{kind: core.OutOfAddressSpace, size: size, err: err}
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

// errAgain: what was missing is there now.
var errAgain = errors.New("again")

// miss serves what the shard has no memory for. From the cheap to the dear: what
// waits and has passed; what lies free on other streams and has passed; chunks,
// new or moved. Where there is no memory see relief.
func (p *Pool) miss(sh *shard, request want) (Block, error) {
	w := &request // only here does it outlive the call
	p.slow.Lock()
	defer p.slow.Unlock()
	if !sh.keep(1) {
		return Block{}, core.ClosedError(allocOp, "pool or the stream")
	}
	defer sh.keep(-1)
	for s := p.impossible(w); s != nil; s = p.impossible(w) {
		if p.o.OnExhausted == nil || !p.ask(w, s) {
			return Block{}, p.refusal(sh, w, s)
		}
	}
	r := relief{p: p, sh: sh, w: w}
	for {
		sh.settle()
		if b, ok, err := p.again(sh, w); ok || err != nil {
			return b, err
		}
		if p.steal(sh, w) {
			continue
		}
		err := p.provide(sh, w, r.step > 0)
		if err == nil || errors.Is(err, errAgain) {
			continue
		}
		var s *shortage
		if !errors.As(err, &s) {
			return Block{}, err
		}
		if err := r.find(s); err != nil {
			return Block{}, err
		}
	}
}

// relief is what is done where there is no memory, one after the other, and each
// time the request is tried again: chunks that move from everywhere, instead of
// new ones; all that is free and has passed given back to the driver; the same of
// others who keep memory, and what the reclaimer has; waiting for the GPU, after
// which it begins anew; the user's function, after which it does, too.
type relief struct {
	p        *Pool
	sh       *shard
	w        *want
	step     int
	looked   bool   // again, at what has passed meanwhile: once, or a busy stream keeps it from its end
	seen     uint64 // how far all was when trimming looked
	deadline time.Time
}

const (
	relieveMove = iota + 1
	relieveTrim
	relieveOthers
	relieveWait
)

// find does the next thing, or answers why the request is refused.
func (r *relief) find(s *shortage) error {
	p := r.p
	for r.step++; ; r.step++ {
		switch r.step {
		case relieveMove:
			if r.w.kind == mid && s.kind != core.OutOfAddressSpace {
				return nil
			}
		case relieveTrim:
			before, _ := p.progress()
			p.advanceAll()
			r.seen, _ = p.progress()
			if freed, err := p.trimFor(r.w, s); freed > 0 || err != nil {
				return err
			}
			if now, _ := p.progress(); now != before {
				if !r.looked {
					r.step, r.looked = relieveMove, true // what has passed since then can move
					return nil
				}
			}
		case relieveOthers:
			if s.kind != core.OutOfMemory {
				continue
			}
			p.relieve.Store(true)
			freed := p.sys.Relieve(p.lacking(r.w))
			p.relieve.Store(false)
			if freed > 0 {
				return nil
			}
		case relieveWait:
			if r.await() {
				r.step, r.looked = 0, false
				return nil
			}
		default:
			if p.o.OnExhausted != nil && p.ask(r.w, s) {
				r.step, r.looked, r.deadline = 0, false, time.Time{}
				return nil
			}
			err := p.refusal(r.sh, r.w, s)
			_, undo := p.trimIdle(allocOp, maxBytes)
			return join(err, undo)
		}
	}
}

// await waits until something more has passed; false says that nothing will, or
// not in time.
func (r *relief) await() bool {
	p := r.p
	if p.wait <= 0 {
		return false
	}
	if r.deadline.IsZero() {
		r.deadline = time.Now().Add(p.wait)
	}
	now, waits := p.progress()
	if now != r.seen { // since trimming looked
		return time.Now().Before(r.deadline)
	}
	for waits && time.Now().Before(r.deadline) {
		p.slow.Unlock()
		time.Sleep(50 * time.Microsecond)
		p.slow.Lock()
		p.advanceAll()
		if now, waits = p.progress(); now != r.seen {
			return true
		}
	}
	return false
}

// again tries once more what Alloc tried, and looks at slabs of other classes.
func (p *Pool) again(sh *shard, w *want) (b Block, ok bool, err error) {
	sh.mu.Lock()
	defer sh.mu.Unlock()
	if sh.closed {
		return Block{}, false, core.ClosedError(allocOp, "pool")
	}
	h := sh.take(w)
	if h == nil && w.kind == small {
		sh.giveUpAll()
		h = sh.take(w)
	}
	if h == nil {
		return Block{}, false, nil
	}
	return h.block(), true, nil
}

// lacking is what a request takes in chunks.
func (p *Pool) lacking(w *want) uint64 {
	switch w.kind {
	case small:
		return p.gran
	case mid:
		return (w.size + p.chunk - 1) / p.chunk * p.chunk
	}
	return w.size
}

// all are the shards now.
func (p *Pool) all() []*shard {
	p.mu.Lock()
	defer p.mu.Unlock()
	return slices.Clip(p.shards)
}

// advanceAll asks all streams how far they are.
func (p *Pool) advanceAll() {
	for _, sh := range p.all() {
		sh.settle()
		sh.advance()
	}
}

// moment is how long a request waits for the GPU before it makes new memory
// although enough is free: about what making a chunk takes. An event takes some
// microseconds to pass where nothing else runs.
// It is a variable for tests.
var moment = 25 * time.Microsecond

// catchUp asks the streams how far they are, the shard's own first, until so many
// bytes that are free have passed, for a moment.
func (p *Pool) catchUp(first *shard, bytes uint64) {
	deadline := time.Now().Add(moment)
	for {
		var free uint64
		waits := false
		for i, sh := range append([]*shard{first}, p.all()...) {
			if sh == nil || i > 0 && sh == first {
				continue
			}
			sh.settle()
			sh.advance()
			sh.mu.Lock()
			if sh.arena == nil {
				free += sh.spanned - min(sh.spanned, sh.requested)
				waits = waits || sh.touched > sh.passed.Load()
			}
			sh.mu.Unlock()
			if !waits && free >= bytes {
				return
			}
		}
		if !waits || time.Now().After(deadline) {
			return
		}
	}
}

// progress is a number that changes when anything more has passed, and whether
// anything that is free, or is to be, waits for the GPU.
func (p *Pool) progress() (n uint64, waits bool) {
	for _, sh := range p.all() {
		sh.mu.Lock()
		n += min(sh.passed.Load(), sh.touched) - uint64(len(sh.waiting))
		waits = waits || len(sh.waiting) > 0 || sh.arena == nil && sh.touched > sh.passed.Load()
		sh.mu.Unlock()
	}
	return n, waits
}
