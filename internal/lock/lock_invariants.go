//go:build invariants

package lock

import (
	"bytes"
	"fmt"
	"reflect"
	"runtime"
	"slices"
	"sync"
)

// Mutex is a mutex of a rank, which panics when it is locked out of order.
type Mutex[R Rank] struct {
	mu sync.Mutex
	by string // the goroutine that took it, while it is locked
}

func (m *Mutex[R]) Lock() {
	by := take[R](m, true)
	m.mu.Lock()
	m.by = by
}

// TryLock is exempt from the order, since it never waits.
func (m *Mutex[R]) TryLock() bool {
	if !m.mu.TryLock() {
		return false
	}
	m.by = take[R](m, false)
	return true
}

func (m *Mutex[R]) Unlock() {
	let(m, m.by)
	m.mu.Unlock()
}

// RWMutex is a reader/writer mutex of a rank, which panics when it is locked out of order,
// for reading or for writing.
type RWMutex[R Rank] struct {
	mu sync.RWMutex
	by string // the goroutine that took it for writing, while it is locked
}

func (m *RWMutex[R]) Lock() {
	by := take[R](m, true)
	m.mu.Lock()
	m.by = by
}

func (m *RWMutex[R]) TryLock() bool {
	if !m.mu.TryLock() {
		return false
	}
	m.by = take[R](m, false)
	return true
}

func (m *RWMutex[R]) Unlock() {
	let(m, m.by)
	m.mu.Unlock()
}

func (m *RWMutex[R]) RLock() {
	take[R](m, true)
	m.mu.RLock()
}

func (m *RWMutex[R]) TryRLock() bool {
	if !m.mu.TryRLock() {
		return false
	}
	take[R](m, false)
	return true
}

func (m *RWMutex[R]) RUnlock() {
	let(m, goroutine())
	m.mu.RUnlock()
}

// held are the locks of each goroutine, in the order in which it took them.
var held struct {
	sync.Mutex
	by map[string][]entry
}

type entry struct {
	lock any // a pointer to the mutex
	rank Rank
	at   uintptr
}

// precedes reports whether a lock of the other rank may be taken under one of this rank.
func (o order) precedes(other order) bool {
	if o.height != other.height {
		return o.height < other.height
	}
	return o.step == 0 || other.step == 0 || o.step < other.step
}

// take notes that the goroutine takes a lock, and panics if the lock comes before one that it
// holds. It returns the goroutine.
func take[R Rank](m any, ordered bool) (me string) {
	var rank R
	me = goroutine()
	pc := make([]uintptr, 1)
	runtime.Callers(3, pc)
	held.Lock()
	defer held.Unlock()
	for _, e := range held.by[me] {
		if ordered && !e.rank.rank().precedes(rank.rank()) {
			panic(fmt.Sprintf("lock: %s is taken at %s while the goroutine holds %s, taken at %s: see the order in internal/lock", name(rank), place(pc[0]), name(e.rank), place(e.at)))
		}
	}
	if held.by == nil {
		held.by = map[string][]entry{}
	}
	held.by[me] = append(held.by[me], entry{m, rank, pc[0]})
	return me
}

// let notes that a lock is let go, which the goroutine took.
func let(m any, by string) {
	held.Lock()
	defer held.Unlock()
	i := slices.IndexFunc(held.by[by], func(e entry) bool { return e.lock == m })
	if i < 0 {
		panic(fmt.Sprintf("lock: a goroutine lets go of a %T that it did not take", m))
	}
	if rest := slices.Delete(held.by[by], i, i+1); len(rest) > 0 {
		held.by[by] = rest
	} else {
		delete(held.by, by)
	}
}

func name(r Rank) string { return reflect.TypeOf(r).Name() }

func place(pc uintptr) string {
	f, _ := runtime.CallersFrames([]uintptr{pc}).Next()
	return fmt.Sprintf("%s (%s:%d)", f.Function, f.File, f.Line)
}

// goroutine is the number of the calling goroutine, which its stack begins with. Only the
// runtime knows it; the runtime walks the whole stack for it, so it is asked once a lock.
func goroutine() string {
	var buf [64]byte
	stack := buf[:runtime.Stack(buf[:], false)]
	return string(bytes.Fields(stack)[1])
}
