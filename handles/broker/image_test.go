//go:build linux

package broker_test

import (
	"bytes"
	"io/fs"
	"os"
	"strings"
	"testing"

	"github.com/cuvmm/cuvmm/cuda"
	"github.com/cuvmm/cuvmm/handles"
	"github.com/cuvmm/cuvmm/handles/broker"
	"github.com/cuvmm/cuvmm/internal/test/gputest"
	"github.com/cuvmm/cuvmm/internal/test/peertest"
	"github.com/cuvmm/cuvmm/load"
	"github.com/stretchr/testify/require"
)

// Tensors that share memory are in an image each by itself, and share it again.
func TestImagesOfTiedTensors(t *testing.T) {
	gputest.Each(t, func(t *testing.T, d *cuda.Device) {
		peertest.NoLeak(t)
		k := newHouse(t, d, broker.Options{}).dial()
		ctx := peertest.Context(t)
		path := t.TempDir() + "/tied.safetensors"
		m := &handles.Manifest{Bytes: mib, Tensors: []handles.Tensor{
			{Name: "embed", Element: handles.Float32, Shape: []int{64, 1024}, Alias: 1},
			{Name: "head", Element: handles.Float32, Shape: []int{64, 1024}, Alias: 1},
			{Name: "rows", Element: handles.Float32, Shape: []int{2, 1024}, Offset: 4096, Alias: 1},
			{Name: "bias", Element: handles.Float32, Shape: []int{7}, Offset: mib / 2},
		}}
		w, err := k.Create(ctx, d, "tied", broker.CreateOptions{Bytes: mib})
		require.NoError(t, err)
		require.NoError(t, fill(w.Buffer(), pattern(mib, 1)))
		o, err := w.Commit(ctx, m)
		require.NoError(t, err)
		require.NoError(t, o.Save(ctx, path))
		closed(t, o)
		require.NoError(t, k.Remove(ctx, "tied", 0))
		o, err = k.Load(ctx, d, "tied", path, broker.CreateOptions{})
		require.NoError(t, err)
		require.NoError(t, o.Manifest().Match(m), "the same places, and what shares memory")
		for _, tensor := range o.Manifest().Tensors {
			require.Equal(t, pattern(mib, 1)[tensor.Offset:][:tensor.Size()], read(t, o.Buffer())[tensor.Offset:][:tensor.Size()], tensor.Name)
		}
		require.NoError(t, o.Verify(ctx), "each has a digest")
		require.NoError(t, k.Remove(ctx, "tied", 0))
		closed(t, o)
	})
}

// An image brings back an object as it was, and no image is made of one that was written to.
func TestImages(t *testing.T) {
	gputest.Each(t, func(t *testing.T, d *cuda.Device) {
		peertest.NoLeak(t)
		h := newHouse(t, d, broker.Options{})
		k := h.dial()
		ctx := peertest.Context(t)
		const n = 3*mib + 5
		path := t.TempDir() + "/w.safetensors"
		// The places are none that a loader would choose.
		m := &handles.Manifest{Bytes: n, Tensors: []handles.Tensor{
			{Name: "b", Element: handles.Float32, Shape: []int{2, 128 << 10}, Offset: mib}, {Name: "a", Element: handles.Uint8, Shape: []int{5}, Offset: 3 * mib},
		}}
		commit := func(name string, m *handles.Manifest) *broker.Object {
			w, err := k.Create(ctx, d, name, broker.CreateOptions{Bytes: n})
			require.NoError(t, err)
			require.NoError(t, fill(w.Buffer(), pattern(n, 1)))
			o, err := w.Commit(ctx, m)
			require.NoError(t, err)
			return o
		}
		o := commit("w", m)
		require.NoError(t, o.Save(ctx, path))
		closed(t, o)
		require.NoError(t, k.Remove(ctx, "w", 0))

		model, err := load.OpenSafetensors(path)
		require.NoError(t, err)
		name, device := broker.ImageOf(model)
		require.Equal(t, []string{"w", d.UUID().String()}, []string{name, device})
		closed(t, model)
		o, err = k.Load(ctx, d, "w", path, broker.CreateOptions{})
		require.NoError(t, err)
		require.NoError(t, o.Manifest().Match(m), "the same places")
		for _, tensor := range o.Manifest().Tensors {
			got := read(t, o.Buffer())[tensor.Offset:][:tensor.Size()]
			require.Equal(t, pattern(n, 1)[tensor.Offset:][:tensor.Size()], got)
		}
		require.NoError(t, o.Verify(ctx), "a load has digests")
		again, err := k.Load(ctx, d, "w", path, broker.CreateOptions{})
		require.NoError(t, err)
		require.Equal(t, o.About().Version, again.About().Version, "it is there")
		closed(t, again)

		stray, err := k.AttachWriting(ctx, d, "w")
		require.NoError(t, err)
		part, err := stray.Buffer().Slice(3*mib, n)
		require.NoError(t, err)
		require.NoError(t, part.Zero(nil))
		before, err := os.ReadFile(path)
		require.NoError(t, err)
		require.ErrorIs(t, o.Save(ctx, path), load.ErrDigest)
		after, err := os.ReadFile(path)
		require.NoError(t, err)
		require.True(t, bytes.Equal(before, after), "the image stays")
		closed(t, o, stray)

		bare := commit("bare", nil)
		require.ErrorIs(t, bare.Save(ctx, path), cuda.ErrNotSupported)
		closed(t, bare)
		_, err = k.Load(ctx, d, "x", path+"x", broker.CreateOptions{})
		require.ErrorIs(t, err, fs.ErrNotExist)
		const oddly = `\"offset\":1048577` // a place like another
		for from, to := range map[string]string{`\"offset\":1048576`: oddly, `\"name\":\"a\"`: `\"name\":\"c\"`, `{\"bytes\":`: `[\"bytes\":`} {
			forged := bytes.Replace(before, []byte(from), []byte(to), 1)
			require.False(t, bytes.Equal(before, forged), from)
			require.NoError(t, os.WriteFile(path, forged, 0o600))
			o, err := k.Load(ctx, d, "x", path, broker.CreateOptions{})
			if to == oddly {
				require.NoError(t, err)
				closed(t, o)
				require.NoError(t, k.Remove(ctx, "x", 0))
				continue
			}
			require.ErrorContains(t, err, map[bool]string{true: "no such tensor", false: "save the object anew"}[strings.Contains(to, "name")])
		}
		for _, name := range []string{"w", "bare"} {
			require.NoError(t, k.Remove(ctx, name, 0))
		}
		_, _, err = d.MemoryInfo() // the software driver closes what others held until now
		require.NoError(t, err)
	})
}
