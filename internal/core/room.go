package core

import (
	"context"
	"time"

	"github.com/cuvmm/cuvmm/internal/budget"
)

// MakeRoom has memory given back to a budget that refused a request, and reports whether a
// next try may succeed: it tears down what was closed and has passed, then asks the owners,
// and then waits, while something is to come and until ctx ends, as long as an allocation does
// (Config.AllocationWait). The caller holds no lock.
func (s *System) MakeRoom(ctx context.Context, lack *budget.Shortage) bool {
	deadline, round, asked := time.Now().Add(s.Config.AllocationWait), s.leftovers.newRound(), false
	for pause := shortestPause; ; pause = min(2*pause, longestPause) {
		s.settle(round)
		switch {
		case lack.Fits():
			return true
		case !asked:
			asked = true
			lack.Ask(func(f func()) { s.Hook("cuda.Budget.OnPressure", f) })
			continue
		case s.PendingReclaims() == 0 || time.Now().After(deadline):
			return false
		}
		select {
		case <-ctx.Done():
			return false
		case <-time.After(pause):
		}
	}
}
