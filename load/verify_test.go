package load_test

import (
	"testing"

	"github.com/cuvmm/cuvmm/cuda"
	"github.com/cuvmm/cuvmm/handles"
	"github.com/cuvmm/cuvmm/internal/test/gputest"
	"github.com/cuvmm/cuvmm/load"
	"github.com/stretchr/testify/require"
)

// The digests of memory are those of its bytes, and a byte that changes is found.
func TestMemoryIsVerified(t *testing.T) {
	gputest.Each(t, func(t *testing.T, d *cuda.Device) {
		g := on(t, d)
		m := open(t, write(t, "m.safetensors", fileOf(assorted(), nil)))
		l, err := m.Layout(0)
		require.NoError(t, err)
		b := g.buffer(l.Bytes)
		loaded, err := m.LoadAll(t.Context(), load.Options{}, g.stream, l, b.Ptr(), b.Len())
		require.NoError(t, err)
		made, err := load.Verify(t.Context(), load.Options{}, g.stream, l, b.Ptr())
		require.NoError(t, err)
		require.Equal(t, loaded, made, "the digests of the load")
		made, err = load.Verify(t.Context(), load.Options{}, g.stream, loaded, b.Ptr())
		require.NoError(t, err)
		require.Equal(t, loaded, made)

		at := len(l.Tensors) - 1
		last := l.Tensors[at]
		byteOf := b.Ptr() + cuda.Ptr(last.Offset+last.Size()-1)
		was := g.read(byteOf, 1)
		g.write(byteOf, []byte{was[0] ^ 1})
		_, err = load.Verify(t.Context(), load.Options{}, g.stream, loaded, b.Ptr())
		require.ErrorIs(t, err, load.ErrDigest)
		require.ErrorContains(t, err, `load.Verify: digest mismatch: tensor "`+last.Name+`": crc32c:`)
		require.ErrorContains(t, err, loaded.Tensors[at].Digest)
		_, err = load.Verify(t.Context(), load.Options{}, g.stream, l, b.Ptr())
		require.NoError(t, err, "there is nothing to compare with")

		_, err = load.Verify(t.Context(), load.Options{}, g.stream, nil, b.Ptr())
		require.ErrorIs(t, err, cuda.ErrInvalidArgument)
		_, err = load.Verify(t.Context(), load.Options{}, nil, l, b.Ptr())
		require.ErrorIs(t, err, cuda.ErrInvalidArgument)
		_, err = load.Verify(t.Context(), load.Options{}, g.stream, &handles.Manifest{Bytes: -1}, b.Ptr())
		require.ErrorIs(t, err, handles.ErrManifest)
		empty, err := load.Verify(t.Context(), load.Options{}, g.stream, &handles.Manifest{}, 0)
		require.NoError(t, err)
		require.Empty(t, empty.Tensors)
	})
}
