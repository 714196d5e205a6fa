package pages

import (
	"context"
	"fmt"
	"math"
	"slices"
	"time"

	"github.com/cuvmm/cuvmm/cuda"
	"github.com/cuvmm/cuvmm/internal/bulk"
	"github.com/cuvmm/cuvmm/internal/core"
	"github.com/cuvmm/cuvmm/internal/driver"
	"github.com/cuvmm/cuvmm/internal/suspend"
	"github.com/cuvmm/cuvmm/internal/vrange"
)

// A Range is a suspend.Member.
var _ suspend.Member = (*Range)(nil)

// Status implements suspend.Member.
func (r *Range) Status() *suspend.Status { return &r.status }

// Device returns the device that the range was made on.
func (r *Range) Device() *cuda.Device { return r.dev }

// Base is the address of the range.
func (r *Range) Base() driver.Ptr { return r.res.Base }

// Size returns the size of the range in bytes.
func (r *Range) Size() uint64 { return r.res.Size }

// Addresses implements suspend.Member.
func (r *Range) Addresses() []bulk.Segment {
	return []bulk.Segment{{Ptr: r.res.Base, Bytes: r.res.Size}}
}

// Kept implements suspend.Member: all bytes of the pages count.
func (r *Range) Kept() []bulk.Segment { return nil }

// Used implements suspend.Member: pages have no order, so that all are in use.
func (r *Range) Used() uint64 { return r.res.Size }

// What names the range in errors and reports.
func (r *Range) What() string { return fmt.Sprintf("the %s at %#x", r.Title(), uint64(r.res.Base)) }

// Acquire implements suspend.Member.
func (r *Range) Acquire(op string) error { return r.acquire(op) }

// Release implements suspend.Member.
func (r *Range) Release() { r.Closer.Release() }

// Closed implements suspend.Member.
func (r *Range) Closed() bool { return r.Closer.Closed() }

// Begin implements suspend.Member.
func (r *Range) Begin(op string, step func()) error {
	r.mu.Lock()
	defer r.mu.Unlock()
	if err := r.awake(op); err != nil {
		return err
	}
	if n := r.res.Stuck(); n > 0 {
		return r.errStuck(op, n)
	}
	step()
	return nil
}

// Step implements suspend.Member.
func (r *Range) Step(step func()) {
	r.mu.Lock()
	defer r.mu.Unlock()
	step()
}

// Lock implements suspend.Member.
func (r *Range) Lock() { r.changes.Lock() }

// Unlock implements suspend.Member.
func (r *Range) Unlock() { r.changes.Unlock() }

// Settle unmaps what lies under holes, and where the range's pages lay before, once the GPU has
// passed it. Pages that are free then go back to the driver, and so do all free ones of a
// source without another range.
func (r *Range) Settle(ctx context.Context, op string) error {
	if err := r.awaitHoles(ctx, op); err != nil {
		return err
	}
	for pause := shortestPause; ; pause = min(2*pause, longestPause) {
		done, err := r.settle(op)
		if done || err != nil {
			return err
		}
		wait := time.NewTimer(pause)
		select {
		case <-wait.C:
		case <-ctx.Done():
			wait.Stop()
			return fmt.Errorf("%s: waiting for work of the GPU: %w", op, context.Cause(ctx))
		}
	}
}

func (r *Range) settle(op string) (done bool, err error) {
	s := r.source
	s.turn.Lock()
	defer s.turn.Unlock()
	s.advance()
	var old []*place
	s.mu.Lock()
	done = true
	for _, at := range r.places.all() {
		for _, o := range at.page.places {
			switch {
			case o.live, o.in != r && o.in.null != nil:
			case o.passed():
				old = append(old, o)
			default:
				done = false
			}
		}
	}
	var freed holding
	for _, o := range old {
		freed.addLocked(s, o.page)
	}
	alone := len(s.ranges) == 1
	s.mu.Unlock()
	if len(old) == 0 {
		if done && alone {
			_, err = s.trim(op, math.MaxUint64)
		}
		return done, err
	}
	err = s.unmap(op, old)
	rest, _ := s.release(op, freed) // what is refused is a leftover
	s.end(op, rest)
	return false, err
}

// AddTo adds nothing to the fence: Settle has waited for the library's copies.
func (r *Range) AddTo(f *core.Fence) { f.AddStreams(r.copying()) }

// Mappings implements suspend.Member.
func (r *Range) Mappings() []*vrange.Mapping {
	all := r.res.All()
	if r.null == nil {
		return all
	}
	return slices.DeleteFunc(all, func(m *vrange.Mapping) bool { return m.Memory == r.null }) // which stays
}

// copying returns the streams on which this library has copied from or to the range.
func (r *Range) copying() (streams []*core.Stream) {
	s := r.source
	s.mu.Lock()
	defer s.mu.Unlock()
	r.copied.settle()
	for _, p := range r.copied.after {
		streams = append(streams, p.lane.stream)
	}
	return streams
}
