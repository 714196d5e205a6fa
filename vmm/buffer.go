package vmm

import (
	"errors"
	"fmt"
	"slices"
	"sync/atomic"

	"github.com/cuvmm/cuvmm/cuda"
	"github.com/cuvmm/cuvmm/internal/budget"
	"github.com/cuvmm/cuvmm/internal/core"
	"github.com/cuvmm/cuvmm/internal/driver"
	"github.com/cuvmm/cuvmm/internal/errs"
	"github.com/cuvmm/cuvmm/internal/life"
	"github.com/cuvmm/cuvmm/internal/lock"
	"github.com/cuvmm/cuvmm/internal/memspec"
	"github.com/cuvmm/cuvmm/internal/share"
	"github.com/cuvmm/cuvmm/internal/suspend"
)

// Buffer is GPU memory that grows and shrinks in place: its address is fixed
// for life. It is a reservation with a run of chunks at its front.
//
// Len bytes are in use, of Committed bytes of memory, of Reserved bytes of
// address space (BufferStats). All methods are safe for concurrent use; changes of
// one buffer run one after the other. If the Buffer is nil or was not made by this
// package, methods that return an error return ErrInvalidArgument.
type Buffer struct {
	shared
	sleeper
	b       *buffer
	watched life.Watched
}

// BufferOptions describe a buffer. The zero value is a buffer in the device's
// memory that can grow to all of it.
type BufferOptions struct {
	// Reserve is how far the buffer can grow, in bytes, rounded up to the
	// granularity. 0 is the size of the device's memory, halved as often as
	// necessary if there is not enough address space.
	Reserve int
	// Hint is the preferred address, so that several processes can use the same one
	// for the same data. The driver may ignore it: check Ptr.
	Hint cuda.Ptr
	// Align is a power of two that the address is a multiple of; 0 is the
	// granularity.
	Align int
	// Chunks determines the sizes of the pieces that memory is created in.
	Chunks ChunkPlan
	// Memory describes the memory to create.
	Memory Properties
	// Access is the access of places. The device itself and, for memory on the
	// host, the memory's own location have read-write access unless they are
	// named here; all other places have none.
	Access []Access
	// Name is what errors and snapshots call the buffer, and those that Move and Fork make
	// of it. Names need not differ. A name has at most 128 bytes of printable UTF-8, without
	// spaces at its ends.
	Name string
	// Tag is the group that the buffer belongs to, and those that Move and Fork make of it.
	Tag cuda.Tag
	// Budget limits the memory that the buffer makes, and that those make which Move and Fork
	// make of it. Memory that the budget has no room for is refused with cuda.ErrBudget, after
	// the functions of its OnPressure were called. nil is no limit.
	Budget *cuda.Budget
}

type (
	shared  = share.Holder
	sleeper = suspend.Holder
)

// buffer is the inner state.
type buffer struct {
	core.Object
	closer  life.Closer
	copies  copies
	pending pendingJobs
	status  suspend.Status
	dev     *cuda.Device
	res     *reservation
	prop    driver.AllocationProp
	gran    uint64
	align   int // as requested, for Move and Fork
	chosen  Granularity
	plan    ChunkPlan
	account *budget.Account // of the memory that it makes; nil for none
	// imported is nil for the process's own memory.
	imported *imported
	holds    holds
	// successor is the address of the buffer that this one was moved to; moved is the
	// buffer that this one was moved from, until that has been torn down.
	successor atomic.Uint64
	moved     *buffer
	gone      atomic.Bool

	// changes is held by a change of the buffer until the change is complete, which
	// may wait for the GPU.
	changes changes
	// appending is the stream that the running change submits to, guarded by
	// changes.
	appending *core.Stream
	// mu guards the fields below, which only changes write. Copies hold it for
	// reading, so that neither memory nor access is taken between their check and
	// their submission; a change holds it while it edits a list. No code waits for
	// anything while it holds mu.
	mu     lock.RWMutex[lock.Buffer]
	access accessList
	chunks []chunk
	// tail holds chunks behind the committed ones that were clipped and wait for
	// the GPU: still mapped, in the order of their addresses.
	tail []chunk
	// used and committed are read without a lock, and changed under changes.
	used, committed atomic.Uint64
	grown           atomic.Uint64
}

