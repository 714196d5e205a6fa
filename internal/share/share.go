// Package share is how the rooms that share memory with other processes reach
// into a vmm.Buffer: its chunks for exporting, holds on what is published, and
// buffers of imported memory. Users never import it and no public signature
// needs it: vmm.Buffer embeds a [Holder], and [Of] looks inside.
//
// # Chunks and their generations
//
// A chunk is a counted *phys.Handle, and its generation is the handle's ID: no
// two handles of a process ever have the same, so memory that is made later at
// the same offset cannot be mistaken for what was there before.
package share

import (
	"errors"

	"github.com/cuvmm/cuvmm/cuda"
	"github.com/cuvmm/cuvmm/internal/core"
	"github.com/cuvmm/cuvmm/internal/driver"
	"github.com/cuvmm/cuvmm/internal/phys"
)

// Memory is the inner state of a vmm.Buffer. All methods are safe for
// concurrent use. The operation's name is the caller's, for errors.
type Memory interface {
	// About says what does not change in the buffer's life.
	About() About
	// Used and Committed are the bytes in use, and the bytes of memory.
	Used() uint64
	Committed() uint64

	// View returns the chunks that hold the first n bytes, of which all must be
	// in use (cuda.ErrOutOfRange). Each comes with a count of its own, so they
	// stay valid whatever becomes of the buffer; the caller releases the view.
	View(op string, n uint64) (View, error)

	// Hold keeps the chunks of the first n bytes in the buffer until Release:
	// closing it, and clipping what is held, is cuda.ErrInUse and names by
	// ("publication \"weights\""). The buffer may grow, and what lies behind
	// may be clipped. All n bytes must be in use.
	Hold(op, by string, n uint64) (Hold, error)

	// Attach maps chunks behind those that a buffer of imported memory has, and
	// grants them in one call. It takes over one count of each; where it fails
	// everything is as it was and the counts are still the caller's. The length
	// stays. Where chunks that Shrink took still wait for the GPU at that place,
	// it waits until they are unmapped; with no chunks that is all it does.
	Attach(op string, chunks []*phys.Handle) error

	// SetLen sets the length of a buffer of imported memory, to at most
	// Committed (cuda.ErrOutOfRange).
	SetLen(op string, n uint64) error

	// Own makes a buffer of imported memory that follows a publication one whose
	// length is its user's again, and that grows with memory of this process's own.
	// It must have been imported for writing (cuda.ErrNotPermitted), alone.
	Own(op string) error

	// Again makes another *vmm.Buffer of the same imported memory at the same
	// address, with a length of n. Each is closed by itself, in any order, and
	// the last one gives the memory back. ok is false where the memory is on its
	// way out, or was changed (clipped, other access), so that it is to be
	// imported anew. Released reports whether it will never be true again.
	Again(n uint64) (buffer any, ok bool)
	Released() bool
}

// Hold is a publication's hold on a buffer.
type Hold interface {
	// Cover changes how much is held, to the chunks of the first n bytes, of
	// which all must be in use. It makes no driver call.
	Cover(op string, n uint64) error
	// Appended returns how many bytes are in use, and the streams of all appends to
	// them that were not announced yet, whichever goroutine made them. Work that is
	// ordered behind those streams finds the bytes that Append and Resize put there;
	// bytes of AppendUndefined are their makers' to order. A caller that has
	// announced so many bytes behind those streams passes mark to Announced. Streams
	// may be closed meanwhile, after which nothing of them is under way.
	Appended() (n uint64, on []*core.Stream, mark uint64)
	// Announced says that the appends up to a mark were announced.
	Announced(mark uint64)
	// Begin begins a change of the buffer, after waiting for one that runs, which
	// may wait for the GPU.
	Begin(op string) (Shrinking, error)
	// Release lets go. Idempotent.
	Release()
}

// Shrinking is a change that makes a buffer shorter. Its End must be called, by the
// goroutine that began it.
type Shrinking interface {
	// Shrink, once, makes the buffer n bytes long and takes the whole chunks
	// behind them out of use. It does not wait. Growing never takes them back: it
	// makes others, after waiting for those to be unmapped.
	//
	// The view are the chunks that went, with counts: the memory stays until it
	// is released. It is empty where no whole chunk went. An error has changed
	// nothing. Where another hold covers any of them it is cuda.ErrInUse. Of
	// imported memory n may lie behind the bytes in use: then only chunks go.
	Shrink(n uint64, streams []*cuda.Stream) (View, error)
	// End unmaps the chunks: without streams after waiting for all work that
	// could use them, as Clip does; with some it returns at once, and they are
	// unmapped when the work that was on the streams at Shrink is done. An error
	// says that they could not be unmapped, which Clip and Close try again.
	End() error
}

