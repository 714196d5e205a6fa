package managed_test

import (
	"testing"

	"github.com/cuvmm/cuvmm/cuda"
	"github.com/cuvmm/cuvmm/internal/test/gputest"
	"github.com/cuvmm/cuvmm/managed"
	"github.com/stretchr/testify/require"
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
	_, d := open(t)
	for _, none := range []*cuda.Device{nil, {}} {
		require.ErrorIs(t, gputest.Err(managed.New(none, 1, managed.Options{})), cuda.ErrInvalidArgument)
		require.ErrorIs(t, gputest.Err(managed.NewAllocator(none, managed.Options{})), cuda.ErrInvalidArgument)
		require.ErrorIs(t, gputest.Err(managed.View(none, 4096, 1, managed.ViewOptions{})), cuda.ErrInvalidArgument)
	}
	b, none := buffer(t, d, mib), &cuda.Stream{}
	for what, err := range map[string]error{
		"New":      gputest.Err(managed.New(d, 1, managed.Options{Attach: managed.AttachStream, Stream: none})),
		"Attach":   b.Attach(none, managed.AttachGlobal),
		"Prefetch": b.Prefetch(none, d.Location()),
		"Discard":  b.Discard(none),
		"Host":     b.Host(none, func([]byte) error { return nil }),
	} {
		require.ErrorIs(t, err, cuda.ErrInvalidArgument, what)
		require.ErrorContains(t, err, "a nil stream", what)
	}
}
