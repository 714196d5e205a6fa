package pages

import (
	"context"
	"errors"
	"fmt"
	"math"

	"github.com/cuvmm/cuvmm/cuda"
)

// fillBatch is how many pages a Fill makes before it measures again.
const fillBatch = 64

// Fill makes pages until one more would leave less than headroom of the memory that there is, or
// exceed the budget. It measures before each batch, since pages take more than their size, and
// other owners memory meanwhile. What it has made stays until Trim, or until memory is short.
func (s *Source) Fill(ctx context.Context, op string, headroom uint64) (err error) {
	before := s.keepPages(func() int { return math.MaxInt }) // also what is made meanwhile
	defer func() {
		s.keepPages(func() int {
			if err != nil {
				return min(before, s.stats.Pages)
			}
			return s.stats.Pages
		})
	}()
	for done := false; !done; {
		if ctx.Err() != nil {
			return fmt.Errorf("%s: %w", op, context.Cause(ctx))
		}
		if done, err = s.fillBatch(op, headroom); err != nil {
			return err
		}
	}
	return nil
}

func (s *Source) fillBatch(op string, headroom uint64) (done bool, err error) {
	s.turn.Lock()
	defer s.turn.Unlock()
	remains, err := s.Remaining(op)
	if err != nil {
		return false, err
	}
	if remains < headroom { // the last batch took more than the sizes of its pages
		_, err := s.trim(op, headroom-remains)
		return true, err
	}
	n := min((remains-headroom)/s.Page, s.Account.Remaining()/s.Page, fillBatch)
	for ; n > 0; n /= 2 {
		made, err := s.create(op, int(n), false)
		switch {
		case err == nil:
			s.end(op, made)
			return false, nil
		case !errors.Is(err, cuda.ErrOutOfMemory) && !errors.Is(err, cuda.ErrBudget):
			return false, err
		}
	}
	return true, nil
}

// keepPages changes how many pages upkeep keeps, and returns how many it has kept before.
func (s *Source) keepPages(to func() int) (before int) {
	s.mu.Lock()
	defer s.mu.Unlock()
	before, s.floor = s.floor, to()
	return before
}
