package suspend

import (
	"context"
	"time"

	"github.com/cuvmm/cuvmm/internal/phys"
)

// Publication is memory of a member that other processes follow. They have it mapped, and unmap
// it when they are told.
type Publication interface {
	// MayRecall returns the error that Recall would return at once.
	MayRecall(op string) error
	// Recall has the followers unmap the memory, of which the publication has no count then.
	// The member is locked. With a limit Recall goes on without the followers that take longer,
	// and returns what they have. After an error they have all as before, or will.
	Recall(ctx context.Context, op string, limit time.Duration) ([]Late, error)
	// Show shows what there is again, of a member that is awake. If its bytes are not whole some of
	// them were neither kept nor filled.
	Show(whole bool)
	// Memory returns the memory of which the publication has a count each.
	Memory() []*phys.Handle
}

// Late is memory that a follower has which did not unmap it in time, and why it has that.
type Late struct {
	Memory *phys.Handle
	Why    string
}

// published is a Member that may have publications.
type published interface{ Publications() []Publication }

func publicationsOf(m Member) []Publication {
	if p, ok := m.(published); ok {
		return p.Publications()
	}
	return nil
}

// mayRecall refuses what a member's publications refuse at once.
func mayRecall(op string, m Member) error {
	for _, p := range publicationsOf(m) {
		if err := p.MayRecall(op); err != nil {
			return err
		}
	}
	return nil
}

// recall has the followers of the members unmap the memory. It returns why memory stays with those
// that are late.
func (s *Suspension) recall(ctx context.Context, op string) (late map[*phys.Handle]string, err error) {
	late = map[*phys.Handle]string{}
	for _, p := range s.asked {
		for _, shown := range publicationsOf(p.m) {
			all, err := shown.Recall(ctx, op, s.o.Followers)
			if err != nil {
				return nil, err
			}
			p.recalled = append(p.recalled, shown)
			for _, l := range all {
				late[l.Memory] = l.Why
			}
		}
	}
	return late, nil
}
