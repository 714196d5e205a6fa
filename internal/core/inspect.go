package core

import (
	"slices"

	"github.com/cuvmm/cuvmm/internal/driver"
	"github.com/cuvmm/cuvmm/internal/lock"
)

// Show lets snapshots of the System show x, which is no object in the list of live
// ones: a pool, a publication, a follower, a lease. The package inspect knows the
// types. hide is idempotent.
func (s *System) Show(x any) (hide func()) { return s.shown.add(x) }

// Shown returns what Show was called with and is not hidden, in that order.
func (s *System) Shown() []any { return s.shown.list() }

// shown is what snapshots show besides the live objects. Its lock is a leaf.
type shown struct {
	mu  lock.Mutex[lock.Leaf]
	all []*any
}

func (l *shown) add(x any) (hide func()) {
	entry := &x
	l.mu.Lock()
	defer l.mu.Unlock()
	l.all = append(l.all, entry)
	return func() {
		l.mu.Lock()
		defer l.mu.Unlock()
		l.all = slices.DeleteFunc(l.all, func(e *any) bool { return e == entry })
	}
}

func (l *shown) list() []any {
	l.mu.Lock()
	defer l.mu.Unlock()
	all := make([]any, len(l.all))
	for i, e := range l.all {
		all[i] = *e
	}
	return all
}

// HasContext reports whether the System works on a device already, so that asking
// for the device's memory makes no context.
func (s *System) HasContext(d driver.Device) bool {
	return slices.ContainsFunc(s.knownContexts(), func(c *Context) bool { return c.Device == d })
}
