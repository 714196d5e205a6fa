package core

import (
	"fmt"
	"path"
	"runtime"
	"strings"
	"sync"

	"github.com/cuvmm/cuvmm/internal/errs"
)

// ObjectKind says what an object is.
type ObjectKind uint8

// The kinds of objects.
const (
	KindReservation ObjectKind = iota
	KindAllocation
	KindMapping
	KindBuffer
	KindStream
	KindEvent
	KindHostBuffer
	KindModule
	KindGraph
	KindManaged
	KindMulticast
	KindBinding
	kindCount
)

var kindNames = [kindCount]string{"reservation", "allocation", "mapping", "buffer", "stream", "event", "host buffer", "module", "graph", "managed memory",
	"multicast object", "multicast binding"}

// String names the kind.
func (k ObjectKind) String() string { return kindNames[k] }

// Object is a live object in its System's list. Owners embed one in their
// inner state: the shell that the user holds is not in the list, or it would
// never be collected and a lost object never noticed.
type Object struct {
	sys        *System
	kind       ObjectKind
	size       uint64
	stack      *[]uintptr // of the creation, where it is traced
	prev, next *Object
}

// live is the list of a System's objects.
type live struct {
	mu     sync.Mutex
	head   Object
	counts [kindCount]int
	bytes  [kindCount]uint64
}

func (l *live) init() {
	l.head.prev, l.head.next = &l.head, &l.head
}

// Track puts an object into the list.
func (s *System) Track(o *Object, kind ObjectKind, size uint64) {
	o.sys, o.kind, o.size = s, kind, size
	if s.Config.TraceLeaks {
		pcs := make([]uintptr, 32)
		pcs = pcs[:runtime.Callers(3, pcs)]
		o.stack = &pcs
	}
	l := &s.live
	l.mu.Lock()
	defer l.mu.Unlock()
	o.prev, o.next = l.head.prev, &l.head
	o.prev.next, o.next.prev = o, o
	l.counts[kind]++
	l.bytes[kind] += size
}

// Untrack takes the object out of the list. Twice is once.
func (o *Object) Untrack() {
	l := &o.sys.live
	l.mu.Lock()
	defer l.mu.Unlock()
	if o.next == nil {
		return
	}
	o.prev.next, o.next.prev = o.next, o.prev
	o.prev, o.next = nil, nil
	l.counts[o.kind]--
	l.bytes[o.kind] -= o.size
}

// Resize says that the object is now of another size.
func (o *Object) Resize(size uint64) {
	l := &o.sys.live
	l.mu.Lock()
	defer l.mu.Unlock()
	l.bytes[o.kind] += size - o.size
	o.size = size
}

// System is the object's system.
func (o *Object) System() *System { return o.sys }

// Lost is what the collector's cleanup of the owner's shell calls: the owner
// went away without Close. The object stays as it is, because its address is
// a number in kernels, graphs and network cards that Go cannot see.
func (o *Object) Lost() {
	s := o.sys
	s.live.mu.Lock()
	gone := o.next == nil
	s.live.mu.Unlock()
	if gone {
		return
	}
	s.lost.Add(1)
	s.Config.Log.Warn("cuvmm: an object was lost without Close; it stays mapped",
		"object", o.String(), "hint", "call Close or CloseAfter on it; leak tracing shows where it was made")
}

// name is the object by kind and size.
func (o *Object) name() string {
	if o.size == 0 {
		return o.kind.String()
	}
	return fmt.Sprintf("%s of %s", o.kind, errs.Bytes(o.size))
}

// String names the object by kind and size and, where its stack was kept, by
// the callers that had it made, without this library's own functions.
func (o *Object) String() string {
	if o.stack == nil {
		return o.name()
	}
	var b strings.Builder
	b.WriteString(o.name() + ", made at")
	for _, f := range o.callers() {
		fmt.Fprintf(&b, "\n\t%s\n\t\t%s:%d", f.Function, f.File, f.Line)
	}
	return b.String()
}

// brief names the object on one line, with the place that had it made.
func (o *Object) brief() string {
	if callers := o.callers(); len(callers) > 0 {
		return fmt.Sprintf("%s (%s:%d)", o.name(), path.Base(callers[0].File), callers[0].Line)
	}
	return o.name()
}

// callers are the functions of the creation's stack that are neither this
// library's, its tests aside, nor the runtime's.
func (o *Object) callers() (of []runtime.Frame) {
	if o.stack == nil {
		return nil
	}
	frames := runtime.CallersFrames(*o.stack)
	for {
		f, more := frames.Next()
		own := strings.HasPrefix(f.Function, "github.com/cuvmm/cuvmm/") && !strings.HasSuffix(f.File, "_test.go") &&
			!strings.HasPrefix(f.Function, "github.com/cuvmm/cuvmm/samples/")
		if f.Function != "" && !own && !strings.HasPrefix(f.Function, "runtime.") {
			of = append(of, f)
		}
		if !more {
			return of
		}
	}
}

// LiveCount is how many objects of a kind are live, and their bytes.
func (s *System) LiveCount(kind ObjectKind) (n, bytes int) {
	s.live.mu.Lock()
	defer s.live.mu.Unlock()
	return s.live.counts[kind], int(s.live.bytes[kind])
}

// LostCount is how many objects the collector found without Close.
func (s *System) LostCount() int { return int(s.lost.Load()) }

// LiveObjects describes every live object.
func (s *System) LiveObjects() []string {
	s.live.mu.Lock()
	defer s.live.mu.Unlock()
	var all []string
	for o := s.live.head.next; o != &s.live.head; o = o.next {
		all = append(all, o.String())
	}
	return all
}

// liveBriefly is LiveObjects on one line each, and at most so many.
func (s *System) liveBriefly(most int) (some []string, all int) {
	s.live.mu.Lock()
	defer s.live.mu.Unlock()
	for o := s.live.head.next; o != &s.live.head; o = o.next {
		if all++; all <= most {
			some = append(some, o.brief())
		}
	}
	return some, all
}
