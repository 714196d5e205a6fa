package sim

import (
	"cmp"
	"fmt"
	"runtime"
	"slices"
	"strings"
	"sync/atomic"
)

// The kinds of objects that a machine holds.
const (
	KindContext       = "context"
	KindStream        = "stream"
	KindEvent         = "event"
	KindReservation   = "reservation"
	KindAllocation    = "allocation"
	KindMulticast     = "multicast object"
	KindMapping       = "mapping"
	KindDeviceMemory  = "device memory"
	KindSystemMemory  = "system memory"
	KindManagedMemory = "managed memory"
	KindIPCMemory     = "memory of another process"
	KindHostMemory    = "host memory"
	KindRegistration  = "registered host memory"
	KindModule        = "module"
	KindGraph         = "graph"
	KindGraphExec     = "executable graph"
)

// Leak is an object that was created and never destroyed.
type Leak struct {
	// Kind is one of the Kind constants.
	Kind string
	// Address is the object's address, or its handle.
	Address uint64
	// Size is its size in bytes, where it has one.
	Size int
	// Note says what else is to be known about it.
	Note string
	// Stack is where it was created, as many lines of function, file and line.
	Stack string
}

func (l Leak) String() string {
	var b strings.Builder
	fmt.Fprintf(&b, "%s %#x", l.Kind, l.Address)
	if l.Size > 0 {
		fmt.Fprintf(&b, " of %d bytes", l.Size)
	}
	if l.Note != "" {
		fmt.Fprintf(&b, " (%s)", l.Note)
	}
	fmt.Fprintf(&b, ", created at:\n%s", l.Stack)
	return b.String()
}

// object is what the leak report knows of anything created.
type object struct {
	kind    string
	address uint64
	size    uint64
	note    string
	order   uint64
	stack   stack
}

// stack is a call stack.
type stack [24]uintptr

var created atomic.Uint64

// track begins the life of an object.
func (m *Machine) track(kind string, address, size uint64) *object {
	o := &object{kind: kind, address: address, size: size, order: created.Add(1)}
	runtime.Callers(3, o.stack[:])
	m.objects[o] = struct{}{}
	return o
}

// untrack ends it.
func (m *Machine) untrack(o *object) { delete(m.objects, o) }

// orphan ends it because its context was destroyed. It counts as leaked all the
// same, unless the program gave it back before: the program lost sight of it.
func (m *Machine) orphan(o *object) {
	if _, tracked := m.objects[o]; !tracked {
		return
	}
	m.untrack(o)
	o.note = "destroyed with its context"
	m.orphans = append(m.orphans, o)
}

// Live counts the objects that exist on the machine, by kind.
func (m *Machine) Live() map[string]int {
	m.mu.Lock()
	defer m.mu.Unlock()
	counts := map[string]int{}
	for o := range m.objects {
		counts[o.kind]++
	}
	return counts
}

// Leaks lists what exists on the machine now, and what ceased to exist only
// because its context was destroyed, oldest first. The loss of a context changes
// nothing about that: what belongs to it can be closed as before.
func (m *Machine) Leaks() []Leak {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.leaks()
}

func (m *Machine) leaks() []Leak {
	left := slices.Clone(m.orphans)
	for o := range m.objects {
		left = append(left, o)
	}
	slices.SortFunc(left, func(a, b *object) int { return cmp.Compare(a.order, b.order) })
	var leaks []Leak
	for _, o := range left {
		leaks = append(leaks, Leak{o.kind, o.address, int(o.size), o.note, o.stack.String()})
	}
	return leaks
}

func (s stack) String() string {
	var b strings.Builder
	n := slices.Index(s[:], 0)
	if n < 0 {
		n = len(s)
	}
	frames := runtime.CallersFrames(s[:n])
	for {
		f, more := frames.Next()
		if f.Function != "" {
			fmt.Fprintf(&b, "\t%s\n\t\t%s:%d\n", f.Function, f.File, f.Line)
		}
		if !more {
			return strings.TrimRight(b.String(), "\n")
		}
	}
}
