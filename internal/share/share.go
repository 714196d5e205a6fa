// Package share gives the packages that share memory with other processes access to the
// inner state of a vmm.Buffer: its chunks for exporting, holds on published memory, and
// buffers of imported memory. Users never import it and no public signature
// needs it: vmm.Buffer embeds a [Holder], and [Of] looks inside.
//
// # Chunks and their identities
//
// A chunk is a counted *phys.Handle with an ID. No two pieces of memory in a process ever
// have the same ID, so memory that comes later, at the same offset or even in the same
// handle, is never mistaken for the memory before it.
package share

import (
	"context"
	"errors"

	"github.com/cuvmm/cuvmm/cuda"
	"github.com/cuvmm/cuvmm/internal/driver"
	"github.com/cuvmm/cuvmm/internal/phys"
	"github.com/cuvmm/cuvmm/internal/suspend"
)

// Memory is the inner state of a vmm.Buffer. All methods are safe for
// concurrent use. op names the caller's operation in errors.
type Memory interface {
	// About returns what never changes in a buffer.
	About() About
	// Used and Committed are the bytes in use, and the bytes of memory.
	Used() uint64
	Committed() uint64

	// View returns the chunks that hold the first n bytes, all of which must be
	// in use (cuda.ErrOutOfRange). It retains each, so they outlive the buffer; the
	// caller releases the view.
	View(op string, n uint64) (View, error)

	// Hold keeps the chunks of the first n bytes in the buffer until Release:
	// closing it, and clipping held chunks, is cuda.ErrInUse and names by
	// ("publication \"weights\""). The buffer may grow, and chunks behind the held
	// ones may be clipped. All n bytes must be in use.
	Hold(op, by string, n uint64) (Hold, error)

	// Attach maps chunks behind the last one of a buffer of imported memory, and
	// grants access in one call. It takes over one count of each chunk; if it fails
	// nothing changes and the counts are still the caller's. The length
	// stays. If chunks that Shrink removed there still wait for the GPU, Attach waits
	// until they are unmapped; without chunks it does nothing else.
	Attach(op string, chunks []*phys.Handle) error

	// SetLen sets the length of a buffer of imported memory, to at most
	// Committed (cuda.ErrOutOfRange).
	SetLen(op string, n uint64) error

	// Abandon gives back a buffer that no user has, and on whose memory no work was
	// submitted, after an operation that failed with cause. It waits for nothing, and what
	// the driver refuses is one of the System's leftovers.
	Abandon(op string, cause error) error

	// Leave tells those who registered the buffer's addresses elsewhere that its memory goes,
	// of a buffer of imported memory. back tells those that were told that there is memory
	// again. An error is one's refusal.
	Leave(ctx context.Context) (back func(), err error)

	// Own turns a buffer that follows a publication into an ordinary one: its user sets
	// the length, and it grows with memory of this process's own. One that was imported for
	// reading stays read-only and does not grow.
	Own(op string) error

	// SetKept notes that a broker keeps the memory of an imported buffer, and gives it to another process after this
	// one. So it leaves this process through a publication with its page alone, and has one address.
	SetKept()

	// Seal makes a buffer of imported memory read-only for good: every place that may write it
	// may only read it from then on, and none is ever granted more (cuda.ErrNotPermitted, which
	// names what the memory is). It waits for the devices that lose access. After an error it may
	// be called again, and no access is granted meanwhile.
	Seal(op, what string) error
}

// Hold is a publication's hold on a buffer.
type Hold interface {
	// Cover changes the held part to the chunks of the first n bytes, all of
	// which must be in use. It makes no driver call.
	Cover(op string, n uint64) error
	// RecallBy has the memory be suspended, for which the publication then tells its followers.
	// Otherwise it is refused (cuda.ErrInUse).
	RecallBy(p suspend.Publication)
	// Begin begins a change of the buffer. It waits for a running change, which may
	// wait for the GPU.
	Begin(op string) (Shrinking, error)
	// Release ends the hold. Idempotent.
	Release()
}

