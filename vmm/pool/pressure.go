package pool

import (
	"context"
	"slices"
	"time"

	"github.com/cuvmm/cuvmm/internal/budget"
	"github.com/cuvmm/cuvmm/internal/errs"
)

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

// makeRoom has owners of the pool's budget give memory back, without the lock.
func (r *escalation) makeRoom(short *budget.Shortage) bool {
	r.unlock()
	defer r.lock()
	r.p.lacking.Add(1)
	defer r.p.lacking.Add(-1)
	short.Extend(0, r.p.lacks(r.w))
	return r.p.sys.MakeRoom(context.Background(), short)
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
	lagging   backoff
	backoff
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
			if short := s.short(); short != nil && r.makeRoom(short) {
				r.step-- // a request of several chunks may lack the next one
				return nil
			}
			if s.kind != errs.OutOfMemory {
				continue
			}
			if p.sys.FreeMemory(p.lacks(r.w), p.keeper) > 0 {
				return nil
			}
		case waitForGPU:
			if r.waiting(func() bool { return r.await(s) }) {
				r.step = 0
				return nil
			}
		default:
			if p.o.OnExhausted != nil && r.ask(s) {
				r.step, r.backoff = 0, backoff{}
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

// backoff counts the looks at what the GPU does. An event is not passed at the
// moment when it is recorded, not even on an idle stream. So whatever the bound,
// an idle stream is given so many looks that only work can keep it from passing.
type backoff struct {
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
func (w *backoff) pause(bound time.Duration, sleep func(time.Duration)) bool {
	if w.looks == 0 {
		w.since = time.Now()
	}
	if w.looks++; w.looks > idleLooks && time.Since(w.since) >= bound {
		return false
	}
	sleep(min(longPause, firstPause<<min(w.looks, 10)))
	return true
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
		inFlight = sh.clock.Advance() || inFlight
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
		waits := sh.waiting.n > 0 || sh.arena == nil && sh.clock.Behind()
		sh.mu.Unlock()
		if waits {
			return true
		}
	}
	return false
}
