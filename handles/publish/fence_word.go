package publish

import (
	"fmt"
	"sync/atomic"

	"github.com/cuvmm/cuvmm/cuda"
	"github.com/cuvmm/cuvmm/internal/core"
	"github.com/cuvmm/cuvmm/internal/driver"
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
}

// streamWords reports whether the device's streams write and wait for words.
func streamWords(d *cuda.Device) bool {
	return core.SystemOf(d).Attribute(driver.Device(d.Ordinal()), driver.AttrStreamMemOps64) > 0
}

// newFenceWord takes ownership of the page unless it returns nil. After an error it may
// return a word whose page is still registered: only its close may unmap that, because
// the driver would go on with whatever is mapped there next.
func newFenceWord(op string, d *cuda.Device, p *sharedpage.Page) (*fenceWord, error) {
	w := &fenceWord{page: p}
	if !streamWords(d) {
		return w, nil
	}
	c, err := core.ContextOf(op, d)
	if err != nil {
		return nil, err
	}
	sys := c.System()
	asked := func() string { return "a page that is shared with another process" }
	if r := sys.Drv.MemHostRegister(c.Handle, p.Pointer(), p.Size(), driver.HostRegisterPortable|driver.HostRegisterDeviceMap); r != driver.Success {
		return nil, c.CallError(op, driver.CallMemHostRegister, r, asked())
	}
	at, r := sys.Drv.MemHostGetDevicePointer(c.Handle, p.Pointer())
	if r != driver.Success {
		err := c.CallError(op, driver.CallMemHostGetDevicePointer, r, asked())
		if undo := sys.Drv.MemHostUnregister(c.Handle, p.Pointer()); undo != driver.Success {
			w.ctx = c
			return w, fmt.Errorf("%w (and undoing it failed: %w)", err, c.CallError(op, driver.CallMemHostUnregister, undo, asked()))
		}
		return nil, err
	}
	w.ctx, w.base = c, at
	return w, nil
}

func (w *fenceWord) value() *atomic.Uint64 { return w.page.Word(w.slot) }

// at returns the word's device address.
func (w *fenceWord) at() driver.Ptr { return w.base + driver.Ptr(8*w.slot) }

// reached reports whether the word reads a generation or a later one.
func (w *fenceWord) reached(generation uint64) bool { return int64(w.value().Load()-generation) >= 0 }

// close unregisters and unmaps the page, which no stream may write or wait for any
// more. The driver waits for all work of the context meanwhile.
func (w *fenceWord) close(op string) error {
	if c := w.ctx; c != nil {
		unregister := func() driver.Result { return c.System().Drv.MemHostUnregister(c.Handle, w.page.Pointer()) }
		if r := c.Teardown(unregister); r != driver.Success {
			return c.CallError(op, driver.CallMemHostUnregister, r, "a page that is shared with another process")
		}
		w.ctx = nil
	}
	return w.page.Close()
}