// Shrinking is a change that makes a buffer shorter. Its End must be called, by the
// goroutine that began it.
type Shrinking interface {
	// Shrink makes the buffer n bytes long and takes the whole chunks
	// behind them out of use. It is called once and does not wait. Growing never takes
	// those chunks back: it waits until they are unmapped and makes others.
	//
	// The view has the removed chunks, retained, and is empty if no whole chunk was
	// removed. An error has changed nothing; it is cuda.ErrInUse if another hold
	// covers any of the chunks. For imported memory n may exceed the bytes in use:
	// then only chunks are removed.
	Shrink(n uint64, streams []*cuda.Stream) (View, error)
	// End unmaps the chunks. Without streams it first waits for all work that
	// could use them, as Clip does. With streams it returns at once, and the chunks are
	// unmapped after the work that was on the streams at Shrink. After an error
	// Clip and Close retry to unmap them.
	End() error
}

// Shrink is a whole change: see Shrinking. An error with an empty view has changed
// nothing.
func Shrink(op string, h Hold, n uint64, streams []*cuda.Stream) (View, error) {
	c, err := h.Begin(op)
	if err != nil {
		return View{}, err
	}
	gone, err := c.Shrink(n, streams)
	return gone, errors.Join(err, c.End())
}

// About is what never changes in a buffer.
type About struct {
	// Device is the device that the buffer was made on.
	Device *cuda.Device
	// Base is the address of the first byte.
	Base driver.Ptr
	// Asked are the requested properties of its memory.
	Asked driver.AllocationProp
	// Granularity and Reserved in bytes.
	Granularity, Reserved uint64
	// Tag is the group that the buffer belongs to.
	Tag cuda.Tag
	// Imported memory belongs to another process (or to this one, exported and
	// imported again). It can be passed on if Asked names a handle type.
	Imported bool
	// Followed: a publication of another process sets the length.
	Followed bool
	// Kept: see SetKept.
	Kept bool
}

// Chunk is a piece of physical memory at its place in a buffer. Its size is the handle's,
// and ID is the identity that the handle's memory had when the chunk was viewed.
type Chunk struct {
	Handle *phys.Handle
	ID     uint64
	Offset uint64
}

// ChunkOf returns a chunk of memory, and retains it.
func ChunkOf(h *phys.Handle, off uint64) Chunk {
	h.Retain()
	return Chunk{h, h.ID(), off}
}

// View is a consistent list of chunks in the order of their offsets, each retained.
type View struct{ Chunks []Chunk }

// Release releases the chunks. Idempotent. After an error the reclaimer retries the chunks
// that could not be released.
func (v *View) Release() error {
	handles := make([]*phys.Handle, len(v.Chunks))
	for i, c := range v.Chunks {
		handles[i] = c.Handle
	}
	v.Chunks = nil
	return phys.ReleaseAll("share.View.Release", handles...)
}

// ImportOptions describe a buffer of imported memory.
type ImportOptions struct {
	// Device is the importer's device that uses the memory, wherever that lies. Access
	// between the two is checked.
	Device *cuda.Device
	// Memory are the properties of the memory in the importer's numbering of devices,
	// and Granularity is that of its chunks in bytes.
	Memory      driver.AllocationProp
	Granularity uint64
	// Reserve is the address space in bytes, a multiple of the granularity; 0 is
	// the size of the chunks.
	Reserve uint64
	// Hint is the preferred address, and Align its alignment, a power of two of at
	// least the granularity; 0 leaves both to the driver.
	Hint  cuda.Ptr
	Align int
	// ReadOnly: no access beyond reading is ever granted.
	ReadOnly bool
	// Followed: the length is set by SetLen alone, and users cannot change it.
	Followed bool
	// Length is the initial length in bytes.
	Length uint64
	// Name, which may be empty, is what errors and snapshots call the buffer.
	Name string
	// Chunks are mapped one behind the other from offset 0. The buffer takes
	// over one count of each; if NewBuffer fails the counts are still the
	// caller's.
	Chunks []*phys.Handle
}

// NewBuffer makes a *vmm.Buffer of imported memory.
func NewBuffer(op string, o ImportOptions) (buffer any, err error) { return newBuffer(op, o) }

var newBuffer func(op string, o ImportOptions) (any, error)

// SetMake sets how buffers of imported memory are made. vmm calls it once.
func SetMake(buffer func(op string, o ImportOptions) (any, error)) { newBuffer = buffer }

// Holder is embedded, unexported, by vmm.Buffer. Its only method is unexported
// too, so users cannot reach the inner state.
type Holder struct{ m Memory }

// HoldMemory makes the holder.
func HoldMemory(m Memory) Holder { return Holder{m} }

func (h *Holder) memory() Memory { return h.m }

// Of looks inside a vmm.Buffer.
func Of(b interface{ memory() Memory }) Memory { return b.memory() }
