package core

import "fmt"

// Waiting says how many closed objects and callbacks wait for the GPU.
func (s *System) Waiting() string {
	n := s.PendingReclaims()
	if n == 1 {
		return "1 closed object or callback waits for the GPU"
	}
	return fmt.Sprintf("%d closed objects or callbacks wait for the GPU", n)
}

// Withheld is what to do if the software driver returns that there is no memory
// while it has that much free: then the system has none, or a test had it fail. Of a
// real driver, and if memory ran out, it is empty.
func (s *System) Withheld(size uint64, free int) string {
	if size > uint64(free) || !s.Drv.Describe().Software {
		return ""
	}
	return "the software driver has that much, but the system gave it none: look at ulimit -v and vm.overcommit_memory, or for an injected fault"
}
