package suspend

import (
	"context"

	"github.com/cuvmm/cuvmm/cuda"
	"github.com/cuvmm/cuvmm/internal/bulk"
	"github.com/cuvmm/cuvmm/internal/core"
	"github.com/cuvmm/cuvmm/internal/driver"
	"github.com/cuvmm/cuvmm/internal/vrange"
)

// Member is memory that can be suspended. What a Suspension does to it is done by one
// goroutine at a time, between Acquire and Release.
type Member interface {
	Status() *Status
	// System, Device and Base are fixed for life. Base is the address by which members are
	// ordered, and their locks.
	System() *core.System
	Device() *cuda.Device
	Base() driver.Ptr
	// Addresses returns the member's addresses. They do not change while it sleeps.
	Addresses() []bulk.Segment
	// What names the member in errors and reports.
	What() string

	// Acquire keeps the member open until Release. Closed reports that it is to be closed.
	Acquire(op string) error
	Release()
	Closed() bool

	// Begin refuses a suspension that the member does not permit now. It calls step, which
	// changes the state, under the lock under which work on the memory is submitted, so that
	// none is submitted afterwards. Step calls it under the same lock, and refuses nothing.
	Begin(op string, step func()) error
	Step(step func())
	// Lock excludes the member's own changes until Unlock. It waits for one that runs.
	Lock()
	Unlock()
	// Settle finishes changes that wait for the GPU. The caller has locked the member.
	Settle(ctx context.Context, op string) error
	// AddTo adds work on the memory to a fence that the caller of SuspendAfter could not
	// name. The member is locked.
	AddTo(f *core.Fence)

	// Mappings returns the member's mappings in the order of their addresses, and Used how
	// many of its first bytes are in use. The member is locked.
	Mappings() []*vrange.Mapping
	Used() uint64
	// Kept returns the bytes that count, in the order of their addresses, and nil if all do. The
	// others are undefined after Resume. The member is locked.
	Kept() []bulk.Segment
}
