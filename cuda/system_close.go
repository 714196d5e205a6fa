package cuda

import (
	"sync"

	"github.com/cuvmm/cuvmm/internal/driver"
)

// process is the one real System of the process.
var process shared

// shared is a System that several users open, and close as often. Its lock is never
// held while the GPU works, so a System that stands still does not block Open.
type shared struct {
	mu    sync.Mutex
	sys   *System
	users int
}

// open returns the System, or makes it if there is none.
func (p *shared) open(newSystem func() (*System, error)) (*System, error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.sys == nil {
		s, err := newSystem()
		if err != nil {
			return nil, err
		}
		s.shared, p.sys = p, s
	}
	p.users++
	return p.sys, nil
}

// leave removes a user, unless it is the last.
func (p *shared) leave(s *System) bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.leaveLocked(s)
}

func (p *shared) leaveLocked(s *System) bool {
	if p.sys != s || p.users == 1 {
		return false
	}
	p.users--
	return true
}

// retire takes the System out of use for its last user, so that the next Open makes
// another. left says that there is another user by now.
func (p *shared) retire(s *System) (left, retired bool) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.leaveLocked(s) {
		return true, false
	}
	if !s.core.Retire() {
		return false, false
	}
	p.sys, p.users = nil, 0
	return false, true
}

// Close releases the driver. It tries the Leftovers again. While objects are live, closed
// objects and callbacks wait for the GPU, or leftovers remain, it changes nothing else and
// returns ErrInUse, which names them.
// Otherwise the System is out of use and the contexts that it retained are released.
// If that fails Close returns the error and can be called again; an Open meanwhile
// opens another System.
func (s *System) Close() error {
	if _, err := s.inner("cuda.System.Close"); err != nil {
		return err
	}
	if s.shared != nil && s.shared.leave(s) {
		return nil
	}
	s.closing.Lock()
	defer s.closing.Unlock()
	for !s.core.Closed() {
		s.core.Settle()
		var left, retired bool
		if s.shared == nil {
			retired = s.core.Retire()
		} else {
			left, retired = s.shared.retire(s)
		}
		if left {
			return nil
		}
		if retired {
			break
		}
		if err := s.core.InUse(); err != nil {
			return err
		}
	}
	return s.teardown()
}

// teardown releases what a System that is out of use holds. It remembers where it
// is.
func (s *System) teardown() error {
	const op = "cuda.System.Close"
	if s.gone {
		return nil
	}
	s.mu.Lock()
	transfers := s.transfers
	s.transfers = nil
	s.mu.Unlock()
	for _, t := range transfers {
		_ = t.close(op) // on the way out; the context goes next
	}
	if r := s.pinned.close(s.core); r != driver.Success {
		return s.core.CallError(op, driver.CallMemFreeHost, r, "idle pinned host memory")
	}
	if err := s.core.Close(); err != nil {
		return err
	}
	s.gone = true
	return nil
}
