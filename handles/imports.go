package handles

import (
	"github.com/cuvmm/cuvmm/cuda"
	"github.com/cuvmm/cuvmm/internal/exchange"
)

// ImportOptions bound and configure an import. The zero value accepts as much memory as
// the device has, for reading and writing.
type ImportOptions struct {
	// ReadOnly imports for reading: no access beyond that can be granted to the
	// memory here. It guards against this process's own mistakes, not against a peer.
	ReadOnly bool
	// Hint is the preferred address, so that several processes can map the memory at
	// the same one; 0 leaves it to the driver. It is a hint: check the buffer's Ptr.
	Hint cuda.Ptr
	// Name, which may be empty, is what errors and snapshots call the memory, as vmm.BufferOptions.Name.
	Name string
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
	return exchange.NewImporter(op, on, m, exchange.ImportOptions{ReadOnly: o.ReadOnly, KeepDescriptors: o.KeepDescriptors}, func(_ []int, granularity, there uint64) error {
		if o.MaxBytes > 0 {
			there = uint64(o.MaxBytes)
		}
		return d.Validate(Limits{Granularity: int(granularity), MaxBytes: int(min(there, maxBytes)), MaxChunks: o.MaxChunks})
	})
}
