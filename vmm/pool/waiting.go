package pool

import (
	"slices"

	"github.com/cuvmm/cuvmm/internal/epoch"
)

// waiting is a freed block that other streams may still use. It is free when each of
// them has passed the epoch that it was in.
type waiting struct {
	h     *header
	epoch uint64 // of its own shard, when it was freed
	until []epoch.Point
	// capture: not before this capture has ended, either.
	capture *Capture
}

// waitlist is a shard's waiting blocks, by what each waits for next, so that looking
// for those that have passed takes no longer with more of them.
type waitlist struct {
	n        int
	bytes    uint64
	streams  map[*epoch.Clock][]waiting // in the order of the epochs that they wait for
	captures map[*Capture][]waiting
}

// keepWaitingLocked keeps a block until all that it waits for has passed. The caller holds mu.
func (sh *shard) keepWaitingLocked(w waiting) {
	w.h.waiting = true
	sh.waiting.n++
	sh.waiting.bytes += w.h.size()
	sh.waitNextLocked(w)
}

// waitNextLocked queues a block for what it waits for next, or makes it free. The caller
// holds mu.
func (sh *shard) waitNextLocked(w waiting) {
	l := &sh.waiting
	for len(w.until) > 0 && w.until[0].Passed() {
		w.until = w.until[1:]
	}
	switch {
	case len(w.until) > 0:
		if l.streams == nil {
			l.streams = map[*epoch.Clock][]waiting{}
		}
		next := w.until[0]
		q := l.streams[next.Clock]
		at := len(q)
		for at > 0 && q[at-1].until[0].Epoch > next.Epoch {
			at--
		}
		l.streams[next.Clock] = slices.Insert(q, at, w)
		sh.offerLocked()
	case w.capture != nil && !w.capture.over.Load():
		if l.captures == nil {
			l.captures = map[*Capture][]waiting{}
		}
		l.captures[w.capture] = append(l.captures[w.capture], w)
		sh.offerLocked()
	default:
		l.n--
		l.bytes -= w.h.size()
		w.h.waiting = false
		sh.putLocked(w.h, w.epoch)
	}
}

// settle frees waiting blocks that have passed. The caller holds no shard's lock.
func (sh *shard) settle() {
	for sh.settleOnce() { // a block that waited for one stream may wait for another
	}
}

// settleOnce asks the streams that blocks wait for next, and reports whether any block
// moved on.
func (sh *shard) settleOnce() bool {
	var ask []*epoch.Clock
	sh.mu.Lock()
	for on, q := range sh.waiting.streams {
		if !q[0].until[0].Passed() {
			ask = append(ask, on)
		}
	}
	n := sh.waiting.n
	sh.mu.Unlock()
	if n == 0 {
		return false
	}
	for _, on := range ask {
		on.Advance()
	}
	sh.mu.Lock()
	defer sh.mu.Unlock()
	l := &sh.waiting
	before := l.n
	var next []waiting
	for on, q := range l.streams {
		k := 0
		for k < len(q) && q[k].until[0].Passed() {
			k++
		}
		next = append(next, q[:k]...)
		if clear(q[:k]); k == len(q) {
			delete(l.streams, on)
		} else {
			l.streams[on] = q[k:]
		}
	}
	for c, q := range l.captures {
		if c.over.Load() {
			next = append(next, q...)
			delete(l.captures, c)
		}
	}
	for _, w := range next {
		sh.waitNextLocked(w)
	}
	if l.n < before {
		sh.pool.passes.Add(1)
	}
	return len(next) > 0
}

// each calls f for every waiting block.
func (l *waitlist) each(f func(w waiting)) {
	for _, q := range l.streams {
		for _, w := range q {
			f(w)
		}
	}
	for _, q := range l.captures {
		for _, w := range q {
			f(w)
		}
	}
}
