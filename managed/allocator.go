package managed

import (
	"errors"
	"maps"
	"runtime"
	"slices"
	"sync"

	"github.com/cuvmm/cuvmm/cuda"
	"github.com/cuvmm/cuvmm/internal/core"
	"github.com/cuvmm/cuvmm/internal/errs"
	"github.com/cuvmm/cuvmm/internal/life"
)

// Allocator makes managed memory on a device and owns it: closing the Allocator frees the
// memory, and every Buffer of it, including clones, returns ErrClosed from then on. So its
// Buffers need not be closed or retained. All methods are safe for concurrent use.
type Allocator struct{ a *allocator }

// allocator is the inner state, which its memory refers to.
type allocator struct {
	closer   life.Closer
	dev      *cuda.Device
	options  Options
	accesses accesses

	mu    sync.Mutex
	live  map[*memory]struct{}
	stats Stats
}

// Stats are an Allocator's counts.
type Stats struct {
	// Live allocations, and their bytes, now.
	Live  int
	Bytes int
	// PeakBytes is the most that Bytes ever was.
	PeakBytes int
	// Made and Freed are allocations ever.
	Made, Freed int
}

// NewAllocator makes an allocator of memory with these options. Their stream is used for
// allocations that name none. The caller closes it.
func NewAllocator(d *cuda.Device, o Options) (*Allocator, error) {
	const op = "managed.NewAllocator"
	if core.SystemOf(d) == nil {
		return nil, errs.NilDevice(op)
	}
	if err := o.check(op, core.SystemOf(d)); err != nil {
		return nil, err
	}
	a := &Allocator{&allocator{dev: d, options: o, live: map[*memory]struct{}{}}}
	runtime.AddCleanup(a, (*allocator).lost, a.a)
	return a, nil
}

// lost reports memory that can no longer be closed: the Allocator was collected, and with
// it all its Buffers, which retain it.
func (a *allocator) lost() {
	for _, m := range a.all() {
		m.Lost()
	}
}

// New makes n bytes, with the placement's prefetches on the stream; nil is the stream of
// the options. The caller closes the buffer, or the allocator.
func (a *Allocator) New(s *cuda.Stream, n int) (*Buffer, error) {
	return a.make("managed.Allocator.New", s, n)
}

func (a *Allocator) make(op string, s *cuda.Stream, n int) (*Buffer, error) {
	in, err := a.inner(op)
	if err != nil {
		return nil, err
	}
	if !in.closer.Acquire() {
		return nil, errs.ClosedError(op, "allocator")
	}
	defer in.closer.Release()
	o := in.options
	if s != nil {
		o.Stream = s
	}
	return newBuffer(op, in.dev, n, o, a)
}

// inner returns the inner state, or an error for an Allocator that no function made.
func (a *Allocator) inner(op string) (*allocator, error) {
	if a == nil || a.a == nil {
		return nil, errs.Invalid(op, "a nil allocator", "make one with NewAllocator")
	}
	return a.a, nil
}

// Device returns the device of the memory.
func (a *Allocator) Device() *cuda.Device { return a.a.dev }

// Stats returns the counts now.
func (a *Allocator) Stats() Stats {
	in := a.a
	in.mu.Lock()
	defer in.mu.Unlock()
	return in.stats
}

// Released returns the completion of the allocator's closing: from then on all its
// memory is back.
func (a *Allocator) Released() cuda.Completion {
	return a.a.closer.Completion()
}

// Close waits once for all work that could use the memory, and frees all of it. Buffers
// need not be closed before or after. While a Host function uses any of it, Close returns
// ErrInUse and the allocator stays open. If the driver does not free some of the memory, the rest is freed, and Close may be called again.
func (a *Allocator) Close() error {
	const op = "managed.Allocator.Close"
	in, err := a.inner(op)
	if err != nil {
		return err
	}
	if err := in.accesses.shut(op, nil, &in.closer.Life); err != nil {
		return err
	}
	return in.closer.Close(func() error {
		all := in.all()
		if len(all) == 0 {
			return nil
		}
		for _, m := range all {
			m.life.Close() // no operation begins on any
		}
		for _, m := range all {
			m.life.Wait()
		}
		if err := all[0].sys.WaitAll(op); err != nil {
			return err
		}
		var errs []error
		for _, m := range all {
			m.mu.Lock()
			errs = append(errs, m.free(op, false))
			m.mu.Unlock()
		}
		return errors.Join(errs...)
	})
}

// all returns the memory that is not freed.
func (a *allocator) all() []*memory {
	a.mu.Lock()
	defer a.mu.Unlock()
	return slices.Collect(maps.Keys(a.live))
}

func (a *allocator) made(m *memory) {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.live[m] = struct{}{}
	a.stats.Live++
	a.stats.Made++
	a.stats.Bytes += int(m.size)
	a.stats.PeakBytes = max(a.stats.PeakBytes, a.stats.Bytes)
}

func (a *allocator) freed(m *memory) {
	a.mu.Lock()
	defer a.mu.Unlock()
	delete(a.live, m)
	a.stats.Live--
	a.stats.Freed++
	a.stats.Bytes -= int(m.size)
}
