package load_test

import (
	"bytes"
	"context"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"github.com/cuvmm/cuvmm/cuda"
	"github.com/cuvmm/cuvmm/cuda/sim"
	"github.com/cuvmm/cuvmm/handles"
	"github.com/cuvmm/cuvmm/internal/test/gputest"
	"github.com/cuvmm/cuvmm/load"
	"github.com/stretchr/testify/require"
)

// readBack is a reader of the format by its specification alone: what it returns are the
// bytes of each tensor, and the metadata.
func readBack(t testing.TB, path string) (tensors map[string]given, metadata map[string]string, aligned int) {
	t.Helper()
	b, err := os.ReadFile(path)
	require.NoError(t, err)
	n := binary.LittleEndian.Uint64(b)
	require.LessOrEqual(t, n, uint64(100_000_000))
	var header map[string]json.RawMessage
	require.NoError(t, json.Unmarshal(b[8:8+n], &header))
	require.Equal(t, byte('{'), b[8])
	data, taken, tensors := b[8+n:], make([]byte, len(b[8+n:])), map[string]given{}
	for name, raw := range header {
		if name == "__metadata__" {
			require.NoError(t, json.Unmarshal(raw, &metadata))
			continue
		}
		var x struct {
			Dtype   string `json:"dtype"`
			Shape   []int  `json:"shape"`
			Offsets []int  `json:"data_offsets"`
		}
		require.NoError(t, json.Unmarshal(raw, &x))
		require.Len(t, x.Offsets, 2)
		g := given{name, x.Dtype, x.Shape, data[x.Offsets[0]:x.Offsets[1]]}
		n := g.element()
		for _, d := range x.Shape {
			n *= d
		}
		require.Len(t, g.bytes, n)
		require.Zero(t, (8+header0(b)+x.Offsets[0])%g.element(), "%s is aligned to its elements", name)
		if len(g.bytes)%4096 == 0 && len(g.bytes) > 0 {
			require.Zero(t, (8+header0(b)+x.Offsets[0])%4096, name)
			aligned++
		}
		require.NotContains(t, string(taken[x.Offsets[0]:x.Offsets[1]]), "x", "bytes of two tensors")
		copy(taken[x.Offsets[0]:x.Offsets[1]], strings.Repeat("x", len(g.bytes)))
		tensors[name] = g
	}
	require.NotContains(t, string(taken), "\x00", "the format allows no gaps")
	return tensors, metadata, aligned
}

func header0(b []byte) int { return int(binary.LittleEndian.Uint64(b)) }

// What is saved is read by others, and loaded again, with digests that are compared.
func TestWhatIsSavedIsLoaded(t *testing.T) {
	tensors := append(assorted(), some("block", "F32", 1024), some("two blocks", "BF16", 4096))
	path := write(t, "model.safetensors", fileOf(tensors, nil))
	gputest.Each(t, func(t *testing.T, d *cuda.Device) {
		g := on(t, d)
		m := open(t, path)
		l, err := m.Layout(0)
		require.NoError(t, err)
		b := g.buffer(l.Bytes)
		made, err := m.LoadAll(t.Context(), load.Options{}, g.stream, l, b.Ptr(), b.Len())
		require.NoError(t, err)
		for _, o := range []load.SaveOptions{{}, {Metadata: map[string]string{"format": "pt", "note": "<é>\n", "cuvmm.crc32c": "stale"}}, {NoDigests: true, Threads: 1}} {
			saved := write(t, "saved.safetensors", []byte("what was there before"))
			var last load.Progress
			o.Progress = func(p load.Progress) { last = p }
			require.NoError(t, load.SaveSafetensors(t.Context(), o, g.stream, saved, load.SavingsOf(made, b.Ptr())...))
			require.Equal(t, last.Total, last.Done)
			got, metadata, aligned := readBack(t, saved)
			require.Equal(t, 2, aligned)
			require.Len(t, got, len(tensors))
			for _, want := range tensors {
				require.Equal(t, want.dtype, got[want.name].dtype)
				require.True(t, bytes.Equal(want.bytes, got[want.name].bytes), want.name)
			}
			_, digests := metadata["cuvmm.crc32c"]
			require.Equal(t, !o.NoDigests, digests)
			delete(metadata, "cuvmm.crc32c")
			if want := o.Metadata["note"]; want != "" {
				require.Equal(t, map[string]string{"format": "pt", "note": want}, metadata)
			}
			left, err := os.ReadDir(filepath.Dir(saved))
			require.NoError(t, err)
			require.Len(t, left, 1)

			again := open(t, saved)
			for _, x := range again.Tensors() {
				require.Equal(t, !o.NoDigests, x.Digest != "")
			}
			l, err := again.Layout(0)
			require.NoError(t, err)
			c := g.buffer(l.Bytes)
			made, err := again.LoadAll(t.Context(), load.Options{}, g.stream, l, c.Ptr(), c.Len())
			require.NoError(t, err)
			g.holds(made, c.Ptr(), tensors)
		}
	})
}

