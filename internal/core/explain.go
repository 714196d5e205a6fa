package core

import (
	"cmp"
	"fmt"
	"maps"
	"slices"
	"strings"

	"github.com/cuvmm/cuvmm/internal/driver"
	"github.com/cuvmm/cuvmm/internal/errs"
)

// Waiting says how many closed objects and callbacks wait for the GPU.
func (s *System) Waiting() string {
	n := s.PendingReclaims()
	if n == 1 {
		return "1 closed object or callback waits for the GPU"
	}
	return fmt.Sprintf("%d closed objects or callbacks wait for the GPU", n)
}

// Stale is implemented by what may keep memory of a process that is gone, and was registered
// by Show: a follower.
type Stale interface {
	// StaleMemory returns the name of what the other process published, and how many bytes of
	// it on a device are kept; 0 while that process has the memory, too.
	StaleMemory(on driver.Device) (publication string, bytes uint64)
}

// Missing returns what could give memory to an allocation on a device that found none, and
// what to do about it; "" if the System knows of nothing.
func (s *System) Missing(on driver.Device, l Lack) (hint string) {
	var all []string
	if s.PendingReclaims() > 0 {
		all = append(all, s.Waiting()+": call Drain and try again")
	}
	if n := s.LeftoverBytes(on); n > 0 {
		all = append(all, errs.Bytes(n)+" are left of operations that failed, because the driver did not take them back: see System.Leftovers")
	}
	if stale := s.stale(on); stale != "" {
		all = append(all, "followers whose publishers are gone keep "+stale+": close them, or call publish.Client.CloseStale")
	}
	if others := s.others(on, l); others != "" {
		all = append(all, others)
	}
	return strings.Join(all, "; ")
}

// mostStale is how many publications Missing names.
const mostStale = 3

// stale lists by publication what Stale objects keep of a device's memory, the most first.
func (s *System) stale(on driver.Device) string {
	kept := map[string]uint64{}
	for _, x := range s.Shown() {
		if o, ok := x.(Stale); ok {
			if of, n := o.StaleMemory(on); n > 0 {
				kept[of] += n
			}
		}
	}
	names := slices.SortedFunc(maps.Keys(kept), func(a, b string) int {
		return cmp.Or(cmp.Compare(kept[b], kept[a]), cmp.Compare(a, b))
	})
	var all []string
	for _, name := range names[:min(len(names), mostStale)] {
		all = append(all, fmt.Sprintf("%s of %q", errs.Bytes(kept[name]), name))
	}
	var others uint64
	for _, name := range names[len(all):] {
		others += kept[name]
	}
	if others > 0 {
		all = append(all, errs.Bytes(others)+" of others")
	}
	return strings.Join(all, ", ")
}

// Withheld returns what to do if the software driver returns that there is no memory
// while it has that much free: then the system has none, or a test injected a fault. For
// a real driver, and if memory ran out, it is empty.
func (s *System) Withheld(size uint64, free int) string {
	if size > uint64(free) || !s.Drv.Describe().Software {
		return ""
	}
	return "the software driver has that much, but the operating system did not provide it: check ulimit -v and vm.overcommit_memory, or look for an injected fault"
}
