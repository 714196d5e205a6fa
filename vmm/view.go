package vmm

import (
	"fmt"
	"math"
	"slices"
	"sync"
	"sync/atomic"

	"github.com/cuvmm/cuvmm/internal/core"
	"github.com/cuvmm/cuvmm/internal/errs"
)

// views are the running Host functions that use memory of a range. Its lock is a leaf,
// and no function is called under it.
type views struct {
	n   atomic.Int32 // the length of all, which saves others the lock
	mu  sync.Mutex
	all []*view
}

// view is one such function, which uses the bytes from off to end until done is closed.
type view struct {
	off, end  uint64
	goroutine uint64
	done      chan struct{}
}

// run calls f. The caller has called open with a lock held that every operation takes
// which takes the memory away.
func (vs *views) run(v *view, f func() error) error {
	defer vs.close(v)
	return f()
}

func (vs *views) open(off, size uint64) *view {
	v := &view{off, off + size, core.Goroutine(), make(chan struct{})}
	vs.mu.Lock()
	defer vs.mu.Unlock()
	vs.all = append(vs.all, v)
	vs.n.Add(1)
	return v
}

func (vs *views) close(v *view) {
	vs.mu.Lock()
	vs.all = slices.DeleteFunc(vs.all, func(o *view) bool { return o == v })
	vs.n.Add(-1)
	vs.mu.Unlock()
	close(v.done)
}

// rest is the end of a part that extends to the end of the range.
const rest = math.MaxUint64

// over returns a view of a part of the range, or nil.
func (vs *views) over(off, end uint64) *view {
	if vs.n.Load() == 0 {
		return nil
	}
	vs.mu.Lock()
	defer vs.mu.Unlock()
	for _, v := range vs.all {
		if v.off < end && off < v.end {
			return v
		}
	}
	return nil
}

// wait waits until the function has returned. It returns an error if the function itself
// is the caller.
func (v *view) wait(op string) error {
	if v.goroutine == core.Goroutine() {
		return v.inUse(op)
	}
	<-v.done
	return nil
}

// await waits until no function uses a part of the range.
func (vs *views) await(op string, off, end uint64) error {
	for v := vs.over(off, end); v != nil; v = vs.over(off, end) {
		if err := v.wait(op); err != nil {
			return err
		}
	}
	return nil
}

// notInside refuses an operation that waits for all functions if one of them is the
// caller.
func (vs *views) notInside(op string, off, end uint64) error {
	if vs.n.Load() == 0 {
		return nil
	}
	vs.mu.Lock()
	defer vs.mu.Unlock()
	for g, i := core.Goroutine(), 0; i < len(vs.all); i++ {
		if v := vs.all[i]; v.goroutine == g && v.off < end && off < v.end {
			return v.inUse(op)
		}
	}
	return nil
}

func (v *view) inUse(op string) error {
	return errs.New(errs.Failure{Op: op, Kind: errs.InUse,
		Asked: fmt.Sprintf("a Host function uses %s of the memory", errs.Bytes(v.end-v.off)),
		Hint:  "let the function return first, or use the form with streams, which never blocks"})
}
