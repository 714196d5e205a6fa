package sim

import (
	"sync"

	"github.com/cuvmm/cuvmm/internal/osmem"
)

// The device addresses of all machines of a process come from one space, so
// that an address of one machine means nothing to another.
//
// Most of them lie in a window: a range of the process's own addresses in which
// every CPU access faults. What does not fit there gets numbers that no process
// address can have: good for the device, unreachable for the CPU.
const (
	windowSize   = 1 << 44
	outsideBase  = 1 << 48
	addressLimit = 1 << 47                     // a reservation of so many bytes is one too large
	addressAlign = 2 << 20                     // the real driver's unit of reservations
	hintLimit    = addressLimit - addressAlign // what is wanted ends before it
)

type addressSpace struct {
	once   sync.Once
	mu     sync.Mutex
	window span // empty where the system has no room for it
	inside ranges
	beyond ranges
}

var space addressSpace

func (a *addressSpace) init() {
	a.once.Do(func() {
		if base, err := osmem.Window(windowSize, 1<<30); err == nil {
			a.window = span{base, base + windowSize}
			a.inside.put(a.window)
		}
		a.beyond.put(span{outsideBase, outsideBase + addressLimit})
	})
}

// acquire returns size contiguous addresses. It prefers addresses that were never used, and
// leaves a gap of the same size behind them, at most 1 GiB, so that a reservation can be
// continued at its end and a stray access past the end hits nothing.
func (a *addressSpace) acquire(size, align uint64) (uint64, bool) {
	a.init()
	if size >= addressLimit || align >= addressLimit {
		return 0, false
	}
	a.mu.Lock()
	defer a.mu.Unlock()
	gap := min(size, 1<<30)
	if p, ok := a.inside.acquire(size, align, gap); ok {
		return p, true
	}
	return a.beyond.acquire(size, align, gap)
}

// acquireAt acquires exactly the addresses of s, if they are free.
func (a *addressSpace) acquireAt(s span) bool {
	a.init()
	a.mu.Lock()
	defer a.mu.Unlock()
	return a.inside.acquireAt(s) || a.beyond.acquireAt(s)
}

func (a *addressSpace) put(s span) {
	a.mu.Lock()
	defer a.mu.Unlock()
	if s.lo >= outsideBase {
		a.beyond.put(s)
		return
	}
	a.inside.put(s)
}

// overlaps reports whether any of s lies in the window.
func (a *addressSpace) overlaps(s span) bool {
	a.init()
	return s.lo < a.window.hi && a.window.lo < s.hi
}

// reaches reports whether the CPU can be given access at p.
func (a *addressSpace) reaches(p uint64) bool { return a.overlaps(span{p, p + 1}) }
