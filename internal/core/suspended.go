package core

import (
	"fmt"
	"slices"
	"sort"
	"sync/atomic"
	"time"

	"github.com/cuvmm/cuvmm/internal/driver"
	"github.com/cuvmm/cuvmm/internal/errs"
	"github.com/cuvmm/cuvmm/internal/lock"
)

// Sleep says of an object that it was suspended, and when. Whatever the object refuses
// meanwhile refers to it.
type Sleep struct {
	What  string // the object: "the buffer at 0x7f…"
	Since time.Time
}

// Error refuses an operation while the object sleeps.
func (s *Sleep) Error(op string) error {
	return errs.New(errs.Failure{Op: op, Kind: errs.Suspended,
		Asked: fmt.Sprintf("%s was suspended at %s", s.What, s.Since.Format(time.TimeOnly)),
		Hint:  "call Resume of its Suspension first"})
}

// suspended are the addresses of suspended objects, for operations that get an address and no
// object. While nothing sleeps the list is nil, and the query one load.
type suspended struct {
	mu  lock.Mutex[lock.Leaf] // guards changes of the list
	all atomic.Pointer[[]interval]
}

// interval is the addresses of an object that sleeps. The list has them in order, and they
// do not overlap.
type interval struct {
	from, to driver.Ptr
	sleep    *Sleep
}

// Rate is the rate of the latest copy of suspended memory, in bytes a second.
type Rate struct{ perSecond atomic.Int64 }

// Note notes a copy.
func (r *Rate) Note(bytes uint64, took time.Duration) {
	if bytes > 0 && took > 0 {
		r.perSecond.Store(int64(float64(bytes) / took.Seconds()))
	}
}

// Expected returns how long a copy may take, and 0 if no rate is known.
func (r *Rate) Expected(bytes uint64) time.Duration {
	rate := r.perSecond.Load()
	if rate == 0 {
		return 0
	}
	return time.Duration(float64(bytes) / float64(rate) * float64(time.Second))
}

// AddSuspended adds the addresses of an object that is suspended.
func (s *System) AddSuspended(at driver.Ptr, size uint64, sleep *Sleep) {
	if size == 0 {
		return
	}
	s.suspended.edit(func(all []interval) []interval {
		i := sort.Search(len(all), func(i int) bool { return all[i].from >= at })
		return slices.Insert(all, i, interval{at, at + driver.Ptr(size), sleep})
	})
}

// RemoveSuspended removes the addresses that were added for the object. It is idempotent.
func (s *System) RemoveSuspended(sleep *Sleep) {
	s.suspended.edit(func(all []interval) []interval {
		return slices.DeleteFunc(all, func(i interval) bool { return i.sleep == sleep })
	})
}

func (a *suspended) edit(change func([]interval) []interval) {
	a.mu.Lock()
	defer a.mu.Unlock()
	var all []interval
	if before := a.all.Load(); before != nil {
		all = slices.Clone(*before)
	}
	if all = change(all); len(all) == 0 {
		a.all.Store(nil)
		return
	}
	a.all.Store(&all)
}

// AnySuspended reports whether any object sleeps.
func (s *System) AnySuspended() bool { return s.suspended.all.Load() != nil }

// CheckNotSuspended refuses an operation on n bytes at an address if an object that sleeps has any of
// them. It finds mistakes: an object may be suspended after the query.
func (s *System) CheckNotSuspended(op string, at driver.Ptr, n uint64) error {
	all := s.suspended.all.Load()
	if all == nil {
		return nil
	}
	i := sort.Search(len(*all), func(i int) bool { return (*all)[i].to > at })
	if i < len(*all) && ((*all)[i].from <= at || uint64((*all)[i].from-at) < n) {
		return (*all)[i].sleep.Error(op)
	}
	return nil
}