// NewBuffer makes an empty buffer: it reserves address space and creates no memory
// yet. The caller closes it.
func NewBuffer(d *cuda.Device, o BufferOptions) (*Buffer, error) {
	return makeBuffer("vmm.NewBuffer", d, o)
}

func makeBuffer(op string, d *cuda.Device, o BufferOptions) (*Buffer, error) {
	b, err := newBuffer(op, d, o, 0)
	if err != nil {
		return nil, err
	}
	return b.public(), nil
}

// Requested returns the properties that the buffer's memory is created with, every
// default resolved.
func (b *Buffer) Requested() Properties {
	in := b.b
	return properties(in.prop, in.chosen)
}

// inner returns the inner state, or nil for a Buffer that no function made. Methods
// that return errors refuse nil (acquire).
func (b *Buffer) inner() *buffer {
	if b == nil {
		return nil
	}
	return b.b
}

// public returns a Buffer of the inner state, whose loss is reported.
func (b *buffer) public() *Buffer {
	made := b.handle()
	b.Watch(&made.watched)
	return made
}

// handle returns a Buffer of the inner state that its user may lose.
func (b *buffer) handle() *Buffer {
	return &Buffer{shared: share.HoldMemory(b), sleeper: suspend.Hold(sleepingBuffer{b}), b: b}
}

// newBuffer makes a buffer that can grow to at least need bytes.
func newBuffer(op string, d *cuda.Device, o BufferOptions, need uint64) (*buffer, error) {
	label := life.Label{Name: o.Name, Tag: string(o.Tag)}
	if err := label.Check(op); err != nil {
		return nil, err
	}
	within, err := budget.Of(op, o.Budget)
	if err != nil {
		return nil, err
	}
	prop, gran, err := o.Memory.resolve(op, d)
	if err != nil {
		return nil, err
	}
	plan, err := o.Chunks.resolve(op, gran)
	if err != nil {
		return nil, err
	}
	access, err := bufferAccess(op, d, prop.Location, o.Access)
	if err != nil {
		return nil, err
	}
	if o.Reserve < 0 || o.Reserve > memspec.MaxBytes {
		return nil, errReserve(op, o.Reserve)
	}
	res, err := reserveFor(op, d, uint64(o.Reserve), need, gran, ReserveOptions{Align: o.Align, Hint: o.Hint})
	if err != nil {
		return nil, err
	}
	b := &buffer{dev: d, res: res, prop: prop, gran: gran, align: o.Align, chosen: o.Memory.Granularity, plan: plan, access: access}
	b.account = within.Account(life.KindBuffer, label, b.inUse)
	b.track(0, label)
	return b, nil
}

func errReserve(op string, bytes int) error {
	return errs.Invalid(op, fmt.Sprintf("a range of %s", errs.Bytes(bytes)),
		"reserve 0 for the device's memory, or a positive size of at most "+errs.Bytes(memspec.MaxBytes))
}

// track puts a new buffer into the list of live objects.
func (b *buffer) track(committed uint64, l life.Label) {
	b.SetLabel(l)
	b.res.System().Track(b, life.KindBuffer, committed)
}

// reserveFor reserves the requested bytes. If that is 0 it reserves the size of the device's
// memory, halved down to need while there is not enough address space.
func reserveFor(op string, d *cuda.Device, asked, need, gran uint64, o ReserveOptions) (*reservation, error) {
	// The memory may lie elsewhere, with another granularity than the device's.
	unit, err := addressUnit(op, d, gran)
	if err != nil {
		return nil, err
	}
	o.Align = alignFor(o.Align, gran)
	if asked > 0 {
		return reserve(op, d, int(roundUp(asked, unit)), o)
	}
	least := max(roundUp(need, unit), unit)
	size := max(roundUp(uint64(d.TotalMemory()), unit), least)
	for {
		r, err := reserve(op, d, int(size), o)
		if err == nil || size <= least || !errors.Is(err, cuda.ErrOutOfAddressSpace) {
			return r, err
		}
		size = max(roundUp(size/2, unit), least)
	}
}

