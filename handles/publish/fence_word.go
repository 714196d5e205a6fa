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

// fenceWord is a word of a page that a publisher shares with a follower, on either
// side. The page is mapped, and registered as pinned host memory so that streams can
// write the word and wait for it. On a device without 64-bit stream memory operations
// it is not registered, and the CPU does both.
type fenceWord struct {
	page *sharedpage.Page
	slot int           // of the page's words
	ctx  *core.Context // nil if the page is not registered
	base driver.Ptr
	// closing receives the outcome of closeLater's close.
	closing chan error
}

// streamWords reports whether the device's streams write and wait for words.
func streamWords(d *cuda.Device) bool {
	return core.SystemOf(d).Attribute(driver.Device(d.Ordinal()), driver.AttrStreamMemOps64) > 0
}

// newFenceWord takes over the page, even if it fails.
func newFenceWord(op string, d *cuda.Device, p *sharedpage.Page) (*fenceWord, error) {
	w := &fenceWord{page: p}
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

func (w *fenceWord) value() *atomic.Uint64 { return w.page.Word(w.slot) }

// at returns the word's device address.
func (w *fenceWord) at() driver.Ptr { return w.base + driver.Ptr(8*w.slot) }

// reached reports whether the word reads a generation or a later one.
func (w *fenceWord) reached(generation uint64) bool { return reached(w.value().Load(), generation) }

// reached compares as streams do: by the sign of the difference.
func reached(word, generation uint64) bool { return int64(word-generation) >= 0 }

// close unregisters and unmaps the page, which no stream may write or wait for any
// more. The driver waits for all work of the context meanwhile.
func (w *fenceWord) close(op string) error {
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
func (w *fenceWord) closeLater(op string) error {
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
func (w *fenceWord) drop(op string, cause error) error {
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
