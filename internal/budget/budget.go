// Package budget counts physical memory against limits that several owners share. Memory is
// charged to the account of the owner that makes it, and credited when it is released, so
// memory with several owners counts once.
package budget

import (
	"cmp"
	"slices"

	"github.com/cuvmm/cuvmm/internal/errs"
	"github.com/cuvmm/cuvmm/internal/life"
	"github.com/cuvmm/cuvmm/internal/lock"
)

// Budget is the inner state of a cuda.Budget.
type Budget struct {
	// Serial numbers the budgets of a process from 1; no number is reused.
	Serial int64
	name   string
	parent *Budget
	// err says why the budget's options are invalid: it refuses all memory.
	err  error
	tree *tree

	// Guarded by the tree's lock.
	limit           uint64 // 0: none
	committed, peak uint64
	holders         map[*Account]struct{} // accounts of this budget and of those below that have memory
}

// tree is what a budget shares with those above and below it. One lock guards them all, so
// that a charge is checked and made on each level at once.
type tree struct {
	mu     lock.Mutex[lock.Leaf]
	owners []*owner      // by priority
	asking chan struct{} // full while owners are asked
}

// New makes a budget within a parent, which may be nil.
func New(name string, limit uint64, parent *Budget, err error) *Budget {
	b := &Budget{name: name, parent: parent, err: err, limit: limit, holders: map[*Account]struct{}{}}
	if parent != nil {
		b.tree = parent.tree
	} else {
		b.tree = &tree{asking: make(chan struct{}, 1)}
	}
	if err == nil {
		made.add(b)
	}
	return b
}

// Parent returns the budget that this one's memory counts in, too, or nil.
func (b *Budget) Parent() *Budget { return b.parent }

// Account is the memory of one owner within a budget. A nil Account has no limit.
type Account struct {
	budget *Budget
	kind   life.Kind
	label  life.Label

	// Guarded by the tree's lock.
	committed uint64
	inUse     func() uint64
}

// Account returns the account of an owner. A nil Budget has none. inUse is how much of its
// memory the owner uses; it is called without a lock.
func (b *Budget) Account(k life.Kind, l life.Label, inUse func() uint64) *Account {
	if b == nil {
		return nil
	}
	return &Account{budget: b, kind: k, label: l, inUse: inUse}
}

// Twin returns the account of another owner of the same kind, within the same budget.
func (a *Account) Twin(inUse func() uint64) *Account {
	if a == nil {
		return nil
	}
	return a.budget.Account(a.kind, a.label, inUse)
}

// Pass makes the account that of the owner's successor.
func (a *Account) Pass(inUse func() uint64) {
	if a == nil {
		return
	}
	a.budget.tree.mu.Lock()
	defer a.budget.tree.mu.Unlock()
	a.inUse = inUse
}

// Charge counts n bytes, on every level or on none. The error is a *[Shortage].
func (a *Account) Charge(n uint64) error {
	if a == nil {
		return nil
	}
	t := a.budget.tree
	t.mu.Lock()
	defer t.mu.Unlock()
	for b := a.budget; b != nil; b = b.parent {
		if b.lackingLocked(n) > 0 {
			return &Shortage{b, n, n}
		}
	}
	a.committed += n
	for b := a.budget; b != nil; b = b.parent {
		b.committed += n
		b.peak = max(b.peak, b.committed)
		b.holders[a] = struct{}{}
	}
	return nil
}

// Credit takes n bytes back that Charge counted.
func (a *Account) Credit(n uint64) {
	if a == nil {
		return
	}
	t := a.budget.tree
	t.mu.Lock()
	defer t.mu.Unlock()
	if n > a.committed {
		panic("budget: credit of memory that was not charged")
	}
	a.committed -= n
	for b := a.budget; b != nil; b = b.parent {
		b.committed -= n
		if a.committed == 0 {
			delete(b.holders, a)
		}
	}
}

// lackingLocked returns how many bytes must be given back before n more fit. The caller holds
// the tree's lock.
func (b *Budget) lackingLocked(n uint64) uint64 {
	if b.limit == 0 || b.committed+n <= b.limit {
		return 0
	}
	return b.committed + n - b.limit
}

// Remaining returns how many bytes can be charged yet, on every level.
func (a *Account) Remaining() uint64 {
	n := ^uint64(0)
	if a == nil {
		return n
	}
	a.budget.tree.mu.Lock()
	defer a.budget.tree.mu.Unlock()
	for b := a.budget; b != nil; b = b.parent {
		if b.limit > 0 {
			n = min(n, b.limit-min(b.limit, b.committed))
		}
	}
	return n
}

// SetLimit changes the limit. Nothing is taken from the owners.
func (b *Budget) SetLimit(limit uint64) {
	b.tree.mu.Lock()
	defer b.tree.mu.Unlock()
	b.limit = limit
}

// Use is the memory of one account.
type Use struct {
	Kind             life.Kind
	Label            life.Label
	Committed, InUse uint64
}

// Stats are a budget's numbers.
type Stats struct {
	Name                   string
	Limit, Committed, Peak uint64
	Holders                []Use // the largest first
}

// Stats returns the budget's numbers, and those of the accounts of this budget and of those
// below.
func (b *Budget) Stats() Stats {
	s, inUse := b.numbers()
	for i, f := range inUse {
		s.Holders[i].InUse = f()
	}
	s.sort()
	return s
}

// sort puts the largest holder first.
func (s *Stats) sort() {
	slices.SortFunc(s.Holders, func(x, y Use) int {
		return cmp.Or(cmp.Compare(y.Committed, x.Committed), cmp.Compare(x.Label.Name, y.Label.Name), cmp.Compare(x.Label.Tag, y.Label.Tag))
	})
}

// Numbers returns the Stats without the accounts, so that its time does not depend on them.
func (b *Budget) Numbers() Stats {
	b.tree.mu.Lock()
	defer b.tree.mu.Unlock()
	return Stats{Name: b.name, Limit: b.limit, Committed: b.committed, Peak: b.peak}
}

// numbers are the Stats at one moment, but for what is in use: an owner says that with locks
// of its own.
func (b *Budget) numbers() (s Stats, inUse []func() uint64) {
	b.tree.mu.Lock()
	defer b.tree.mu.Unlock()
	s = Stats{Name: b.name, Limit: b.limit, Committed: b.committed, Peak: b.peak}
	for a := range b.holders {
		s.Holders = append(s.Holders, Use{a.kind, a.label, a.committed, 0})
		inUse = append(inUse, a.inUse)
	}
	return s, inUse
}

// Holder is embedded, unexported, by cuda.Budget.
type Holder struct{ b *Budget }

// Hold makes the holder.
func Hold(b *Budget) Holder { return Holder{b} }

func (h *Holder) inner() *Budget { return h.b }

// Of looks inside a *cuda.Budget for an operation. It returns nil for a nil one, and refuses
// one that NewBudget did not make, or could not make.
func Of[H interface {
	comparable
	inner() *Budget
}](op string, h H) (*Budget, error) {
	var none H
	if h == none {
		return nil, nil
	}
	b := h.inner()
	if b == nil {
		return nil, errs.Invalid(op, "a zero budget", "make one with cuda.NewBudget")
	}
	return b, b.err
}
