package core

import (
	"slices"
	"time"

	"github.com/cuvmm/cuvmm/internal/driver"
	"github.com/cuvmm/cuvmm/internal/lock"
)

// keepers are the registrations of OnPressure, in their order.
type keepers struct {
	mu  lock.Mutex[lock.Leaf]
	all []*Keeper
}

// Keeper is what keeps device memory for later use, such as a pool.
type Keeper struct {
	sys  *System
	trim func(need uint64) (freed uint64, more bool)
}

// OnPressure registers a keeper: trim gives back at least need bytes, if it has
// them, and returns how many it gave, and whether more will be free once the GPU
// has passed it. It is called without any lock of this package, but with the locks
// of the object that needs memory.
func (s *System) OnPressure(trim func(need uint64) (freed uint64, more bool)) *Keeper {
	k := &Keeper{s, trim}
	s.keepers.mu.Lock()
	defer s.keepers.mu.Unlock()
	s.keepers.all = append(s.keepers.all, k)
	return k
}

// Remove ends the registration.
func (k *Keeper) Remove() {
	all := &k.sys.keepers
	all.mu.Lock()
	defer all.mu.Unlock()
	all.all = slices.DeleteFunc(slices.Clone(all.all), func(o *Keeper) bool { return o == k })
}

// trim has keepers give memory back until there is enough, all but one.
func (s *System) trim(need uint64, but *Keeper) (freed uint64, more bool) {
	s.keepers.mu.Lock()
	all := slices.Clip(s.keepers.all)
	s.keepers.mu.Unlock()
	for _, k := range all {
		if freed >= need {
			break
		}
		if k == but {
			continue
		}
		s.Hook("what gives memory back under pressure", func() {
			n, waits := k.trim(need - freed)
			freed += n
			more = more || waits
		})
	}
	return freed, more
}

// A Shortage is a request for device memory that the driver may refuse for want of
// memory. It is made before the first try.
type Shortage struct {
	sys   *System
	need  uint64
	ended uint64 // teardowns that had ended before the latest try
	round uint64 // in which the leftovers are tried; 0 before the first Free
}

// NewShortage is for a request of so many bytes.
func (s *System) NewShortage(need uint64) *Shortage {
	return &Shortage{sys: s, need: need, ended: s.reclaim.ended.Load()}
}

// Free frees what can be freed at once, after a try was refused: it tears down what was
// closed and has passed, waiting for a goroutine that does so already, tries the leftovers
// once, and calls the functions of OnPressure. freed says that memory has come free since before that try,
// so that the next one may succeed. soon says that a teardown waits only for a lock
// that another goroutine holds, and later that there is more once the GPU has passed
// something.
func (sh *Shortage) Free() (freed, soon, later bool) {
	s := sh.sys
	if sh.round == 0 {
		sh.round = s.leftovers.newRound()
	}
	soon = s.settle(sh.round)
	later = s.PendingReclaims() > 0
	if ended := s.reclaim.ended.Load(); ended != sh.ended {
		sh.ended = ended
		return true, soon, later
	}
	n, more := s.trim(sh.need, nil)
	return n > 0, soon, later || more
}

// teardownAttempts is how often a request tries again while another goroutine is about to
// end a teardown: for a few milliseconds in all, even if it is not to wait for the GPU.
const teardownAttempts = 10

// Allocate calls try, which allocates size bytes of device memory. Before it gives
// up for want of memory it does what Shortage.Free does, and repeats that,
// while anything is to come, as long as the System was opened to wait for it
// (Config.AllocationWait). The caller observes the result.
func (s *System) Allocate(size uint64, try func() driver.Result) driver.Result {
	s.PollReclaim()
	sh := s.NewShortage(size)
	r := try()
	if r != driver.OutOfMemory {
		return r
	}
	deadline := time.Now().Add(s.Config.AllocationWait)
	pause, attempts := shortestPause, teardownAttempts
	for {
		freed, soon, later := sh.Free()
		if freed {
			if r = try(); r != driver.OutOfMemory {
				return r
			}
			pause = shortestPause
		}
		if time.Now().Before(deadline) {
			if !freed && !soon && !later {
				return r
			}
		} else if attempts--; attempts < 0 || !freed && !soon {
			return r
		}
		if !freed {
			time.Sleep(pause)
			pause = min(2*pause, longestPause)
		}
	}
}

// FreeMemory frees memory for a caller that bypasses Allocate: what was closed and has
// passed, and need bytes of the keepers but the caller itself, which may be nil.
func (s *System) FreeMemory(need uint64, caller *Keeper) (freed uint64) {
	s.settle(s.leftovers.newRound())
	freed, _ = s.trim(need, caller)
	return freed
}
