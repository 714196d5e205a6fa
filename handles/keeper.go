package handles

import (
	"maps"
	"sync"

	"github.com/cuvmm/cuvmm/internal/core"
	"github.com/cuvmm/cuvmm/internal/driver"
	"github.com/cuvmm/cuvmm/internal/fd"
	"github.com/cuvmm/cuvmm/internal/phys"
)

// keeper keeps one descriptor of memory open in each place that memory is shared
// from, while somebody shares: the driver sets its exports up with the first
// descriptor that is open, and takes that down with the last, which takes twenty
// times as long as a descriptor does in between (docs/driver-facts.md).
//
// It is another descriptor of memory that was exported anyway, and is closed
// before that memory is given back, so it pins nothing. It does not count
// against the budget of exports, which is for what comes and goes.
type keeper struct {
	mu sync.Mutex // a leaf
	// users are the connections and publications there are.
	users int
	kept  map[place]*phys.Handle
}

// place is a device of a System, or its host.
type place struct {
	sys *core.System
	at  driver.Location
}

var kept keeper

func (k *keeper) enter() {
	k.mu.Lock()
	defer k.mu.Unlock()
	k.users++
}

// leave closes what is kept, with the last user.
func (k *keeper) leave() {
	k.mu.Lock()
	defer k.mu.Unlock()
	if k.users--; k.users == 0 {
		k.drop()
	}
}

// drop closes what is kept. The caller has the lock.
func (k *keeper) drop() {
	for _, h := range k.kept {
		h.UnpinFD()
	}
	k.kept = nil
}

// export makes a descriptor of memory, and keeps another where none is. The
// caller closes its own.
func (k *keeper) export(op string, h *phys.Handle) (*FD, error) {
	n, err := h.Export(op)
	if err != nil {
		return nil, err
	}
	if !h.Imported { // what is passed on costs the driver nothing
		k.keep(h, n)
	}
	return own(n), nil
}

func (k *keeper) keep(h *phys.Handle, n int) {
	at := place{h.System(), h.Asked.Location}
	k.mu.Lock()
	defer k.mu.Unlock()
	if old := k.kept[at]; k.users == 0 || old != nil && old.HasPinnedFD() {
		return
	}
	// Without one more number to spare it goes on as if this were not here.
	if another, err := fd.Dup(n); err == nil {
		h.PinFD(another)
		if k.kept == nil {
			k.kept = map[place]*phys.Handle{}
		}
		maps.DeleteFunc(k.kept, func(_ place, h *phys.Handle) bool { return !h.HasPinnedFD() }) // nor their Systems
		k.kept[at] = h
	}
}
