package vmm

import (
	"errors"
	"fmt"
	"math/bits"
	"slices"
	"sync"
	"sync/atomic"

	"github.com/cuvmm/cuvmm/cuda"
	"github.com/cuvmm/cuvmm/internal/core"
	"github.com/cuvmm/cuvmm/internal/driver"
	"github.com/cuvmm/cuvmm/internal/errs"
	"github.com/cuvmm/cuvmm/internal/life"
	"github.com/cuvmm/cuvmm/internal/share"
)

// Buffer is GPU memory that grows and shrinks in place: its address is fixed
// for life. It is a reservation with a run of chunks at its front.
//
// Len bytes are in use, of Committed bytes of memory, of Reserved bytes of
// address space. All methods are safe for concurrent use; changes of one
// buffer run one after the other.
type Buffer struct {
	shared
	b       *buffer
	watched life.Watched
}

// BufferOptions describe a buffer. The zero value is a buffer in the device's
// memory that can grow to all of it.
type BufferOptions struct {
	// Reserve is how far the buffer can grow, in bytes, rounded up to the
	// granularity. 0 is the device's whole memory, or half of that and so on
	// where the address space is not to be had.
	Reserve int
	// Hint is the address that is wanted, so that several processes can have one
	// for the same thing. It is a hint: check Ptr.
	Hint cuda.Ptr
	// Align is a power of two that the address is a multiple of; 0 is the
	// granularity.
	Align int
	// Chunks is how memory is taken.
	Chunks ChunkPlan
	// Memory is what kind of memory is taken.
	Memory Properties
	// Access is for other places than the device itself and, for memory on the
	// host, the memory's own location: those have read-write access unless
	// they are named here.
	Access []Access
	// OnGrow, if set, is called after memory was added for the bytes from from up
	// to, not including, to, by the goroutine that made the buffer grow, with no
	// lock held: it may use the buffer. Calls for concurrent growth may overlap.
	OnGrow func(from, to int)
}

type shared = share.Holder

// buffer is the inner state.
type buffer struct {
	core.Object
	serial uint64 // see track
	closer life.Closer
	copies copies
	later  later
	dev    *cuda.Device
	res    *reservation
	prop   driver.AllocationProp
	gran   uint64
	align  int // as it was asked for, for Move and Fork
	chosen Granularity
	plan   ChunkPlan
	// imported is nil for the process's own memory.
	imported *imported
	holds    holds
	revoking revoking
	// successor is the address of the buffer that this one was moved to, and moved
	// the buffer that it was moved from, as long as that is not gone.
	successor atomic.Uint64
	moved     *buffer
	gone      atomic.Bool

	// changes is held by whatever changes the buffer, for as long as it takes:
	// one change runs after the other.
	changes changes
	// appending is the stream that the running change submits to, guarded by
	// changes.
	appending *core.Stream
	// added is what the running change has added memory for, guarded by changes.
	added  span
	onGrow func(from, to int)
	// mu guards what follows, which changes alone write. Copies hold it for
	// reading, so that no memory and no access goes between their check and
	// their submission; a change holds it while it edits a list. Nothing waits
	// for anything under it.
	mu     sync.RWMutex
	access accessList
	// refused are places that RevokeAfter is taking access from.
	refused map[driver.Location]int
	chunks  []*mapping
	// tail are chunks behind the committed ones that were clipped and wait for
	// the GPU: still mapped, in the order of their addresses.
	tail []*mapping
	// used and committed are read without a lock, and changed under changes.
	used, committed atomic.Uint64
	grown           atomic.Uint64
}

// NewBuffer makes an empty buffer: address space, and no memory yet. The caller
// closes it.
func NewBuffer(d *cuda.Device, o BufferOptions) (*Buffer, error) {
	return makeBuffer("vmm.NewBuffer", d, o)
}

func makeBuffer(op string, d *cuda.Device, o BufferOptions) (*Buffer, error) {
	b, err := newBuffer(op, d, o, 0)
	if err != nil {
		return nil, err
	}
	return b.shell(), nil
}

// Requested is what the buffer's memory is created with, every default decided.
func (b *Buffer) Requested() Properties {
	in := b.made("vmm.Buffer.Requested")
	return properties(in.prop, in.chosen)
}

// inner returns the inner state, nil for a Buffer that no function made. What
// returns errors refuses that (acquire).
func (b *Buffer) inner() *buffer {
	if b == nil {
		return nil
	}
	return b.b
}

// made is inner for methods that return no error: they panic with one.
func (b *Buffer) made(op string) *buffer {
	in := b.inner()
	if in == nil {
		panic(errNilBuffer(op))
	}
	return in
}

func (b *buffer) shell() *Buffer {
	shell := &Buffer{shared: share.HoldMemory(b), b: b}
	b.Watch(&shell.watched)
	return shell
}

