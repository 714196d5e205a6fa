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

// views are the functions of users that look at memory of a range (Host). Its
// lock is a leaf, and nothing is called under it.
type views struct {
	n   atomic.Int32 // how many there are, so that others need not lock
	mu  sync.Mutex
	all []*view
}

// view is one such function, of the bytes from off to end, until done.
type view struct {
	off, end  uint64
	goroutine uint64
	done      chan struct{}
}

// run calls f, which was let in under a lock that what takes the memory away
// takes too: open was called there.
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

// rest is the end of a part that goes on to the end of the range.
const rest = math.MaxUint64

// over is a view of a part of the range, or nil.
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

// wait returns when the function has, or with an error where it is the caller
// itself that would wait for its own end.
func (v *view) wait(op string) error {
	if v.goroutine == core.Goroutine() {
		return v.inUse(op)
	}
	<-v.done
	return nil
}

// await waits until no function looks at a part of the range.
func (vs *views) await(op string, off, end uint64) error {
	for v := vs.over(off, end); v != nil; v = vs.over(off, end) {
		if err := v.wait(op); err != nil {
			return err
		}
	}
	return nil
}

// notInside refuses what waits for all functions, when it is one of them that
// calls.
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
		Asked: fmt.Sprintf("a function looks at %s of the memory (Host)", errs.Bytes(v.end-v.off)),
		Hint:  "let the function return first, or use the form with streams, which never blocks"})
}
