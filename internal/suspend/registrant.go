package suspend

import (
	"context"
	"slices"

	"github.com/cuvmm/cuvmm/internal/lock"
)

// Registrant knows a member's addresses elsewhere.
type Registrant struct {
	// Leave gives them up, once the GPU has passed and before any memory goes. Its error undoes the
	// suspension.
	Leave func(ctx context.Context) error
	// Back is called when they have memory again: after Resume, and after a suspension was undone
	// that had called Leave. The member is awake, and no lock is held.
	Back func()
}

// registrants are those of a member, in the order in which they came.
type registrants struct {
	mu  lock.Mutex[lock.Leaf]
	all []*Registrant
}

// AddRegistrant adds one until remove. While the member sleeps it is told from Resume on.
func (b *Status) AddRegistrant(r *Registrant) (remove func()) {
	b.told.mu.Lock()
	defer b.told.mu.Unlock()
	b.told.all = append(b.told.all, r)
	return func() {
		b.told.mu.Lock()
		defer b.told.mu.Unlock()
		b.told.all = slices.DeleteFunc(b.told.all, func(o *Registrant) bool { return o == r })
	}
}

func (p *place) registrants() []*Registrant {
	told := &p.m.Status().told
	told.mu.Lock()
	defer told.mu.Unlock()
	return slices.Clone(told.all)
}

// tellLeaving tells the registrants of the members that memory goes. Those that were told are told of
// its return if one fails, and if the suspension is undone later.
func (s *Suspension) tellLeaving(ctx context.Context) error {
	for _, p := range s.asked {
		for _, r := range p.registrants() {
			if err := r.Leave(ctx); err != nil {
				return err
			}
			p.left = append(p.left, r)
		}
	}
	return nil
}

// tellBack tells the registrants that a member left that it is awake.
func (p *place) tellBack() {
	for _, r := range p.left {
		r.Back()
	}
	p.left = nil
}