// Shrink is a change in one: see Shrinking. An error with an empty view has changed
// nothing.
func Shrink(op string, h Hold, n uint64, streams []*cuda.Stream) (View, error) {
	c, err := h.Begin(op)
	if err != nil {
		return View{}, err
	}
	gone, err := c.Shrink(n, streams)
	return gone, errors.Join(err, c.End())
}

// About is what does not change in a buffer's life.
type About struct {
	// Device is the one that the buffer was made on.
	Device *cuda.Device
	// Base is the address of the first byte.
	Base driver.Ptr
	// Asked are the properties that its memory is, or would be, created with.
	Asked driver.AllocationProp
	// Granularity and Reserved in bytes.
	Granularity, Reserved uint64
	// Imported memory belongs to another process (or to this one, exported and
	// imported again). It can be passed on if Asked names a handle type.
	Imported bool
	// Followed: a publication of another process sets the length.
	Followed bool
}

// Chunk is a piece of physical memory at its place in a buffer. Its size is
// the handle's, and so is its generation (Handle.ID).
type Chunk struct {
	Handle *phys.Handle
	Offset uint64
}

// View is a consistent look at chunks, in the order of their offsets, each with
// a count of its own.
type View struct{ Chunks []Chunk }

// Release gives the counts back. It is idempotent. The reclaimer retries what could not
// be released, of which the error tells.
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
	// Device is the importer's that uses the memory, wherever that lies. Access
	// between the two is checked.
	Device *cuda.Device
	// Memory are the properties of the memory as the importer counts devices,
	// and Granularity what its chunks are multiples of.
	Memory      driver.AllocationProp
	Granularity uint64
	// Reserve is the address space in bytes, a multiple of the granularity; 0 is
	// exactly the chunks.
	Reserve uint64
	// Hint is the address that is wanted, and Align a power of two that it is a
	// multiple of, at least the granularity; 0 leaves both to the driver.
	Hint  cuda.Ptr
	Align int
	// OnGrow is vmm.BufferOptions.OnGrow, for what is attached later.
	OnGrow func(from, to int)
	// ReadOnly: no access beyond reading is ever granted.
	ReadOnly bool
	// Followed: the length is set by SetLen alone, and users cannot change it.
	Followed bool
	// Length in bytes, of what is in use at first.
	Length uint64
	// Chunks are mapped one behind the other from offset 0. The buffer takes
	// over one count of each; where making it fails the counts are still the
	// caller's.
	Chunks []*phys.Handle
}

// NewBuffer makes a *vmm.Buffer of imported memory.
func NewBuffer(op string, o ImportOptions) (buffer any, err error) { return newBuffer(op, o) }

// NewAllocation makes a *vmm.Allocation of imported memory, after proving its
// size by mapping it for a moment. It takes over one count of the handle; where
// it fails that is still the caller's.
func NewAllocation(op string, d *cuda.Device, h *phys.Handle) (allocation any, err error) {
	return newAllocation(op, d, h)
}

var (
	newBuffer     func(op string, o ImportOptions) (any, error)
	newAllocation func(op string, d *cuda.Device, h *phys.Handle) (any, error)
)

// SetMake tells the package how objects of imported memory are made. vmm calls
// it once.
func SetMake(buffer func(op string, o ImportOptions) (any, error), allocation func(op string, d *cuda.Device, h *phys.Handle) (any, error)) {
	newBuffer, newAllocation = buffer, allocation
}

// Holder is embedded, unexported, by vmm.Buffer. Its only method is unexported
// too, so users cannot reach the inner state.
type Holder struct{ m Memory }

// HoldMemory makes the holder.
func HoldMemory(m Memory) Holder { return Holder{m} }

func (h *Holder) memory() Memory { return h.m }

// Of looks inside a vmm.Buffer.
func Of(b interface{ memory() Memory }) Memory { return b.memory() }
