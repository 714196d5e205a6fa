package vmm

import (
	"fmt"
	"math"
	"slices"
	"sync"
	"sync/atomic"

	"github.com/cuvmm/cuvmm/internal/errs"
)

// views are the running Host functions that use memory of a range. Its lock is a leaf,
// and no function is called under it.
type views struct {
	n   atomic.Int32 // the length of all, which saves others the lock
	mu  sync.Mutex
	all []*view
}

// view is one such function, which uses the bytes from off to end.
type view struct{ off, end uint64 }

// run calls f. The caller has called open with a lock held that every operation takes
// which takes the memory away.
func (vs *views) run(v *view, f func() error) error {
	defer vs.close(v)
	return f()
}

func (vs *views) open(off, size uint64) *view {
	v := &view{off, off + size}
	vs.mu.Lock()
	defer vs.mu.Unlock()
	vs.all = append(vs.all, v)
	vs.n.Add(1)
	return v
}

func (vs *views) close(v *view) {
	vs.mu.Lock()
	defer vs.mu.Unlock()
	vs.all = slices.DeleteFunc(vs.all, func(o *view) bool { return o == v })
	vs.n.Add(-1)
}

// rest is the end of a part that extends to the end of the range.
const rest = math.MaxUint64

// over reports whether a function uses a part of the range, and how many bytes.
func (vs *views) over(off, end uint64) (bytes uint64, uses bool) {
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

// none refuses to take a part of the range away that a function uses. The caller holds
// the lock that open was called with.
func (vs *views) none(op string, off, end uint64) error {
	bytes, uses := vs.over(off, end)
	if !uses {
		return nil
	}
	return errs.New(errs.Failure{Op: op, Kind: errs.InUse,
		Asked: fmt.Sprintf("a Host function uses %s of the memory", errs.Bytes(bytes)),
		Hint:  "let the function return first; CloseAfter and ClipAfter take effect behind it"})
}
