package vrange

import (
	"fmt"
	"math"
	"slices"
	"sync/atomic"

	"github.com/cuvmm/cuvmm/internal/errs"
	"github.com/cuvmm/cuvmm/internal/lock"
)

// Views are the running Host functions that use memory of a range. Its lock is a leaf,
// and no function is called under it.
type Views struct {
	n   atomic.Int32 // the length of all, which saves others the lock
	mu  lock.Mutex[lock.Leaf]
	all []*View
}

// View is one such function, which uses the bytes from off to end.
type View struct{ off, end uint64 }

// Run calls f. The caller has called Open with a lock held that every operation takes
// which takes the memory away.
func (vs *Views) Run(v *View, f func() error) error {
	defer vs.Close(v)
	return f()
}

// Open adds a function that uses a part of the range.
func (vs *Views) Open(off, size uint64) *View {
	v := &View{off, off + size}
	vs.mu.Lock()
	defer vs.mu.Unlock()
	vs.all = append(vs.all, v)
	vs.n.Add(1)
	return v
}

// Close removes a function, which has returned.
func (vs *Views) Close(v *View) {
	vs.mu.Lock()
	defer vs.mu.Unlock()
	vs.all = slices.DeleteFunc(vs.all, func(o *View) bool { return o == v })
	vs.n.Add(-1)
}

// End is the end of a part that extends to the end of the range.
const End = math.MaxUint64

// Over reports whether a function uses a part of the range, and how many bytes.
func (vs *Views) Over(off, end uint64) (bytes uint64, uses bool) {
	if vs.n.Load() == 0 {
		return 0, false
	}
	vs.mu.Lock()
	defer vs.mu.Unlock()
	for _, v := range vs.all {
		if v.off < end && off < v.end {
			return v.end - v.off, true
		}
	}
	return 0, false
}

// None refuses to take a part of the range away that a function uses. The caller holds
// the lock that Open was called with.
func (vs *Views) None(op string, off, end uint64) error {
	bytes, uses := vs.Over(off, end)
	if !uses {
		return nil
	}
	return errs.New(errs.Failure{Op: op, Kind: errs.InUse,
		Asked: fmt.Sprintf("a Host function uses %s of the memory", errs.Bytes(bytes)),
		Hint:  "let the function return first; CloseAfter and ClipAfter take effect behind it"})
}