// bufferAccess returns the access of a new buffer: read-write for the device itself
// and the memory's own location, and the access that the caller named.
func bufferAccess(op string, d *cuda.Device, memory driver.Location, named []Access) (accessList, error) {
	all := append([]Access(nil), named...)
	home := cuda.Location{Type: cuda.LocationType(memory.Type), ID: int(memory.ID)}
	for _, l := range []cuda.Location{d.Location(), home} {
		if !slices.ContainsFunc(all, func(a Access) bool { return a.Location == l }) {
			all = append(all, Access{l, ReadWrite})
		}
	}
	list, err := checkAccess(op, d.System(), memory, all)
	return accessList(nil).With(list), err
}

func roundUp(n, to uint64) uint64 { return (n + to - 1) / to * to }

// Ptr returns the address of the first byte, fixed for life.
func (b *Buffer) Ptr() cuda.Ptr { return cuda.Ptr(b.b.res.Base) }

// Len returns how many bytes are in use.
func (b *Buffer) Len() int { return int(b.b.used.Load()) }

// inUse is what a budget shows: nothing of a buffer that is closed.
func (b *buffer) inUse() uint64 {
	if b.closer.Closed() {
		return 0
	}
	return b.used.Load()
}

// withRoom changes the buffer, and again for as long as its budget refuses memory and can make
// room: without the buffer's locks, since what makes room may be of this buffer.
func (b *buffer) withRoom(change func() error) error {
	if b == nil || b.account == nil {
		return change()
	}
	return withRoom(b.res.System(), b.account, change)
}

// Name returns the name that the buffer was given, if any.
func (b *Buffer) Name() string { return b.b.Label().Name }

// Tag returns the tag that the buffer was given, if any.
func (b *Buffer) Tag() cuda.Tag { return cuda.Tag(b.b.Label().Tag) }

// Device returns the device that the buffer was made on.
func (b *Buffer) Device() *cuda.Device { return b.b.dev }

// BufferStats are a buffer's numbers.
type BufferStats struct {
	// Reserved bytes of address space, Committed bytes of memory, and Used
	// bytes of those.
	Reserved, Committed, Used int
	// Chunks of memory.
	Chunks int
	// Shared bytes of the committed memory belong to other buffers too, after Move or
	// Fork. System.Stats counts such memory once as allocated, and once as mapped for
	// each of its addresses.
	Shared int
	// Clipped bytes of memory are out of use but not yet freed: they wait for the
	// GPU after ClipAfter, or for the next Clip or Close after freeing them failed.
	Clipped int
	// Suspended bytes of the committed memory are not mapped here until Resume. A buffer that
	// shares them may have them back already: System.Stats counts what is not there.
	Suspended int
	// Grown is how often memory was added.
	Grown int
}

// Stats returns the buffer's numbers now.
func (b *Buffer) Stats() BufferStats {
	return b.b.stats()
}

func (b *buffer) stats() BufferStats {
	b.mu.RLock()
	defer b.mu.RUnlock()
	return BufferStats{
		Reserved:  int(b.res.Size),
		Committed: int(b.committed.Load()),
		Used:      int(b.used.Load()),
		Chunks:    len(b.chunks),
		Shared:    int(b.sharedLocked()),
		Suspended: int(b.awayLocked()),
		Grown:     int(b.grown.Load()),
		Clipped:   int(b.mappedLocked() - b.committed.Load() + b.res.Stuck()),
	}
}

// fail returns the error of an operation on the buffer, which it names.
func (b *buffer) fail(f errs.Failure) error {
	f.Object = b.Called()
	return errs.New(f)
}

func (b *buffer) errClosed(op string) error { return errs.ClosedError(op, b.Title()) }

// acquire starts an operation on the buffer; the caller calls closer.Release.
func (b *buffer) acquire(op string) error {
	if b == nil {
		return errNilBuffer(op)
	}
	if !b.closer.Acquire() {
		return b.errClosed(op)
	}
	return nil
}

// enter starts a change of the buffer, if its state permits the operation; the caller
// calls leave.
func (b *buffer) enter(op string, o operation) error {
	if err := b.acquire(op); err != nil {
		return err
	}
	if err := b.allow(op, o); err != nil { // rather than wait until its bytes have moved
		b.closer.Release()
		return err
	}
	b.changes.Lock()
	err := b.allow(op, o)
	if err != nil {
		b.leave()
	}
	return err
}

func (b *buffer) leave() {
	on := b.appending
	b.appending = nil
	b.changes.Unlock()
	if on != nil {
		b.copies.end(on) // a ClipAfter that began during the change has seen it by now
	}
	b.closer.Release()
}