// newBuffer makes a buffer that can grow to at least need bytes.
func newBuffer(op string, d *cuda.Device, o BufferOptions, need uint64) (*buffer, error) {
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
	if o.Reserve < 0 || o.Reserve > maxBytes {
		return nil, errs.Invalid(op, fmt.Sprintf("a range of %s", errs.Bytes(o.Reserve)),
			"reserve 0 for the device's memory, or a positive size of at most "+errs.Bytes(maxBytes))
	}
	res, err := reserveFor(op, d, uint64(o.Reserve), need, gran, ReserveOptions{Align: o.Align, Hint: o.Hint})
	if err != nil {
		return nil, err
	}
	b := &buffer{dev: d, res: res, prop: prop, gran: gran, align: o.Align, chosen: o.Memory.Granularity, plan: plan, access: access, onGrow: o.OnGrow}
	b.track(0)
	return b, nil
}

// serials number the buffers of the process, which gives two of them an order to
// be locked in.
var serials atomic.Uint64

// track puts a new buffer into the list of live objects.
func (b *buffer) track(committed uint64) {
	b.serial = serials.Add(1)
	b.res.System().Track(b, life.KindBuffer, committed)
}

// reserveFor reserves what was asked for, or, where nothing was, the device's
// memory, halved down to the need while there is no address space.
func reserveFor(op string, d *cuda.Device, asked, need, gran uint64, o ReserveOptions) (*reservation, error) {
	// The memory may lie elsewhere, with another granularity than the device's.
	unit, err := granule(op, d)
	if err != nil {
		return nil, err
	}
	unit = max(unit, gran)
	if o.Align >= 0 && bits.OnesCount(uint(o.Align)) <= 1 { // reserve refuses the others
		o.Align = max(o.Align, int(gran))
	}
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

// bufferAccess is who may touch a buffer: the device itself, the host where the
// memory lies there, and who was named.
func bufferAccess(op string, d *cuda.Device, memory driver.Location, named []Access) (accessList, error) {
	all := append([]Access(nil), named...)
	home := cuda.Location{Type: cuda.LocationType(memory.Type), ID: int(memory.ID)}
	for _, l := range []cuda.Location{d.Location(), home} {
		if !slices.ContainsFunc(all, func(a Access) bool { return a.Location == l }) {
			all = append(all, Access{l, ReadWrite})
		}
	}
	list, err := checkAccess(op, d.System(), memory, all)
	return accessList(nil).with(list), err
}

func roundUp(n, to uint64) uint64 { return (n + to - 1) / to * to }

// Ptr is the address of the first byte, fixed for life.
func (b *Buffer) Ptr() cuda.Ptr { return cuda.Ptr(b.made("vmm.Buffer.Ptr").res.base) }

// Len is how many bytes are in use.
func (b *Buffer) Len() int { return int(b.made("vmm.Buffer.Len").used.Load()) }

// Device is the device that the buffer was made on.
func (b *Buffer) Device() *cuda.Device { return b.made("vmm.Buffer.Device").dev }

// BufferStats are a buffer's numbers.
type BufferStats struct {
	// Reserved bytes of address space, Committed bytes of memory, and Used
	// bytes of those.
	Reserved, Committed, Used int
	// Chunks of memory.
	Chunks int
	// Shared bytes of the committed memory are other buffers' too, after Move or
	// Fork. System.Stats counts such memory once as allocated, and at each of its
	// addresses as mapped.
	Shared int
	// Clipped bytes of memory are out of use and still there: they wait for the
	// GPU after ClipAfter, or for the next Clip or Close where giving them back
	// failed.
	Clipped int
	// Grown is how often memory was added.
	Grown int
}

// Stats are the buffer's numbers now.
func (b *Buffer) Stats() BufferStats {
	return b.made("vmm.Buffer.Stats").stats()
}

func (b *buffer) stats() BufferStats {
	b.mu.RLock()
	defer b.mu.RUnlock()
	return BufferStats{
		Reserved:  int(b.res.size),
		Committed: int(b.committed.Load()),
		Used:      int(b.used.Load()),
		Chunks:    len(b.chunks),
		Shared:    int(b.sharedLocked()),
		Grown:     int(b.grown.Load()),
		Clipped:   int(b.mappedLocked() - b.committed.Load() + b.res.leftBytes.Load()),
	}
}

// acquire starts an operation on the buffer; the caller calls closer.Release.
func (b *buffer) acquire(op string) error {
	if b == nil {
		return errNilBuffer(op)
	}
	if !b.closer.Acquire() {
		return errs.ClosedError(op, "buffer")
	}
	return nil
}

// enter starts a change of the buffer; the caller calls leave.
func (b *buffer) enter(op string) error {
	if err := b.acquire(op); err != nil {
		return err
	}
	b.changes.Lock()
	return nil
}

func (b *buffer) leave() {
	on, added := b.appending, b.added
	b.appending, b.added = nil, span{}
	b.changes.Unlock()
	if on != nil {
		b.copies.end(on) // a ClipAfter that began beside the change has seen it by now
	}
	b.closer.Release()
	if b.onGrow != nil && added.to > added.from {
		b.res.System().Hook("vmm.BufferOptions.OnGrow", func() { b.onGrow(int(added.from), int(added.to)) })
	}
}

// span is the bytes from one offset up to another.
type span struct{ from, to uint64 }
