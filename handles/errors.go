package handles

import (
	"errors"

	"github.com/cuvmm/cuvmm/internal/exchange"
)

// Errors of memory that another process offers; test for them with errors.Is. The error
// itself is a [peer.Error], or a [cuda.Error] if the driver refused. The errors of
// connections are the sentinels of package peer.
var (
	// ErrDescriptor: the bytes are not a descriptor in its one valid form.
	ErrDescriptor = errors.New("invalid descriptor")
	// ErrSizeMismatch: a declared size that this memory cannot have.
	ErrSizeMismatch = exchange.ErrSizeMismatch
	// ErrMismatch: the memory, or a receipt, is other than declared or requested.
	ErrMismatch = exchange.ErrMismatch
	// ErrManifest: tensors that no memory can have as a [Manifest] says, or text that is none.
	ErrManifest = errors.New("invalid manifest")
	// ErrNotMemory: a file descriptor of something other than GPU memory.
	ErrNotMemory = exchange.ErrNotMemory
)
