package life

import (
	"log/slog"
	"runtime"
	"sync/atomic"

	"github.com/cuvmm/cuvmm/internal/lock"
)

// List is the list of live objects. All methods are safe for concurrent use.
type List struct {
	log   *slog.Logger
	trace bool

	mu     lock.Mutex[lock.Leaf]
	head   Object
	counts [kinds]int
	bytes  [kinds]uint64

	lost  atomic.Int64 // objects that were collected without Close
	young young
}

// Init makes the list ready for use. Lost objects are logged; with trace each object
// keeps the stack of its creation.
func (l *List) Init(log *slog.Logger, trace bool) {
	l.log, l.trace = log, trace
	l.head.prev, l.head.next = &l.head, &l.head
}

// Add puts an owner of size bytes into the list. skip is the number of callers that
// its stack leaves out.
func (l *List) Add(owner Owner, kind Kind, size uint64, skip int) {
	o := owner.object()
	o.list, o.owner, o.kind, o.size = l, owner, kind, size
	if l.trace {
		pcs := make([]uintptr, 32)
		pcs = pcs[:runtime.Callers(2+skip, pcs)]
		o.stack = &pcs
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	o.linkBefore(&l.head)
	l.counts[kind]++
	l.bytes[kind] += size
}

// Count returns how many objects of a kind are live, and their bytes.
func (l *List) Count(kind Kind) (n, bytes int) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.counts[kind], int(l.bytes[kind])
}

// Lost returns how many objects were collected without Close.
func (l *List) Lost() int { return int(l.lost.Load()) }

// Describe describes every live object.
func (l *List) Describe() []string {
	l.mu.Lock()
	defer l.mu.Unlock()
	var all []string
	for o := l.head.next; o != &l.head; o = o.next {
		if !o.isCursor() {
			all = append(all, o.String())
		}
	}
	return all
}

// DescribeBriefly describes at most so many live objects on one line each, and counts
// all of them.
func (l *List) DescribeBriefly(most int) (some []string, all int) {
	l.mu.Lock()
	defer l.mu.Unlock()
	for o := l.head.next; o != &l.head; o = o.next {
		if o.isCursor() {
			continue
		}
		if all++; all <= most {
			some = append(some, o.brief())
		}
	}
	return some, all
}

// IfEmpty calls f, which must be quick, if no object is live, before the next one can
// be added. It reports whether there was none and f returned true.
func (l *List) IfEmpty(f func() bool) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	for o := l.head.next; o != &l.head; o = o.next {
		if !o.isCursor() {
			return false
		}
	}
	return f()
}
