package handles

import (
	"crypto/sha256"
	"sync"

	"github.com/cuvmm/cuvmm/cuda"
	"github.com/cuvmm/cuvmm/internal/exchange"
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

// buffer returns another buffer of memory that came before, or nil.
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

// allocation returns a count of memory that came before, or nil.
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

// ImportOptions say what an importer takes and how. The zero value takes as much as
// the device has, for reading and writing.
type ImportOptions struct {
	// ReadOnly imports for reading: no access beyond that can be granted to the
	// memory here. It protects from this process's own mistakes, not from a peer.
	ReadOnly bool
	// Hint is the address that is wanted, so that several processes can have the memory
	// at one; 0 leaves it to the driver. It is a hint: check the buffer's Ptr.
	Hint cuda.Ptr
	// Align is a power of two that the address is a multiple of; 0 is the granularity.
	Align int
	// MaxBytes is the most memory that is taken in one object; 0 is what the
	// memory's device has, and a TiB of memory of the host.
	MaxBytes int
	// MaxChunks is the most chunks; 0 is MaxChunks.
	MaxChunks int
	// KeepDescriptors keeps the file descriptor of each chunk open for as long as
	// the memory is open here, so that it can be passed on: SendBuffer, publish.Array,
	// LeaseBuffer and the like then take it, even after the process that made it is
	// dead. The driver exports memory only from its creator. Each descriptor counts
	// against this process's limit of open files: all kept ones may take a quarter of
	// it, less 64 (peer.ErrOpenFiles). Memory that travels by fabric handle alone has
	// none (cuda.ErrNotSupported).
	KeepDescriptors bool
}

// newImporter checks a descriptor and prepares the import of its memory.
func newImporter(op string, on *cuda.Device, d *Descriptor, o ImportOptions) (*exchange.Importer, error) {
	m := exchange.Memory{Location: d.Location, Device: d.Device, Handle: d.Handle, Compressible: d.Compressible, RDMA: d.RDMA, Chunks: d.Chunks}
	return exchange.NewImporter(op, on, m, exchange.ImportOptions{ReadOnly: o.ReadOnly, KeepDescriptors: o.KeepDescriptors}, func(granularity, there uint64) error {
		if o.MaxBytes > 0 {
			there = uint64(o.MaxBytes)
		}
		return d.Validate(Limits{Granularity: granularity, MaxBytes: there, MaxChunks: o.MaxChunks})
	})
}
