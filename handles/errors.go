package handles

import (
	"errors"

	"github.com/cuvmm/cuvmm/internal/exchange"
)

// What can be wrong with memory that another process offers; test for them with
// errors.Is. The error itself is a [peer.Error], or a [cuda.Error] for what the driver
// refused. What can go wrong on a connection are the sentinels of package peer.
var (
	// ErrDescriptor: the bytes are no descriptor, or not the one form that a descriptor
	// has.
	ErrDescriptor = errors.New("invalid descriptor")
	// ErrSizeMismatch: a declared size that this memory cannot have.
	ErrSizeMismatch = exchange.ErrSizeMismatch
	// ErrMismatch: the memory, or a receipt, is not of what was declared or asked for.
	ErrMismatch = exchange.ErrMismatch
	// ErrNotMemory: a file descriptor that is not of GPU memory.
	ErrNotMemory = exchange.ErrNotMemory
)