// Damage that size and time do not show is found by the digests, in whole tensors.
func TestDamageIsFound(t *testing.T) {
	tensors := []given{some("fine", "F32", 1024), some("damaged", "U8", 9*mib+5)}
	g := on(t, gputest.Software(t))
	m := open(t, write(t, "model.safetensors", fileOf(tensors, nil)))
	l, err := m.Layout(0)
	require.NoError(t, err)
	b := g.buffer(l.Bytes)
	_, err = m.LoadAll(t.Context(), load.Options{}, g.stream, l, b.Ptr(), b.Len())
	require.NoError(t, err)
	saved := filepath.Join(t.TempDir(), "saved")
	require.NoError(t, load.SaveSafetensors(t.Context(), load.SaveOptions{}, g.stream, saved, load.SavingsOf(l, b.Ptr())...))
	f, err := os.OpenFile(saved, os.O_RDWR, 0)
	require.NoError(t, err)
	info, err := f.Stat()
	require.NoError(t, err)
	_, err = f.WriteAt([]byte{^tensors[1].bytes[9*mib]}, info.Size()-5)
	require.NoError(t, err)
	require.NoError(t, f.Close())
	m = open(t, saved)
	_, err = m.LoadAll(t.Context(), load.Options{}, g.stream, l, b.Ptr(), b.Len())
	require.ErrorIs(t, err, load.ErrDigest)
	var e *load.Error
	require.ErrorAs(t, err, &e)
	require.Equal(t, "damaged", e.Tensor)
	require.Equal(t, saved, e.File)
	_, err = m.Verify(t.Context(), load.Options{}, l)
	require.ErrorIs(t, err, load.ErrDigest)
	_, err = m.LoadAll(t.Context(), load.Options{NoDigests: true}, g.stream, l, b.Ptr(), b.Len())
	require.NoError(t, err)
}

