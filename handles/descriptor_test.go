package handles_test

import (
	"errors"
	"math"
	"strings"
	"testing"

	"github.com/cuvmm/cuvmm/cuda"
	"github.com/cuvmm/cuvmm/handles"
	"github.com/cuvmm/cuvmm/handles/peer"
	"github.com/cuvmm/cuvmm/vmm"
	"github.com/stretchr/testify/require"
)

const mib = 1 << 20

func aUUID() (u cuda.UUID) {
	for i := range u {
		u[i] = byte(0xa0 + i)
	}
	return u
}

// anArray is a valid descriptor of 5 MiB of float32 in three chunks.
func anArray() handles.Descriptor {
	return handles.Descriptor{
		Kind: handles.ArrayKind, Element: handles.Float32, ElementSize: 4, Length: 5 * mib / 4,
		Chunks:   []int{2 * mib, 2 * mib, 4 * mib},
		Location: cuda.OnDevice(3), Device: aUUID(), RDMA: true, Handle: vmm.PosixFD,
		Generation: 7, Exporter: handles.Process{PID: 4711, Instance: [16]byte{1, 2, 15: 16}},
	}
}

func TestValidate(t *testing.T) {
	limits := handles.Limits{Granularity: 2 * mib, MaxBytes: 8 * mib}
	for _, c := range []struct {
		name   string
		change func(d *handles.Descriptor)
		want   error
		says   string
	}{
		{"valid", func(*handles.Descriptor) {}, nil, ""},
		{"memory of a node", func(d *handles.Descriptor) {
			*d = handles.Descriptor{Kind: handles.BufferKind, Chunks: []int{2 * mib}, Location: cuda.OnHostNUMA(0), Handle: vmm.Fabric}
		}, nil, ""},
		{"a buffer without chunks", func(d *handles.Descriptor) {
			d.Kind, d.Element, d.ElementSize, d.Length, d.Chunks = handles.BufferKind, 0, 0, 0, nil
		}, nil, ""},
		{"no kind", func(d *handles.Descriptor) { d.Kind = 0 }, handles.ErrDescriptor, "Kind(0)"},
		{"an unknown kind", func(d *handles.Descriptor) { d.Kind = 4 }, handles.ErrDescriptor, "Kind(4)"},
		{"a kind below those", func(d *handles.Descriptor) { d.Kind = 1 }, handles.ErrDescriptor, "Kind(1)"},
		{"a typed buffer", func(d *handles.Descriptor) { d.Kind = handles.BufferKind }, handles.ErrDescriptor, "describe it as an array"},
		{"an array of nothing", func(d *handles.Descriptor) { d.Element = 0 }, handles.ErrDescriptor, "array of none"},
		{"an unknown element", func(d *handles.Descriptor) { d.Element = 19 }, handles.ErrDescriptor, "ElementType(19)"},
		{"an element of no type", func(d *handles.Descriptor) { d.Element, d.ElementSize = 19, 2 }, handles.ErrDescriptor, "array of ElementType(19)"},
		{"a marked element of another size", func(d *handles.Descriptor) { d.Element, d.ElementSize = handles.BFloat16, 1 }, handles.ErrDescriptor, "bfloat16 and size 1"},
		{"an element of another size", func(d *handles.Descriptor) { d.ElementSize = 8 }, handles.ErrDescriptor, "float32 and size 8"},
		{"a record of no size", func(d *handles.Descriptor) { d.Element, d.ElementSize = handles.Record, 0 }, handles.ErrDescriptor, "record and size 0"},
		{"one element too many", func(d *handles.Descriptor) { d.Length = 2*mib + 1 }, handles.ErrDescriptor, "a length of 2097153 times 4 bytes in chunks of 8 MiB"},
		{"a length that wraps", func(d *handles.Descriptor) { d.Length = 1 << 62 }, handles.ErrDescriptor, "declare no more"},
		{"an empty chunk", func(d *handles.Descriptor) { d.Chunks[1] = 0 }, handles.ErrDescriptor, "chunk 1 has 0 bytes"},
		{"a negative chunk", func(d *handles.Descriptor) { d.Chunks[1] = -2 * mib }, handles.ErrDescriptor, "chunk 1 has -2097152 bytes"},
		{"a negative length", func(d *handles.Descriptor) { d.Length = -1 }, handles.ErrDescriptor, "a length of -1"},
		{"elements of a negative size", func(d *handles.Descriptor) { d.Element, d.ElementSize = handles.Record, -4 }, handles.ErrDescriptor, "size -4"},
		{"elements beyond 32 bits", func(d *handles.Descriptor) { d.Element, d.ElementSize = handles.Record, 1<<32 }, handles.ErrDescriptor, "size 4294967296"},
		{"sizes that wrap", func(d *handles.Descriptor) { d.Chunks = []int{math.MaxInt - 2*mib + 1, 2 * mib, 2 * mib} }, peer.ErrTooLarge, "more than 1024 PiB"},
		{"an odd size", func(d *handles.Descriptor) { d.Chunks[2] = 3 * mib }, handles.ErrSizeMismatch, "chunk 2 has 3 MiB, which is no multiple of 2 MiB"},
		{"more than allowed", func(d *handles.Descriptor) { d.Chunks[2] = 6 * mib }, peer.ErrTooLarge, "10 MiB, of which 8 MiB are allowed"},
		{"more chunks than any", func(d *handles.Descriptor) { d.Chunks = make([]int, handles.MaxChunks+1) }, peer.ErrTooLarge, "65537 chunks"},
		{"host memory", func(d *handles.Descriptor) { d.Location, d.Device = cuda.OnHost(), cuda.UUID{} }, handles.ErrDescriptor, "location host"},
		{"nowhere", func(d *handles.Descriptor) { d.Location = cuda.Location{} }, handles.ErrDescriptor, "location none"},
		{"a negative device", func(d *handles.Descriptor) { d.Location.ID = -1 }, handles.ErrDescriptor, "numbered from 0"},
		{"a device beyond 32 bits", func(d *handles.Descriptor) { d.Location.ID = math.MaxInt32; d.Location.ID++ }, handles.ErrDescriptor, "numbered from 0"},
		{"a device without UUID", func(d *handles.Descriptor) { d.Device = cuda.UUID{} }, handles.ErrDescriptor, "set Device"},
		{"a node with UUID", func(d *handles.Descriptor) { d.Location = cuda.OnHostNUMA(1) }, handles.ErrDescriptor, "leave Device"},
		{"no handle", func(d *handles.Descriptor) { d.Handle = vmm.DefaultHandles }, handles.ErrDescriptor, "handle type default"},
		{"a handle of another kind", func(d *handles.Descriptor) { d.Handle = vmm.PosixFD | 2 }, handles.ErrDescriptor, "handle type HandleTypes(0x3)"},
	} {
		t.Run(c.name, func(t *testing.T) {
			d := anArray()
			c.change(&d)
			err := d.Validate(limits)
			_, marshal := d.MarshalBinary()
			if c.want == nil {
				require.NoError(t, err)
				require.NoError(t, marshal)
				return
			}
			require.ErrorIs(t, err, c.want)
			require.ErrorContains(t, err, c.says)
			require.ErrorContains(t, err, "; ", "it says what to do")
			if errors.Is(c.want, handles.ErrDescriptor) {
				require.ErrorIs(t, marshal, c.want, "what is not valid is not written")
			}
		})
	}
	d := anArray()
	require.ErrorIs(t, d.Validate(handles.Limits{}), cuda.ErrInvalidArgument)
	require.ErrorIs(t, d.Validate(handles.Limits{Granularity: -1, MaxBytes: mib}), cuda.ErrInvalidArgument)
	require.ErrorIs(t, d.Validate(handles.Limits{Granularity: mib, MaxBytes: -1}), cuda.ErrInvalidArgument)
	limits.MaxChunks = 2
	require.ErrorIs(t, d.Validate(limits), peer.ErrTooLarge)
}

