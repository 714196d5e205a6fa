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
type Mutex[R Rank] struct{ mu sync.Mutex }

func (m *Mutex[R]) Lock() {
	take[R](m, true)
	m.mu.Lock()
}

// TryLock is exempt from the order, since it never waits.
func (m *Mutex[R]) TryLock() bool {
	if !m.mu.TryLock() {
		return false
	}
	take[R](m, false)
	return true
}

func (m *Mutex[R]) Unlock() {
	let(m)
	m.mu.Unlock()
}

// RWMutex is a reader/writer mutex of a rank, which panics when it is locked out of order,
// for reading or for writing.
type RWMutex[R Rank] struct{ mu sync.RWMutex }

func (m *RWMutex[R]) Lock() {
	take[R](m, true)
	m.mu.Lock()
}

func (m *RWMutex[R]) TryLock() bool {
	if !m.mu.TryLock() {
		return false
	}
	take[R](m, false)
	return true
}

func (m *RWMutex[R]) Unlock() {
	let(m)
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
	let(m)
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

// take notes that the goroutine takes a lock, and panics if the lock comes before one that it
// holds.
func take[R Rank](m any, ordered bool) {
	var rank R
	me := goroutine()
	pc := make([]uintptr, 1)
	runtime.Callers(3, pc)
	held.Lock()
	defer held.Unlock()
	height, nests := rank.rank()
	for _, e := range held.by[me] {
		above, _ := e.rank.rank()
		if ordered && (above > height || above == height && !nests) {
			panic(fmt.Sprintf("lock: %s is taken at %s while the goroutine holds %s, taken at %s: see the order in internal/lock", name(rank), place(pc[0]), name(e.rank), place(e.at)))
		}
	}
	if held.by == nil {
		held.by = map[string][]entry{}
	}
	held.by[me] = append(held.by[me], entry{m, rank, pc[0]})
}

// let notes that the goroutine lets a lock go, which it or another goroutine took.
func let(m any) {
	me := goroutine()
	held.Lock()
	defer held.Unlock()
	i := slices.IndexFunc(held.by[me], func(e entry) bool { return e.lock == m })
	if i < 0 {
		panic(fmt.Sprintf("lock: a goroutine lets go of a %T that it did not take", m))
	}
	if rest := slices.Delete(held.by[me], i, i+1); len(rest) > 0 {
		held.by[me] = rest
	} else {
		delete(held.by, me)
	}
}

func name(r Rank) string { return reflect.TypeOf(r).Name() }

func place(pc uintptr) string {
	f, _ := runtime.CallersFrames([]uintptr{pc}).Next()
	return fmt.Sprintf("%s (%s:%d)", f.Function, f.File, f.Line)
}

// goroutine is the number of the calling goroutine, which its stack begins with.
func goroutine() string {
	var buf [64]byte
	stack := buf[:runtime.Stack(buf[:], false)]
	return string(bytes.Fields(stack)[1])
}
