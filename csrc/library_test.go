//go:build linux && cgo && (amd64 || arm64) && !cuvmm_nocgo

package csrc_test

import (
	"os"
	"path/filepath"
	"syscall"
	"testing"

	"github.com/cuvmm/cuvmm/csrc"
	"github.com/stretchr/testify/require"
)

// What the loader would find by a bare name is looked at as a path is.
func TestWhatTheLoaderWouldFindIsCheckedFirst(t *testing.T) {
	pipe := filepath.Join(t.TempDir(), "libcuda.so.1")
	require.NoError(t, syscall.Mkfifo(pipe, 0o600))
	o := openInChild(t, filepath.Dir(pipe), "libcuda.so.1")
	require.Equal(t, csrc.NotLoaded, o.Reason)
	require.Contains(t, o.Error, pipe+": it is no regular file")

	whole, err := os.ReadFile(buildFake(t).path)
	require.NoError(t, err)
	cut := filepath.Join(t.TempDir(), "libcuda.so.1")
	require.NoError(t, os.WriteFile(cut, whole[:len(whole)/2], 0o600))
	o = openInChild(t, filepath.Dir(cut), "libcuda.so.1")
	require.Equal(t, csrc.NotLoaded, o.Reason)
	require.Contains(t, o.Error, cut+": the file is cut short")
}

func TestTheLoadersCache(t *testing.T) {
	const magic = "glibc-ld.so.cache1.1"
	names := "libcuda.so.1\x00/first/libcuda.so.1\x00libcuda.so\x00/second/libcuda.so\x00"
	const strings = 48 + 2*24
	cache := append([]byte(magic), le(uint32(2), uint32(len(names)))...)
	cache = append(cache, make([]byte, 48-len(cache))...)
	cache = append(cache, le(uint32(3), uint32(strings), uint32(strings+13), uint32(0), uint64(0))...)
	cache = append(cache, le(uint32(3), uint32(strings+33), uint32(strings+44), uint32(0), uint64(0))...)
	cache = append(cache, names...)
	require.Equal(t, []string{"/first/libcuda.so.1"}, csrc.Cached(cache, "libcuda.so.1"))
	require.Equal(t, []string{"/second/libcuda.so"}, csrc.Cached(cache, "libcuda.so"))
	require.Empty(t, csrc.Cached(cache, "libother.so"))
	older := append([]byte("ld.so-1.7.0 and what it lists;  "), cache...)
	require.Equal(t, []string{"/first/libcuda.so.1"}, csrc.Cached(older, "libcuda.so.1"))
	for n := range cache { // cut anywhere, it is read without harm
		csrc.Cached(cache[:n], "libcuda.so.1")
	}
	copy(cache[20:], []byte{255, 255, 255, 255})
	copy(cache[48+4:], []byte{255, 255, 255, 255})
	csrc.Cached(cache, "libcuda.so.1")
}

func TestNotes(t *testing.T) {
	note := func(name string, desc int, align int) []byte {
		b := append(le(uint32(len(name)), uint32(desc), uint32(1)), name...)
		b = append(b, make([]byte, (4-len(b)%4)%4+desc)...)
		return append(b, make([]byte, (align-len(b)%align)%align)...)
	}
	for _, align := range []int{4, 8} {
		notes := append(note("GNU\x00", 20, align), note("Go\x00\x00", 83, align)...)
		notes = append(notes, note("cuvmm\x00", 0, align)...)
		require.Equal(t, map[string]bool{"GNU": true, "Go": true, "cuvmm": true}, csrc.NoteOwners(notes, align == 8))
		for n := range notes {
			csrc.NoteOwners(notes[:n], align == 8)
		}
	}
	for _, wide := range []bool{false, true} {
		csrc.NoteOwners(le(^uint32(0), ^uint32(0), uint32(1)), wide)
		csrc.NoteOwners(le(uint32(0), ^uint32(0), uint32(1)), wide)
	}
}