// A save that fails leaves what was there, and nothing beside it.
func TestASaveThatFails(t *testing.T) {
	m, sys := sim.Open(t)
	g := on(t, sys.Devices()[0])
	b := g.buffer(64 * mib)
	g.write(b.Ptr(), make([]byte, 64*mib))
	one := load.Saving{Name: "w", Element: handles.Uint8, Shape: []int{64 * mib}, From: b.Ptr()}
	named := func(name string) load.Saving { s := one; s.Name = name; return s }
	huge := one
	huge.Shape = []int{1 << 43} // beyond what this file system has, and never read
	path := write(t, "model.safetensors", []byte("before"))
	save := func(ctx context.Context, path string, s ...load.Saving) error {
		return load.SaveSafetensors(ctx, load.SaveOptions{}, g.stream, path, s...)
	}
	err := save(t.Context(), path, huge)
	require.True(t, errors.Is(err, syscall.ENOSPC) || errors.Is(err, syscall.EFBIG), "%v", err)
	var e *load.Error
	require.ErrorAs(t, err, &e)
	require.Equal(t, path, e.File)
	require.ErrorIs(t, save(t.Context(), filepath.Join(filepath.Dir(path), "absent", "x"), one), os.ErrNotExist)
	require.ErrorIs(t, save(t.Context(), filepath.Dir(path), one), syscall.EISDIR)
	for _, wrong := range []load.Saving{
		named(""), named("__metadata__"), named("\xff"),
		{Name: "w", Element: handles.Record, Shape: []int{1}, From: b.Ptr()},
		{Name: "w", Element: handles.Complex128, Shape: []int{1}, From: b.Ptr()},
		{Name: "w", Element: handles.Uint8, Shape: []int{-1}, From: b.Ptr()},
		{Name: "w", Element: handles.Uint64, Shape: []int{1 << 31, 1 << 31}, From: b.Ptr()},
		{Name: "w", Element: handles.Uint8, Shape: []int{1}},
		{Name: "w", Element: handles.Uint8, Shape: []int{1}, From: b.Ptr(), Strides: []int{1}},
	} {
		err := save(t.Context(), path, wrong)
		require.True(t, errors.Is(err, cuda.ErrInvalidArgument) || errors.Is(err, handles.ErrManifest), "%v", err)
	}
	require.ErrorIs(t, save(t.Context(), path, one, one), handles.ErrManifest)

	release := m.Hold(g.stream.Handle())
	require.NoError(t, g.stream.Memset(b.Ptr(), 1, 64*mib))
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error, 1)
	go func() { done <- save(ctx, path, one) }()
	cancel()
	require.ErrorIs(t, <-done, context.Canceled)
	release()
	require.NoError(t, sys.Drain(t.Context()))

	was, err := os.ReadFile(path)
	require.NoError(t, err)
	require.Equal(t, "before", string(was))
	left, err := os.ReadDir(filepath.Dir(path))
	require.NoError(t, err)
	require.Len(t, left, 1)
}

// Python's own package reads what is saved, where it is installed.
func TestPythonReadsWhatIsSaved(t *testing.T) {
	if err := exec.CommandContext(t.Context(), "python3", "-c", "import safetensors").Run(); err != nil {
		t.Skip("python3 with the package safetensors is not installed")
	}
	tensors := append(assorted(), some("block", "F32", 1024))
	g := on(t, gputest.Software(t))
	m := open(t, write(t, "model.safetensors", fileOf(tensors, nil)))
	l, err := m.Layout(0)
	require.NoError(t, err)
	b := g.buffer(l.Bytes)
	_, err = m.LoadAll(t.Context(), load.Options{}, g.stream, l, b.Ptr(), b.Len())
	require.NoError(t, err)
	path := filepath.Join(t.TempDir(), "saved.safetensors")
	var from []load.Saving
	for _, s := range load.SavingsOf(l, b.Ptr()) {
		if s.Element != handles.Complex64 { // which older versions of the package lack
			from = append(from, s)
		}
	}
	require.NoError(t, load.SaveSafetensors(t.Context(), load.SaveOptions{Metadata: map[string]string{"format": "pt"}}, g.stream, path, from...))
	out, err := exec.CommandContext(t.Context(), "python3", "-c", `
import json, sys, zlib, safetensors
found = safetensors.deserialize(open(sys.argv[1], "rb").read())
print(json.dumps({name: [x["dtype"], x["shape"], str(zlib.crc32(bytes(x["data"])))] for name, x in found}))
`, path).Output()
	require.NoError(t, err)
	var found map[string][]any
	require.NoError(t, json.Unmarshal(out, &found))
	require.Len(t, found, len(from))
	for _, want := range tensors {
		if want.dtype != "C64" {
			require.Equal(t, want.dtype, found[want.name][0])
			require.Equal(t, ieee(want.bytes), fmt.Sprint(found[want.name][2]))
		}
	}
}