// The form is a promise to other versions and languages.
func TestBinaryFormIsPinned(t *testing.T) {
	d := anArray()
	b, err := d.MarshalBinary()
	require.NoError(t, err)
	want := "cuvD" + "\x01\x00" + "\x03" + "\x0a" + "\x04\x00\x00\x00" + "\x00\x00\x14\x00\x00\x00\x00\x00" +
		"\x01" + "\x02" + "\x01\x00" + "\x03\x00\x00\x00" +
		"\xa0\xa1\xa2\xa3\xa4\xa5\xa6\xa7\xa8\xa9\xaa\xab\xac\xad\xae\xaf" +
		"\x07\x00\x00\x00\x00\x00\x00\x00" + "\x67\x12\x00\x00" +
		"\x01\x02" + strings.Repeat("\x00", 13) + "\x10" +
		"\x03\x00\x00\x00" + "\x00\x00\x20\x00\x00\x00\x00\x00" + "\x00\x00\x20\x00\x00\x00\x00\x00" + "\x00\x00\x40\x00\x00\x00\x00\x00"
	require.Equal(t, want, string(b))
}

func TestOtherBytesAreRefused(t *testing.T) {
	d := anArray()
	good, err := d.MarshalBinary()
	require.NoError(t, err)
	for _, c := range []struct {
		name   string
		change func(b []byte) []byte
		want   error
		says   string
	}{
		{"nothing", func([]byte) []byte { return nil }, handles.ErrDescriptor, "0 bytes"},
		{"half a header", func(b []byte) []byte { return b[:40] }, handles.ErrDescriptor, "40 bytes, of which a descriptor has at least 76"},
		{"a chunk missing", func(b []byte) []byte { return b[:len(b)-8] }, handles.ErrDescriptor, "16 bytes for the sizes of 3 chunks, which take 24"},
		{"a byte missing", func(b []byte) []byte { return b[:len(b)-1] }, handles.ErrDescriptor, "23 bytes"},
		{"a byte too many", func(b []byte) []byte { return append(b, 0) }, handles.ErrDescriptor, "1 byte behind the sizes of 3 chunks"},
		{"a count of 4 thousand millions", func(b []byte) []byte { copy(b[72:], "\xff\xff\xff\xff"); return b }, handles.ErrDescriptor, "4294967295 chunks"},
		{"far too long", func([]byte) []byte { return make([]byte, handles.MaxDescriptorBytes+1) }, peer.ErrTooLarge, "524365 bytes"},
		{"other magic", func(b []byte) []byte { b[3] = 'E'; return b }, handles.ErrDescriptor, `"cuvE"`},
		{"a later version", func(b []byte) []byte { b[4] = 2; return b }, handles.ErrDescriptor, "version 2"},
		{"an unknown flag", func(b []byte) []byte { b[21] |= 4; return b }, handles.ErrDescriptor, "flags 0x6"},
		{"a negative device", func(b []byte) []byte { b[27] = 0x80; return b }, handles.ErrDescriptor, "numbered from 0"},
		{"a chunk beyond an int", func(b []byte) []byte { copy(b[76:], "\xff\xff\xff\xff\xff\xff\xff\xff"); return b }, peer.ErrTooLarge, "chunk 0 has"},
		{"a chunk that is a negative int", func(b []byte) []byte { copy(b[84:], "\x00\x00\x00\x00\x00\x00\x00\x80"); return b }, peer.ErrTooLarge, "chunk 1 has"},
		{"a length beyond an int", func(b []byte) []byte { copy(b[12:], "\xff\xff\xff\xff\xff\xff\xff\xff"); return b }, handles.ErrDescriptor, "a length of 18446744073709551615"},
		{"an invalid value", func(b []byte) []byte { b[6] = 9; return b }, handles.ErrDescriptor, "Kind(9)"},
	} {
		t.Run(c.name, func(t *testing.T) {
			got := handles.Descriptor{Generation: 99}
			err := got.UnmarshalBinary(c.change([]byte(string(good))))
			require.ErrorIs(t, err, c.want)
			require.ErrorContains(t, err, c.says)
			require.Equal(t, handles.Descriptor{Generation: 99}, got, "it is as it was")
		})
	}
}

