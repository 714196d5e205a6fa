package managed_test

import (
	"testing"

	"github.com/cuvmm/cuvmm/internal/gputest"
	"github.com/cuvmm/cuvmm/managed"
)

func TestNilAndZeroObjectsAreRefused(t *testing.T) {
	gputest.Unmade(t, []any{
		&managed.Buffer{}, (*managed.Array[uint32])(nil), &managed.Array[uint32]{},
		(*managed.Allocator)(nil), &managed.Allocator{}, managed.Range{}, managed.AccessedBy{},
	})
	// The methods of a Buffer's Range cannot refuse a nil pointer to the Buffer.
	gputest.Unmade(t, []any{(*managed.Buffer)(nil)}, "Buffer.AccessedBy", "Buffer.Bytes", "Buffer.Discard",
		"Buffer.DiscardPrefetch", "Buffer.Host", "Buffer.LastPrefetch", "Buffer.Len", "Buffer.Preferred", "Buffer.Prefetch",
		"Buffer.Ptr", "Buffer.ReadMostly", "Buffer.SetPreferred", "Buffer.SetReadMostly", "Buffer.Slice")
}
