package managed_test

import (
	"testing"

	"github.com/cuvmm/cuvmm/cuda"
	"github.com/cuvmm/cuvmm/internal/test/gputest"
	"github.com/cuvmm/cuvmm/managed"
	"github.com/stretchr/testify/require"
)

func TestNilAndZeroObjectsAreRefused(t *testing.T) {
	gputest.Unmade(t,
		&managed.Buffer{}, (*managed.Array[uint32])(nil), &managed.Array[uint32]{},
		(*managed.Allocator)(nil), &managed.Allocator{}, managed.Range{}, managed.AccessedBy{},
	)
	var nothing *managed.Buffer // whose Range is of no memory to begin with
	for what, err := range map[string]error{
		"Attach": nothing.Attach(nil, managed.AttachGlobal), "Clone": gputest.Err(nothing.Clone()),
		"Close": nothing.Close(), "CloseAfter": nothing.CloseAfter(),
	} {
		require.ErrorIs(t, err, cuda.ErrInvalidArgument, what)
	}
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