func TestElementOf(t *testing.T) {
	type mine float64
	for _, c := range []struct {
		of   func() (handles.ElementType, int)
		want handles.ElementType
		size int
	}{
		{handles.ElementOf[float32], handles.Float32, 4},
		{handles.ElementOf[byte], handles.Uint8, 1},
		{handles.ElementOf[mine], handles.Float64, 8},
		{handles.ElementOf[bool], handles.Bool, 1},
		{handles.ElementOf[handles.BF16], handles.BFloat16, 2},
		{handles.ElementOf[handles.F16], handles.Float16, 2},
		{handles.ElementOf[handles.F8E4M3], handles.Float8E4M3, 1},
		{handles.ElementOf[handles.F8E5M2], handles.Float8E5M2, 1},
		{handles.ElementOf[complex128], handles.Complex128, 16},
		{handles.ElementOf[[3]float32], handles.Record, 12},
		{handles.ElementOf[struct{ A, B uint16 }], handles.Record, 4},
	} {
		e, size := c.of()
		require.Equal(t, c.want, e)
		require.Equal(t, c.size, size)
	}
	e, size := handles.ElementOf[int]()
	require.Contains(t, map[handles.ElementType]int{handles.Int32: 4, handles.Int64: 8}, e)
	require.Equal(t, map[handles.ElementType]int{handles.Int32: 4, handles.Int64: 8}[e], size)
}
