package load_test

import (
	"bytes"
	"encoding/binary"
	"encoding/json"
	"fmt"
	"hash/crc32"
	"math/rand/v2"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/cuvmm/cuvmm/cuda"
	"github.com/cuvmm/cuvmm/handles"
	"github.com/cuvmm/cuvmm/load"
	"github.com/cuvmm/cuvmm/vmm"
	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

const (
	kib = 1 << 10
	mib = 1 << 20
)

// given is a tensor that a test writes to a file, by the format's own names.
type given struct {
	name, dtype string
	shape       []int
	bytes       []byte
}

// element is the size of the dtype's elements.
func (g given) element() int {
	switch strings.TrimLeft(g.dtype, "BFUIOLC") {
	case "64":
		return 8
	case "32":
		return 4
	case "16":
		return 2
	}
	return 1
}

// some returns a tensor of random bytes.
func some(name, dtype string, shape ...int) given {
	g := given{name: name, dtype: dtype, shape: append([]int{}, shape...)}
	n := g.element()
	for _, d := range shape {
		n *= d
	}
	g.bytes = make([]byte, n)
	_, _ = rand.NewChaCha8([32]byte([]byte(fmt.Sprintf("%-32.32s", name)))).Read(g.bytes)
	return g
}

// fileOf returns the bytes of a file, made without the package.
func fileOf(tensors []given, metadata map[string]string) []byte {
	var header, data bytes.Buffer
	header.WriteString("{")
	if metadata != nil {
		m, _ := json.Marshal(metadata)
		fmt.Fprintf(&header, `"__metadata__":%s`, m)
	}
	for _, g := range tensors {
		if header.Len() > 1 {
			header.WriteString(",")
		}
		name, _ := json.Marshal(g.name)
		shape, _ := json.Marshal(g.shape)
		fmt.Fprintf(&header, ` %s : {"dtype":%q,"shape":%s,"data_offsets":[%d, %d]}`, name, g.dtype, shape, data.Len(), data.Len()+len(g.bytes))
		data.Write(g.bytes)
	}
	header.WriteString("}")
	return append(withLength(header.Bytes()), data.Bytes()...)
}

func withLength(header []byte) []byte {
	return append(binary.LittleEndian.AppendUint64(nil, uint64(len(header))), header...)
}

func write(t testing.TB, name string, b []byte) string {
	t.Helper()
	if !filepath.IsAbs(name) {
		name = filepath.Join(t.TempDir(), name)
	}
	require.NoError(t, os.WriteFile(name, b, 0o600))
	return name
}

// open opens a model that the test closes.
func open(t testing.TB, path string) *load.Model {
	t.Helper()
	m, err := load.OpenSafetensors(path)
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, m.Close()) })
	return m
}

// assorted are tensors of many types and sizes, none of which fits another's alignment.
func assorted() []given {
	return []given{
		some("embed", "BF16", 1000, 777), some("scale", "F32"), some("norm.weight", "F32", 4097), some("empty", "F16", 0, 7),
		some("mask", "BOOL", 3, 5, 7), some("codes", "F8_E4M3", 65537), some("sign é \"q\"", "F8_E5M2", 11), some("ids", "I64", 3, 2),
		some("big", "F16", 3, 1001, 1003), some("wave", "C64", 5), some("u", "U32", 33), some("double", "F64", 129),
	}
}

// gpu is a device whose memory a test writes and reads.
type gpu struct {
	testing.TB
	device *cuda.Device
	stream *cuda.Stream
}

func on(t testing.TB, d *cuda.Device) gpu {
	t.Helper()
	s, err := d.NewStream(cuda.StreamOptions{})
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, s.Close()) })
	return gpu{t, d, s}
}

// buffer is memory of n bytes.
func (g gpu) buffer(n int) *vmm.Buffer {
	g.Helper()
	b, err := vmm.NewBuffer(g.device, vmm.BufferOptions{Reserve: max(n, 1)})
	require.NoError(g, err)
	g.Cleanup(func() { require.NoError(g, b.Close()) })
	require.NoError(g, b.Resize(nil, n))
	return b
}

func (g gpu) read(at cuda.Ptr, n int) []byte {
	g.Helper()
	b := make([]byte, n)
	if n > 0 {
		require.NoError(g, g.stream.Download(b, at))
	}
	return b
}

func (g gpu) write(at cuda.Ptr, b []byte) {
	g.Helper()
	if len(b) > 0 {
		require.NoError(g, g.stream.Upload(at, b))
		require.NoError(g, g.stream.Synchronize())
	}
}

func digestOf(b []byte) string {
	return fmt.Sprintf("crc32c:%08x", crc32.Checksum(b, crc32.MakeTable(crc32.Castagnoli)))
}

// holds requires that memory holds the tensors as a layout says, with their digests.
func (g gpu) holds(l *handles.Manifest, at cuda.Ptr, tensors []given) {
	g.Helper()
	image, all := g.read(at, l.Bytes), l.ByName()
	require.Len(g, l.Tensors, len(tensors))
	for _, want := range tensors {
		got, ok := all[want.name]
		require.True(g, ok, want.name)
		require.Equal(g, append([]int{}, want.shape...), append([]int{}, got.Shape...))
		require.True(g, bytes.Equal(want.bytes, image[got.Offset:][:got.Size()]), "the bytes of %s differ", want.name)
		require.Equal(g, digestOf(want.bytes), got.Digest, want.name)
	}
}

var readings = []load.Reading{load.Automatic, load.PageCache, load.Direct}

// ieee is the checksum of zlib.
func ieee(b []byte) string { return fmt.Sprint(crc32.ChecksumIEEE(b)) }
