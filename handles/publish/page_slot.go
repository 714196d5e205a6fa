package publish

import (
	"errors"
	"sync/atomic"

	"github.com/cuvmm/cuvmm/cuda"
	"github.com/cuvmm/cuvmm/internal/core"
	"github.com/cuvmm/cuvmm/internal/driver"
	"github.com/cuvmm/cuvmm/internal/life"
	"github.com/cuvmm/cuvmm/internal/sharedpage"
)

// pageSlot is a follower's part of a page that a publisher shares with it, on either side:
// a cache line of 64-bit words.
//
//	word      written by                   reads
//	complete  the publisher's stream; the  the last generation whose work is done: the fence word,
//	          follower, as its last value  which a stream of the follower waits for
//	intent    the publisher                the last generation that it wants to rewrite: nobody begins
//	                                       to read that
//	flux      the publisher                the last generation that it began to rewrite
//	cut       the publisher                the last generation of which something was taken back;
//	                                       cutLeft once it goes on without the follower, and
//	                                       cutWithdrawn once the publication is over
//	held      the follower                 the number of its last hold on what it shows
//	released  a stream of the follower     the number of the last hold that ended: while it is
//	                                       that of held, the follower reads nothing
//
// The page is mapped, and registered as pinned host memory so that streams can write words
// and wait for them. On a device without 64-bit stream memory operations it is not
// registered, and the CPU does both.
type pageSlot struct {
	page  *sharedpage.Page
	index int           // of the page's slots
	ctx   *core.Context // nil if the page is not registered
	base  driver.Ptr
	// closing receives the outcome of closeLater's close.
	closing chan error
}

// slotWord is a word of a slot.
type slotWord int

const (
	completeWord slotWord = iota
	intentWord
	fluxWord
	cutWord
	heldWord
	releasedWord
	// slotWords is how many words a slot has. The rest of its cache line is unused.
	slotWords = 8
)

// Values of the cut word above all generations.
const (
	cutLeft = release + iota
	cutWithdrawn
)

// slotsOf is how many slots a page has.
func slotsOf(p *sharedpage.Page) int { return p.Words() / slotWords }

// streamWords reports whether the device's streams write and wait for words.
func streamWords(d *cuda.Device) bool {
	return core.SystemOf(d).Attribute(driver.Device(d.Ordinal()), driver.AttrStreamMemOps64) > 0
}

// newPageSlot takes over the page, even if it fails.
func newPageSlot(op string, d *cuda.Device, p *sharedpage.Page) (*pageSlot, error) {
	w := &pageSlot{page: p}
	if !streamWords(d) {
		return w, nil
	}
	c, err := core.ContextOf(op, d)
	if err != nil {
		return nil, w.drop(op, err)
	}
	drv := c.System().Drv
	if r := drv.MemHostRegister(c.Handle, p.Pointer(), p.Size(), driver.HostRegisterPortable|driver.HostRegisterDeviceMap); r != driver.Success {
		return nil, w.drop(op, c.CallError(op, driver.CallMemHostRegister, r, sharedPage))
	}
	w.ctx = c
	at, r := drv.MemHostGetDevicePointer(c.Handle, p.Pointer())
	if r != driver.Success {
		return nil, w.drop(op, c.CallError(op, driver.CallMemHostGetDevicePointer, r, sharedPage))
	}
	w.base = at
	return w, nil
}

// sharedPage names the page in errors.
const sharedPage = "a page that is shared with another process"

// word returns a word for the CPU; at returns its device address.
func (w *pageSlot) word(i slotWord) *atomic.Uint64 { return w.page.Word(w.index*slotWords + int(i)) }
func (w *pageSlot) at(i slotWord) driver.Ptr {
	return w.base + driver.Ptr(8*(w.index*slotWords+int(i)))
}

// seen returns what the publisher's words read.
func (w *pageSlot) seen() seen {
	return seen{w.word(completeWord).Load(), w.word(intentWord).Load(), w.word(fluxWord).Load(), w.word(cutWord).Load()}
}

// reached reports whether the word reads a generation or a later one.
func (w *pageSlot) reached(generation uint64) bool {
	return reached(w.word(completeWord).Load(), generation)
}

// reached compares as streams do: by the sign of the difference.
func reached(word, generation uint64) bool { return int64(word-generation) >= 0 }

// close unregisters and unmaps the page, which no stream may write or wait for any
// more. The driver waits for all work of the context meanwhile.
func (w *pageSlot) close(op string) error {
	if c := w.ctx; c != nil {
		unregister := func() driver.Result { return c.System().Drv.MemHostUnregister(c.Handle, w.page.Pointer()) }
		if r := c.Teardown(unregister); r != driver.Success {
			return c.CallError(op, driver.CallMemHostUnregister, r, sharedPage)
		}
		w.ctx = nil
	}
	// Only now: the driver would go on with whatever is mapped there next.
	return w.page.Close()
}

// closeLater is close for the reclaimer, which must not wait: until a goroutine has closed
// the word it returns life.ErrAgain.
func (w *pageSlot) closeLater(op string) error {
	if w.closing == nil {
		closing := make(chan error, 1)
		w.closing = closing
		go func() { closing <- w.close(op) }()
	}
	select {
	case err := <-w.closing:
		w.closing = nil
		return err
	default:
		return life.ErrAgain
	}
}

// drop closes a word that no stream uses, after an operation that failed with cause. What
// the driver refuses is one of the System's leftovers.
func (w *pageSlot) drop(op string, cause error) error {
	c := w.ctx
	err := w.close(op)
	switch {
	case err == nil:
		return cause
	case c == nil: // the system does not unmap the page
		return errors.Join(cause, err)
	}
	c.System().Left("host page", 0, c.Device, err, func() error { return w.closeLater(op) })
	return core.UndoError(cause, err)
}
