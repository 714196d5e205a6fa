package core

import (
	"errors"
	"fmt"
	"strings"
	"time"

	"github.com/cuvmm/cuvmm/internal/driver"
	"github.com/cuvmm/cuvmm/internal/errs"
)

// shownLive is how many live objects an error names.
const shownLive = 5

// Closed reports whether the System was closed: its contexts are gone.
func (s *System) Closed() bool { return s.closed.Load() }

// settling is how long Settle waits for leftovers that have a goroutine of their own.
const settling = 100 * time.Millisecond

// Settle tears down what was closed and has passed, and tries the leftovers, before Retire. A
// leftover whose teardown may wait for the GPU has a goroutine of its own, which ends soon on
// an idle GPU.
func (s *System) Settle() {
	s.settle(s.leftovers.newRound())
	for end := time.Now().Add(settling); s.leftovers.count.Load() > 0 && s.PendingReclaims() > 0 && time.Now().Before(end); {
		time.Sleep(shortestPause)
		s.settle(0) // tries none again
	}
}

// Retire takes the System out of use, unless anything is live, pending or left over: then it
// changes nothing, at no moment, and InUse returns the reason. It waits for nothing.
func (s *System) Retire() bool {
	return s.Live.IfEmpty(func() bool {
		if s.PendingReclaims() > 0 || s.leftovers.count.Load() > 0 {
			return false
		}
		s.closed.Store(true)
		return true
	})
}

// InUse returns why the System cannot be closed, or nil if it could be by now.
func (s *System) InUse() error {
	if left := s.Leftovers(); len(left) > 0 {
		asked := fmt.Sprintf("%v, which the library could not give back after an operation that failed", left[0])
		if n := len(left) - 1; n > 0 {
			asked += fmt.Sprintf(" and %s more", errs.Count(n, "such leftover"))
		}
		if _, n := s.Live.DescribeBriefly(0); n > 0 {
			asked += fmt.Sprintf(" (%s live, parts of this included)", errs.Count(n, "object"))
		}
		return errs.New(errs.Failure{Op: "cuda.System.Close", Kind: errs.InUse, Asked: asked, Err: left[0].Err,
			Hint: "none of it is yours to close: Close and Drain try it again, and System.Leftovers lists it"})
	}
	if live, n := s.Live.DescribeBriefly(shownLive); n > 0 {
		asked := fmt.Sprintf("live objects: %s", strings.Join(live, ", "))
		if n > len(live) {
			asked += fmt.Sprintf(" and %d more", n-len(live))
		}
		if n := s.PendingReclaims(); n > 0 {
			asked += " (" + s.Waiting() + ")"
		}
		hint := "close them first, and call Drain for what waits for the GPU"
		if lost := s.Live.Lost(); lost > 0 {
			asked += fmt.Sprintf("; %s lost without Close", errs.Count(lost, "object"))
			hint += "; what is lost stays until the process ends (Options.TraceLeaks tells where it was made)"
		}
		return errs.New(errs.Failure{Op: "cuda.System.Close", Kind: errs.InUse, Asked: asked, Hint: hint})
	}
	if n := s.PendingReclaims(); n > 0 {
		return errs.New(errs.Failure{Op: "cuda.System.Close", Kind: errs.InUse, Asked: s.Waiting(),
			Hint: "call Drain first"})
	}
	return nil
}

// Close ends the System, which was retired: contexts are released and the driver
// is given back. After an error it can be called again, and does what is left to do.
func (s *System) Close() error {
	if err := s.closeAttached(); err != nil {
		return err
	}
	s.mu.Lock()
	contexts := s.knownContexts()
	s.mu.Unlock()
	var failed []error
	var left []*Context
	for _, c := range contexts {
		// A driver that is shutting down has released the context itself.
		if call, r := c.close(); r != driver.Success && r != driver.Deinitialized {
			failed = append(failed, c.CallError("cuda.System.Close", call, r, ""))
			left = append(left, c)
		}
	}
	s.mu.Lock()
	s.setContexts(left)
	s.mu.Unlock()
	if len(left) > 0 || s.Config.Close == nil {
		return errors.Join(failed...)
	}
	closeDriver := s.Config.Close
	s.Config.Close = nil // it reports once
	return closeDriver()
}
