package cuda

import (
	"fmt"

	"github.com/cuvmm/cuvmm/internal/budget"
	"github.com/cuvmm/cuvmm/internal/errs"
	"github.com/cuvmm/cuvmm/internal/life"
)

type budgetHolder = budget.Holder

// Budget is one limit on the physical memory of several owners: buffers, pools and
// allocations, of any device and System. Memory is charged when it is made and credited when
// it is released, which for memory that the GPU still uses is later than its owner's Close.
// Memory that several owners share counts once, for the owner that made it. Imported memory
// does not count, because its maker has it.
//
// A Budget needs no Close. All methods are safe for concurrent use.
type Budget struct{ budgetHolder }

// BudgetOptions change how NewBudget makes a budget.
type BudgetOptions struct {
	// Name is what errors call the budget. A name has at most 128 bytes of printable UTF-8,
	// without spaces at its ends.
	Name string
	// Parent is a budget that this one's memory counts in, too. What either limit refuses
	// is refused.
	Parent *Budget
}

// NewBudget returns a budget of so many bytes; 0 is no limit, so that it only counts. Of
// invalid options it returns a budget that refuses all memory with ErrInvalidArgument.
func NewBudget(limit int, o BudgetOptions) *Budget {
	const op = "cuda.NewBudget"
	parent, err := budget.Of(op, o.Parent)
	if err == nil {
		err = life.Label{Name: o.Name}.Check(op)
	}
	if err == nil && limit < 0 {
		err = badLimit(op, limit)
	}
	return &Budget{budget.Hold(budget.New(o.Name, uint64(max(limit, 0)), parent, err))}
}

func badLimit(op string, limit int) error {
	return errs.Invalid(op, fmt.Sprintf("a limit of %d bytes", limit), "use a positive number of bytes, or 0 for no limit")
}

// SetLimit changes the limit; 0 is none. If more is committed, nothing is taken from the
// owners: new memory is refused until it fits.
func (b *Budget) SetLimit(limit int) error {
	const op = "cuda.Budget.SetLimit"
	in, err := b.made(op)
	switch {
	case err != nil:
		return err
	case limit < 0:
		return badLimit(op, limit)
	}
	in.SetLimit(uint64(limit))
	return nil
}

// OnPressure registers a function that gives memory of the budget back, or of budgets within
// it, before a request is refused. It is called for at least need bytes and returns how many
// it has given back, or will have once the GPU has passed them (CloseAfter, ClipAfter).
// Functions of lower priority are called first, one at a time, until there is enough. The
// library holds no lock meanwhile, and the function may close, clip and free anything. It
// must not make memory of the budget: that waits a second, and is refused if there is no
// room. A panic is logged and counts as 0. remove ends the registration, and is idempotent; a
// call that has begun goes on.
func (b *Budget) OnPressure(priority int, free func(need int) (freed int)) (remove func(), err error) {
	const op = "cuda.Budget.OnPressure"
	in, err := b.made(op)
	if err != nil {
		return nil, err
	}
	if free == nil {
		return nil, errs.NoFunction(op)
	}
	return in.OnPressure(priority, func(need uint64) uint64 { return uint64(max(free(int(need)), 0)) }), nil
}

// BudgetStats are a budget's numbers, in bytes.
type BudgetStats struct {
	// Name and Limit are the budget's; a Limit of 0 is none.
	Name  string
	Limit int
	// Committed is the physical memory that the owners have, and Peak the most that it ever
	// was. It exceeds Limit only after SetLimit.
	Committed, Peak int
	// Owners have the memory, the one with most first. Owners within budgets of which this
	// one is the parent are among them.
	Owners []BudgetUse
}

// BudgetUse is the memory of one owner, or of all owners of a tag.
type BudgetUse struct {
	// Kind is "buffer", "pool" or "allocation". Kind and Name are empty for a tag.
	Kind string
	Name string
	Tag  Tag
	// Committed is the memory that it has made and that was not released. After its Close that
	// is what forks, publications, or the GPU still use.
	Committed int
	// InUse is how much of its memory it uses: a buffer's length, or a pool's live blocks as
	// they were requested. Memory that another owner made and shares is included.
	InUse int
}

// Stats returns the budget's numbers. InUse is of a slightly later moment.
func (b *Budget) Stats() BudgetStats {
	in, _ := b.made("cuda.Budget.Stats")
	if in == nil {
		return BudgetStats{}
	}
	st := in.Stats()
	s := BudgetStats{Name: st.Name, Limit: int(st.Limit), Committed: int(st.Committed), Peak: int(st.Peak)}
	for _, h := range st.Holders {
		s.Owners = append(s.Owners, BudgetUse{Kind: h.Kind.String(), Name: h.Label.Name, Tag: Tag(h.Label.Tag), Committed: int(h.Committed), InUse: int(h.InUse)})
	}
	return s
}

// ByTag returns the memory of each tag, the one with most of a single owner first. Owners
// without a tag are summed under the empty one.
func (s BudgetStats) ByTag() (tags []BudgetUse) {
	at := map[Tag]int{}
	for _, o := range s.Owners {
		i, known := at[o.Tag]
		if !known {
			i = len(tags)
			at[o.Tag] = i
			tags = append(tags, BudgetUse{Tag: o.Tag})
		}
		tags[i].Committed += o.Committed
		tags[i].InUse += o.InUse
	}
	return tags
}

// made returns the inner state, or an error for a budget that NewBudget did not make.
func (b *Budget) made(op string) (*budget.Budget, error) {
	if b == nil {
		return nil, errs.Invalid(op, "a nil budget", "make one with cuda.NewBudget")
	}
	return budget.Of(op, b)
}
