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

// imports are the objects that came over one connection and may still be open, so that
// the same memory is mapped once. They belong to the connection, since identities are
// each peer's own. They retain nothing.
type imports struct {
	mu          sync.Mutex
	buffers     map[importKey]share.Memory
	allocations map[importKey]*phys.Handle
	// sweep is the number of entries at which released ones are removed.
	sweep int
}

// importKey identifies memory, as its peer names it, and the options of its import.
type importKey struct {
	from     Process
	id       identity
	layout   [sha256.Size]byte
	device   *cuda.Device
	readOnly bool
	kept     bool
}

// keyOf returns the key of a checked descriptor.
func keyOf(id identity, d *Descriptor, on *cuda.Device, o ImportOptions) importKey {
	same := *d
	same.Length, same.Generation = 0, 0 // these change while the memory stays
	b, _ := same.MarshalBinary()        // what was read can be written
	return importKey{from: d.Exporter, id: id, layout: sha256.Sum256(b), device: on, readOnly: o.ReadOnly, kept: o.KeepDescriptors}
}

// leastSweep keeps a connection with few imports from sweeping at each.
const leastSweep = 64

// makeRoomLocked removes released entries once there are many.
func (i *imports) makeRoomLocked() {
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
	i.makeRoomLocked()
	i.buffers[k] = share.Of(b)
}

// buffer returns another buffer of memory that is imported already, or nil.
func (i *imports) buffer(k importKey, length uint64) *vmm.Buffer {
	i.mu.Lock()
	defer i.mu.Unlock()
	m, ok := i.buffers[k]
	if !ok {
		return nil
	}
	b, ok := m.Dup(length)
	if !ok {
		delete(i.buffers, k)
		return nil
	}
	return b.(*vmm.Buffer)
}

func (i *imports) addAllocation(k importKey, h *phys.Handle) {
	i.mu.Lock()
	defer i.mu.Unlock()
	i.makeRoomLocked()
	i.allocations[k] = h
}

// allocation returns memory that is imported already, retained for the caller, or nil.
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

// ImportOptions bound and configure an import. The zero value accepts as much memory as
// the device has, for reading and writing.
type ImportOptions struct {
	// ReadOnly imports for reading: no access beyond that can be granted to the
	// memory here. It guards against this process's own mistakes, not against a peer.
	ReadOnly bool
	// Hint is the preferred address, so that several processes can map the memory at
	// the same one; 0 leaves it to the driver. It is a hint: check the buffer's Ptr.
	Hint cuda.Ptr
	// Align is the alignment of the address, a power of two; 0 is the granularity.
	Align int
	// MaxBytes bounds the size of one object; 0 is the memory of the device that it
	// lies on, and 1 TiB for memory of the host.
	MaxBytes int
	// MaxChunks bounds the number of chunks; 0 is the constant MaxChunks.
	MaxChunks int
	// KeepDescriptors keeps the file descriptor of each chunk open for as long as
	// the memory is open here, so that SendBuffer, publish.Array, LeaseBuffer and the
	// like can pass it on, even after the process that created it has ended. The
	// driver itself exports memory only from its creator. Each descriptor counts
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
		return d.Validate(Limits{Granularity: int(granularity), MaxBytes: int(min(there, maxBytes)), MaxChunks: o.MaxChunks})
	})
}
