package budget

import (
	"cmp"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/cuvmm/cuvmm/internal/errs"
)

// Shortage is why a budget refused memory.
type Shortage struct {
	at   *Budget // the level that refused
	need uint64
	want uint64 // what owners are asked for: at least need
}

// Extend says that the request is part of one that needs so many bytes at once, and will want
// so many in all.
func (s *Shortage) Extend(need, want uint64) {
	s.need = max(s.need, need)
	s.want = max(s.want, s.need, want)
}

func (s *Shortage) Error() string { return "not enough was given back" }

// shown are how many holders an error names.
const shown = 5

// Failure describes the refusal, and who has the budget's memory now.
func (s *Shortage) Failure(op string) errs.Failure {
	st, _ := s.at.numbers()
	st.sort()
	name := "a budget"
	if st.Name != "" {
		name = fmt.Sprintf("budget %q", st.Name)
	}
	f := errs.Failure{Op: op, Kind: errs.Budget, Err: s,
		Asked: fmt.Sprintf("%s of %s, which has %s of %s committed", errs.Bytes(s.need), name, errs.Bytes(st.Committed), errs.Bytes(st.Limit)),
		Hint:  "close or clip what has the memory, or raise the limit with Budget.SetLimit"}
	if s.need > st.Limit {
		f.Hint = "the request alone exceeds the limit: raise that with Budget.SetLimit"
	}
	var who []string
	for _, h := range st.Holders[:min(len(st.Holders), shown)] {
		who = append(who, fmt.Sprintf("%v%v %s", h.Kind, &h.Label, errs.Bytes(h.Committed)))
	}
	if more := st.Holders[len(who):]; len(more) > 0 {
		var rest uint64
		for _, h := range more {
			rest += h.Committed
		}
		who = append(who, fmt.Sprintf("%d more %s", len(more), errs.Bytes(rest)))
	}
	if len(who) > 0 {
		f.Asked += ": " + strings.Join(who, ", ")
	}
	return f
}

// lacking returns how many bytes must be given back before n more fit.
func (s *Shortage) lacking(n uint64) uint64 {
	s.at.tree.mu.Lock()
	defer s.at.tree.mu.Unlock()
	return s.at.lackingLocked(n)
}

// Lacking returns how many bytes must be given back before the request fits the budget that
// refused it.
func (s *Shortage) Lacking() uint64 { return s.lacking(s.need) }

// Fits reports whether the request would fit now.
func (s *Shortage) Fits() bool { return s.Lacking() == 0 }

// owner is who gives memory back when a budget lacks some.
type owner struct {
	budget   *Budget
	priority int
	free     func(need uint64) (freed uint64)
}

// OnPressure registers an owner of memory of the budget. Those of lower priority are asked
// first. remove is idempotent.
func (b *Budget) OnPressure(priority int, free func(need uint64) (freed uint64)) (remove func()) {
	t, o := b.tree, &owner{b, priority, free}
	t.mu.Lock()
	defer t.mu.Unlock()
	at, _ := slices.BinarySearchFunc(t.owners, priority, func(o *owner, p int) int {
		return cmp.Or(cmp.Compare(o.priority, p), -1) // behind those of the same priority
	})
	t.owners = slices.Insert(slices.Clone(t.owners), at, o)
	return func() {
		t.mu.Lock()
		defer t.mu.Unlock()
		t.owners = slices.DeleteFunc(slices.Clone(t.owners), func(other *owner) bool { return other == o })
	}
}

// within reports whether the budget is another one or below it.
func (b *Budget) within(other *Budget) bool {
	for ; b != nil; b = b.parent {
		if b == other {
			return true
		}
	}
	return false
}

// otherAsker is how long a request waits while owners are asked for another one. It may be the
// request of an owner that is being asked, which would wait for itself.
const otherAsker = time.Second

// Ask asks the owners within the budget that refused the request, one at a time, until the
// request fits, or they have said that enough will come. The caller holds no lock. hook calls
// a function of a user.
func (s *Shortage) Ask(hook func(f func())) {
	t := s.at.tree
	late := time.NewTimer(otherAsker)
	defer late.Stop()
	select {
	case t.asking <- struct{}{}:
	case <-late.C:
		return
	}
	defer func() { <-t.asking }()
	t.mu.Lock()
	owners := t.owners
	t.mu.Unlock()
	lacking, coming := s.lacking(s.want), uint64(0) // coming: given back, and not credited yet
	for _, o := range owners {
		if lacking <= coming {
			return
		}
		if !o.budget.within(s.at) {
			continue
		}
		freed := uint64(0)
		hook(func() { freed = min(o.free(lacking-coming), lacking) })
		before := lacking
		lacking = s.lacking(s.want)
		coming += freed - min(freed, before-min(before, lacking))
	}
}
