package suspend

import (
	"context"

	"github.com/cuvmm/cuvmm/internal/phys"
)

// Forget gives up what is kept of members that sleep; none stands for all that do. Bytes that
// a member needs which is not named are kept. It waits for an OutAfter or a Resume that runs.
func (s *Suspension) Forget(ctx context.Context, op string, members []Member) error {
	end, err := s.begin(ctx, op, members)
	if err != nil {
		return err
	}
	defer end()
	var dropped, others []*place
	for _, p := range s.sleeping() {
		switch {
		case p.m.Status().State() != Suspended || p.m.Acquire(op) != nil:
			continue // it is awake, or was closed
		case names(members, p.m):
			dropped = append(dropped, p)
		default:
			others = append(others, p)
		}
		defer p.m.Release()
	}
	return locked(append(dropped, others...), func() error {
		needed := newPlan(others).byName
		for h := range newPlan(dropped).byName {
			if needed[h] == nil {
				s.forget(h)
			}
		}
		s.resize()
		return nil
	})
}

func (s *Suspension) forget(h *phys.Handle) {
	s.mu.Lock()
	c := s.chunks[h]
	s.mu.Unlock()
	if c != nil {
		c.forget()
	}
}
