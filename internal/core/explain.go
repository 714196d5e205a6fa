package core

import (
	"fmt"

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

// Missing returns what could give memory to an allocation on a device that found none, and
// what to do about it; "" if the System knows of nothing.
func (s *System) Missing(on driver.Device) (hint string) {
	if s.PendingReclaims() > 0 {
		hint = s.Waiting() + ": call Drain and try again"
	}
	if n := s.LeftoverBytes(on); n > 0 {
		if hint != "" {
			hint += "; "
		}
		hint += errs.Bytes(n) + " are left of operations that failed, because the driver did not take them back: see System.Leftovers"
	}
	return hint
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
