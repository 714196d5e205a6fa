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

func (b *Status) registrants() []*Registrant {
	b.told.mu.Lock()
	defer b.told.mu.Unlock()
	return slices.Clone(b.told.all)
}

// Leave tells the registrants that memory goes. It returns those that were told, which are told of
// its return, also if one fails.
func (b *Status) Leave(ctx context.Context) (left []*Registrant, err error) {
	for _, r := range b.registrants() {
		if err := r.Leave(ctx); err != nil {
			return left, err
		}
		left = append(left, r)
	}
	return left, nil
}

// tellLeaving tells the registrants of the members that memory goes. Those that were told are told of
// its return if one fails, and if the suspension is undone later.
func (s *Suspension) tellLeaving(ctx context.Context) (err error) {
	for _, p := range s.asked {
		if p.left, err = p.m.Status().Leave(ctx); err != nil {
			return err
		}
	}
	return nil
}

// tellBack tells the registrants that a member left, and then those who follow it, that it is awake.
func (p *place) tellBack() {
	for _, r := range p.left {
		r.Back()
	}
	for _, shown := range p.recalled {
		shown.Show(!p.blank)
	}
	p.left, p.recalled = nil, nil
}
