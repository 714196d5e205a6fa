package managed_test

import (
	"testing"

	"github.com/cuvmm/cuvmm/cuda"
	"github.com/cuvmm/cuvmm/internal/test/gputest"
	"github.com/cuvmm/cuvmm/managed"
	"github.com/stretchr/testify/require"
)

// Released tells when one object's closing has ended.
func TestReleased(t *testing.T) {
	m, d := open(t)
	s, err := d.NewStream(cuda.StreamOptions{})
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, s.Close()) })
	t.Cleanup(m.Hold(s.Handle()))
	b, err := managed.New(d, 4096, managed.Options{})
	require.NoError(t, err)
	released := b.Released()
	require.NoError(t, s.Memset(b.Ptr(), 1, 1))
	require.NoError(t, b.CloseAfter(s))
	select {
	case <-released.Done():
		t.Fatal("the GPU still uses it")
	default:
	}
	m.Release(s.Handle())
	require.NoError(t, released.Wait(t.Context()))
	require.Zero(t, m.Count("cuMemFree")-m.Count("cuMemAllocManaged"))

	a, err := managed.NewAllocator(d, managed.Options{})
	require.NoError(t, err)
	words, err := managed.NewArray[uint32](nil, a, 10)
	require.NoError(t, err)
	require.NoError(t, gputest.Err(words.Slice(0, 1)))
	require.NoError(t, words.Close())
	require.NoError(t, words.Released().Wait(t.Context()))
	require.NoError(t, a.Close())
	require.NoError(t, a.Released().Wait(t.Context()))
}
