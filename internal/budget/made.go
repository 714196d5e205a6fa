package budget

import (
	"runtime"
	"slices"
	"weak"

	"github.com/cuvmm/cuvmm/internal/lock"
)

// made are the budgets of this process that the program can still reach, in the order in which they
// were made. A budget has no Close, so the list holds none.
var made list

type list struct {
	mu   lock.Mutex[lock.Leaf]
	last int64
	all  []weak.Pointer[Budget]
}

func (l *list) add(b *Budget) {
	p := weak.Make(b)
	l.mu.Lock()
	defer l.mu.Unlock()
	l.last++
	b.Serial = l.last
	l.all = append(l.all, p)
	runtime.AddCleanup(b, l.remove, p)
}

func (l *list) remove(p weak.Pointer[Budget]) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.all = slices.DeleteFunc(l.all, func(o weak.Pointer[Budget]) bool { return o == p })
}

// All returns the budgets of this process, without those that refuse all memory.
func All() (all []*Budget) {
	made.mu.Lock()
	defer made.mu.Unlock()
	for _, p := range made.all {
		if b := p.Value(); b != nil {
			all = append(all, b)
		}
	}
	return all
}
