package cuda

import "context"

// Completion is the end of one object's closing, by Close or CloseAfter: from then on
// its memory is released. It can be obtained before the object is closed and after. All
// methods are safe for concurrent use.
type Completion interface {
	// Done is closed when the closing has ended, with success or with an error.
	Done() <-chan struct{}
	// Wait waits until the closing has ended and returns its error, or the
	// context's if that ends first. After an error the memory is not released and the
	// object may be closed again; that closing has a Completion of its own.
	Wait(ctx context.Context) error
}
