package vmm

import (
	"context"
	"fmt"

	"github.com/cuvmm/cuvmm/cuda"
	"github.com/cuvmm/cuvmm/internal/bulk"
	"github.com/cuvmm/cuvmm/internal/core"
	"github.com/cuvmm/cuvmm/internal/driver"
	"github.com/cuvmm/cuvmm/internal/errs"
	"github.com/cuvmm/cuvmm/internal/life"
	"github.com/cuvmm/cuvmm/internal/suspend"
	"github.com/cuvmm/cuvmm/internal/vrange"
)

// sleepingBuffer is a buffer as a member of a Suspension.
type sleepingBuffer struct{ *buffer }

func (b sleepingBuffer) Status() *suspend.Status { return &b.status }
func (b sleepingBuffer) Device() *cuda.Device    { return b.dev }
func (b sleepingBuffer) Base() driver.Ptr        { return b.res.Base }
func (b sleepingBuffer) Kept() []bulk.Segment    { return nil }
func (b sleepingBuffer) Addresses() []bulk.Segment {
	return []bulk.Segment{{Ptr: b.res.Base, Bytes: b.res.Size}}
}
func (b sleepingBuffer) What() string {
	return fmt.Sprintf("the %s at %#x", b.Title(), uint64(b.res.Base))
}
func (b sleepingBuffer) System() *core.System { return b.res.System() }
func (b sleepingBuffer) Closed() bool         { return b.closer.Closed() }
func (b sleepingBuffer) Lock()                { b.changes.Lock() }
func (b sleepingBuffer) Unlock()              { b.changes.Unlock() }
func (b sleepingBuffer) AddTo(f *core.Fence)  { b.copies.addTo(f) }

func (b sleepingBuffer) Acquire(op string) error {
	if err := b.acquire(op); err != nil {
		return err
	}
	b.copies.watch()
	return nil
}

func (b sleepingBuffer) Release() {
	b.copies.unwatch()
	b.closer.Release()
}

// Begin refuses memory that another process determines, or relies on.
func (b sleepingBuffer) Begin(op string, step func()) error {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.imported != nil {
		return errImportedSleeps(op, b.What(), b.imported.kept.Load())
	}
	if err := b.allow(op, sleeping); err != nil {
		return err
	}
	if err := b.res.Views.None(op, 0, vrange.End); err != nil {
		return err
	}
	step()
	return b.holds.unrecalled(op) // a hold asks for the state under the same lock
}

// Publications returns what other processes follow of the memory.
func (b sleepingBuffer) Publications() []suspend.Publication { return b.holds.publications() }

func errImportedSleeps(op, what string, kept bool) error {
	if kept {
		return errs.New(errs.Failure{Op: op, Kind: errs.NotSupported, Asked: what + ", whose memory a broker keeps",
			Hint: "it stays until it is removed there: see Client.Remove in package broker"})
	}
	return errs.New(errs.Failure{Op: op, Kind: errs.NotSupported, Asked: what + ", whose memory was imported",
		Hint: "let the process that created the memory suspend it, or close this one and import it again later"})
}

func (b sleepingBuffer) Step(step func()) {
	b.mu.Lock()
	defer b.mu.Unlock()
	step()
}

// Settle waits for the GPU to pass what was clipped, and frees it.
func (b sleepingBuffer) Settle(ctx context.Context, op string) error {
	if err := b.awaitTailLocked(ctx, op, b.res.Size); err != nil {
		return err
	}
	return b.trimLocked(op)
}

func (b sleepingBuffer) Mappings() []*vrange.Mapping {
	b.mu.RLock()
	defer b.mu.RUnlock()
	all := make([]*vrange.Mapping, len(b.chunks))
	for i, c := range b.chunks {
		all[i] = c.Mapping
	}
	return all
}

// sleepingMapping is a mapping as a member of a Suspension.
type sleepingMapping struct{ *mapping }

func (m sleepingMapping) Status() *suspend.Status { return &m.status }
func (m sleepingMapping) Base() driver.Ptr        { return m.Ptr() }
func (m sleepingMapping) Kept() []bulk.Segment    { return nil }
func (m sleepingMapping) Addresses() []bulk.Segment {
	return []bulk.Segment{{Ptr: m.Ptr(), Bytes: m.Memory.Size}}
}
func (m sleepingMapping) Used() uint64         { return m.Memory.Size }
func (m sleepingMapping) What() string         { return fmt.Sprintf("the mapping at %#x", uint64(m.Ptr())) }
func (m sleepingMapping) System() *core.System { return m.Range.System() }
func (m sleepingMapping) Closed() bool         { return m.closer.Closed() }
func (m sleepingMapping) Release()             { m.closer.Release() }
func (m sleepingMapping) AddTo(*core.Fence)    {}

// Changes of a mapping are changes of its range, which pauses it.
func (m sleepingMapping) Lock()   {}
func (m sleepingMapping) Unlock() {}

func (m sleepingMapping) Settle(context.Context, string) error { return nil }
func (m sleepingMapping) Mappings() []*vrange.Mapping          { return []*vrange.Mapping{m.Mapping} }

// Device is the one that the memory lies on, or for memory on the host the first.
func (m sleepingMapping) Device() *cuda.Device {
	at := 0
	if home := m.Memory.Asked.Location; home.Type == driver.LocationDevice {
		at = int(home.ID)
	}
	return m.Range.CUDA.Devices()[at]
}

func (m sleepingMapping) Acquire(op string) error {
	if !m.closer.Acquire() {
		return errs.ClosedError(op, "mapping")
	}
	return nil
}

func (m sleepingMapping) Begin(op string, step func()) error {
	switch {
	case m.Memory.Kind() == life.KindMulticast:
		return errs.New(errs.Failure{Op: op, Kind: errs.NotSupported, Asked: m.What() + ", which maps a multicast object",
			Hint: "close it, and map the object again later"})
	case m.Memory.Imported:
		return errImportedSleeps(op, m.What(), false)
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	if s := m.status.Sleep(); s != nil {
		return s.Error(op)
	}
	if err := m.Range.Views.None(op, m.Off, m.Off+m.Memory.Size); err != nil {
		return err
	}
	step()
	return nil
}

func (m sleepingMapping) Step(step func()) {
	m.mu.Lock()
	defer m.mu.Unlock()
	step()
}
