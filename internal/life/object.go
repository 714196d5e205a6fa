package life

import (
	"fmt"
	"path"
	"runtime"
	"strings"

	"github.com/cuvmm/cuvmm/internal/errs"
)

// Kind is what an object is.
type Kind uint8

// The kinds of objects.
const (
	KindReservation Kind = iota
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
	KindPool
	KindBacking
	KindSuspension
	KindSparse
	KindPages
	kinds
)

var kindNames = [kinds]string{"reservation", "allocation", "mapping", "buffer", "stream", "event", "host buffer", "module", "graph", "managed memory",
	"multicast object", "multicast binding", "pool", "host backing", "suspension", "sparse range", "page source"}

// String names the kind.
func (k Kind) String() string { return kindNames[k] }

// Object is a live object in a List. Owners embed one in their inner state: the
// handle that the user holds is not in the list, or it would never be collected
// and a lost object never noticed.
type Object struct {
	list       *List
	owner      Owner
	kind       Kind
	label      *Label // nil for none
	size       uint64
	stack      *[]uintptr // of the creation, if it is traced
	prev, next *Object
}

// Owner is what embeds an Object.
type Owner interface{ object() *Object }

func (o *Object) object() *Object { return o }

// Untrack takes the object out of its list, if it is in one. Idempotent.
func (o *Object) Untrack() {
	l := o.list
	if l == nil {
		return // it was never added
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	if o.next == nil {
		return
	}
	o.unlink()
	l.counts[o.kind]--
	l.bytes[o.kind] -= o.size
}

// SetBytes sets the object's size in bytes.
func (o *Object) SetBytes(size uint64) {
	l := o.list
	l.mu.Lock()
	defer l.mu.Unlock()
	l.bytes[o.kind] += size - o.size
	o.size = size
}

// name describes the object by kind, label and size.
func (o *Object) name() string {
	if o.size == 0 {
		return o.Title()
	}
	return fmt.Sprintf("%s of %s", o.Title(), errs.Bytes(o.size))
}

// String describes the object by kind and size and, if its creation was traced, by
// the callers that made it, without this library's own functions.
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

// brief describes the object on one line, with the place that made it.
func (o *Object) brief() string {
	if callers := o.callers(); len(callers) > 0 {
		return fmt.Sprintf("%s (%s:%d)", o.name(), path.Base(callers[0].File), callers[0].Line)
	}
	return o.name()
}

// callers returns the functions of the creation's stack that are neither this
// library's (except its tests) nor the runtime's.
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
