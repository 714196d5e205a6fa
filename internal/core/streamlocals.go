package core

import (
	"slices"
	"sync/atomic"

	"github.com/cuvmm/cuvmm/internal/lock"
)

// StreamLocals are what other packages keep for a stream, by a key of NewStreamKey.
// Reading takes no lock.
type StreamLocals struct {
	mu  lock.Mutex[lock.Leaf]
	all atomic.Pointer[[]any]
}

// Get returns what was set for the key, or nil.
func (l *StreamLocals) Get(n int) any {
	if all := l.all.Load(); all != nil && n < len(*all) {
		return (*all)[n]
	}
	return nil
}

// Set keeps v for the key; nil keeps nothing.
func (l *StreamLocals) Set(n int, v any) {
	l.mu.Lock()
	defer l.mu.Unlock()
	var all []any
	if old := l.all.Load(); old != nil {
		all = slices.Clone(*old)
	}
	for len(all) <= n {
		all = append(all, nil)
	}
	all[n] = v
	l.all.Store(&all)
}

// locals are the keys in use.
type locals struct {
	mu   lock.Mutex[lock.Leaf]
	used []bool
}

// NewStreamKey returns the lowest key that is not in use.
func (s *System) NewStreamKey() int {
	l := &s.locals
	l.mu.Lock()
	defer l.mu.Unlock()
	n := slices.Index(l.used, false)
	if n < 0 {
		n = len(l.used)
		l.used = append(l.used, true)
	}
	l.used[n] = true
	return n
}

// FreeStreamKey releases a key, for which no stream keeps anything any more.
func (s *System) FreeStreamKey(n int) {
	s.locals.mu.Lock()
	defer s.locals.mu.Unlock()
	s.locals.used[n] = false
}
