package exchange

import (
	"errors"
	"maps"

	"github.com/cuvmm/cuvmm/handles/peer"
	"github.com/cuvmm/cuvmm/internal/core"
	"github.com/cuvmm/cuvmm/internal/driver"
	"github.com/cuvmm/cuvmm/internal/fd"
	"github.com/cuvmm/cuvmm/internal/lock"
	"github.com/cuvmm/cuvmm/internal/phys"
)

// exportWarmer keeps one descriptor of memory open in each place that memory is shared
// from, while a connection or publication is open. The driver sets its exports up with
// the first open descriptor and tears that down with the last, which takes twenty
// times as long as a descriptor in between (docs/driver-facts.md).
//
// The descriptor duplicates one of memory that was exported anyway, and is closed
// before that memory is released, so it pins nothing. It does not count
// against the budget of exports, which is for short-lived descriptors.
type exportWarmer struct {
	mu lock.Mutex[lock.Leaf]
	// users are the connections and publications there are.
	users  int
	pinned map[place]*phys.Handle
}

// place is a device of a System, or its host.
type place struct {
	sys *core.System
	at  driver.Location
}

// Warm is the warmer of this process.
var Warm exportWarmer

// Enter counts a user: a connection or a publication.
func (w *exportWarmer) Enter() {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.users++
}

// Leave discounts a user. The last one closes the descriptors.
func (w *exportWarmer) Leave() {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.users--; w.users == 0 {
		w.dropLocked()
	}
}

// Drop closes the descriptors, so that a benchmark finds the driver as in a program that
// has shared nothing yet.
func (w *exportWarmer) Drop() {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.dropLocked()
}

// dropLocked is Drop for a caller that has the lock.
func (w *exportWarmer) dropLocked() {
	for _, h := range w.pinned {
		h.UnpinFD()
	}
	w.pinned = nil
}

// export makes a descriptor of memory, which the caller closes, and keeps a duplicate if
// its place has none.
func (w *exportWarmer) export(op string, h *phys.Handle, followed bool) (*peer.FD, error) {
	export := (*phys.Handle).Export
	if followed {
		export = (*phys.Handle).ExportFollowed
	}
	n, err := export(h, op)
	if err != nil {
		return nil, err
	}
	if !h.Imported { // passing on imported memory makes no driver call
		w.keep(h, n)
	}
	f, err := peer.NewFD(n)
	if err != nil {
		return nil, errors.Join(err, fd.Close(n))
	}
	return f, nil
}

func (w *exportWarmer) keep(h *phys.Handle, n int) {
	at := place{h.System(), h.Asked.Location}
	w.mu.Lock()
	defer w.mu.Unlock()
	if old := w.pinned[at]; w.users == 0 || old != nil && old.HasPinnedFD() {
		return
	}
	// At the limit of open files sharing goes on without a kept descriptor.
	if another, err := fd.Dup(n); err == nil {
		h.PinFD(another)
		if w.pinned == nil {
			w.pinned = map[place]*phys.Handle{}
		}
		maps.DeleteFunc(w.pinned, func(_ place, h *phys.Handle) bool { return !h.HasPinnedFD() }) // and with them their Systems
		w.pinned[at] = h
	}
}
