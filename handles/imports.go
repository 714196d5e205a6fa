package handles

import (
	"crypto/sha256"
	"sync"

	"github.com/cuvmm/cuvmm/cuda"
	"github.com/cuvmm/cuvmm/internal/phys"
	"github.com/cuvmm/cuvmm/internal/share"
	"github.com/cuvmm/cuvmm/vmm"
)

// imports are what came over one connection and may be open still, so that the
// same memory is mapped once. They belong to the connection: what one peer calls
// its memory is never compared with another's. They hold no count of anything.
type imports struct {
	mu          sync.Mutex
	buffers     map[importKey]share.Memory
	allocations map[importKey]*phys.Handle
	// sweep is how many entries there are before those that are over go.
	sweep int
}

// importKey is the same for the same memory, as the peer names it, imported in
// the same way.
type importKey struct {
	from     Process
	who      identity
	layout   [sha256.Size]byte
	device   *cuda.Device
	readOnly bool
	kept     bool
}

// keyOf makes the key of a descriptor that was checked.
func keyOf(who identity, d *Descriptor, on *cuda.Device, o ImportOptions) importKey {
	same := *d
	same.Length, same.Generation = 0, 0 // these change while the memory stays
	b, _ := same.MarshalBinary()        // what was read can be written
	return importKey{from: d.Exporter, who: who, layout: sha256.Sum256(b), device: on, readOnly: o.ReadOnly, kept: o.KeepDescriptors}
}

// leastSweep keeps small connections from sweeping at every import.
const leastSweep = 64

func (i *imports) add() {
	if i.buffers == nil {
		i.buffers, i.allocations, i.sweep = map[importKey]share.Memory{}, map[importKey]*phys.Handle{}, leastSweep
	}
	if len(i.buffers)+len(i.allocations) < i.sweep {
		return
	}
	for k, m := range i.buffers {
		if m.Released() {
			delete(i.buffers, k)
		}
	}
	for k, h := range i.allocations {
		if h.Released() {
			delete(i.allocations, k)
		}
	}
	i.sweep = max(leastSweep, 2*(len(i.buffers)+len(i.allocations)))
}

func (i *imports) addBuffer(k importKey, b *vmm.Buffer) {
	i.mu.Lock()
	defer i.mu.Unlock()
	i.add()
	i.buffers[k] = share.Of(b)
}

// buffer answers another buffer of memory that came before, or nil.
func (i *imports) buffer(k importKey, length uint64) *vmm.Buffer {
	i.mu.Lock()
	defer i.mu.Unlock()
	m, ok := i.buffers[k]
	if !ok {
		return nil
	}
	b, ok := m.Again(length)
	if !ok {
		delete(i.buffers, k)
		return nil
	}
	return b.(*vmm.Buffer)
}

func (i *imports) addAllocation(k importKey, h *phys.Handle) {
	i.mu.Lock()
	defer i.mu.Unlock()
	i.add()
	i.allocations[k] = h
}

// allocation answers a count of memory that came before, or nil.
func (i *imports) allocation(k importKey) *phys.Handle {
	i.mu.Lock()
	defer i.mu.Unlock()
	h, ok := i.allocations[k]
	if !ok {
		return nil
	}
	if !h.TryRetain() {
		delete(i.allocations, k)
		return nil
	}
	return h
}
