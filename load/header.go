package load

import (
	"encoding/binary"
	"encoding/hex"
	"math"
	"slices"
	"strings"

	"github.com/cuvmm/cuvmm/handles"
	"github.com/cuvmm/cuvmm/internal/disk"
	"github.com/cuvmm/cuvmm/internal/errs"
)

const (
	// maxHeader is the limit of the format.
	maxHeader = 100_000_000
	// lengthBytes is the size of the header's length, which precedes it.
	lengthBytes = 8
	// metadataKey is the one key of the header that is no tensor.
	metadataKey = "__metadata__"
	// digestsKey is the metadata in which SaveSafetensors keeps the digests: eight hexadecimal
	// digits for each tensor, in the order of their places in the file.
	digestsKey = "cuvmm.crc32c"
)

// dtypes are the format's names of element types.
var dtypes = map[string]handles.ElementType{
	"BOOL": handles.Bool, "U8": handles.Uint8, "I8": handles.Int8, "U16": handles.Uint16, "I16": handles.Int16,
	"U32": handles.Uint32, "I32": handles.Int32, "U64": handles.Uint64, "I64": handles.Int64,
	"F8_E4M3": handles.Float8E4M3, "F8_E5M2": handles.Float8E5M2, "F16": handles.Float16, "BF16": handles.BFloat16,
	"F32": handles.Float32, "F64": handles.Float64, "C64": handles.Complex64,
}

// header is what a file says of its tensors.
type header struct {
	metadata map[string]string
	// tensors are in the order of their places. Their offsets count from the file's start.
	tensors []handles.Tensor
}

// readHeader reads a file's header. All that it returns is checked: every tensor's bytes are in
// the file, they follow each other without a gap, and their number is that of the shape.
func readHeader(f *disk.File, size int64) (*header, error) {
	var length [lengthBytes]byte
	if size < lengthBytes {
		return nil, badHeader("", "%s, which is less than the length of a header", errs.Bytes(size))
	}
	if err := f.ReadAt(length[:], 0); err != nil {
		return nil, err
	}
	n := binary.LittleEndian.Uint64(length[:])
	switch {
	case n > maxHeader:
		e := badHeader("", "a header of %d bytes, where the format allows %d", n, maxHeader)
		e.Hint = "pass a file in the safetensors format"
		return nil, e
	case int64(n) > size-lengthBytes:
		return nil, badHeader("", "a header of %s in a file of %s", errs.Bytes(n), errs.Bytes(size))
	}
	text := make([]byte, n)
	if err := f.ReadAt(text, lengthBytes); err != nil {
		return nil, err
	}
	return parseHeader(text, size)
}

// parseHeader is readHeader for the text of the header of a file of so many bytes.
func parseHeader(text []byte, size int64) (*header, error) {
	if len(text) == 0 || text[0] != '{' {
		return nil, badHeader("", "a header that does not begin with {")
	}
	h, s := &header{}, &scanner{text: text}
	var bad *Error
	seen := map[string]struct{}{}
	s.members(func(key string) {
		if _, again := seen[key]; again {
			s.twice(key)
			return
		}
		seen[key] = struct{}{}
		if key == metadataKey {
			h.metadata = map[string]string{}
			s.members(func(key string) {
				if _, again := h.metadata[key]; again {
					s.twice(key)
				}
				h.metadata[key] = s.string()
			})
			return
		}
		t, err := scanTensor(s, key)
		if err != nil && bad == nil && s.err == nil {
			bad = err
			s.fail("")
		}
		h.tensors = append(h.tensors, t)
	})
	s.end()
	switch {
	case bad != nil:
		return nil, bad
	case s.err != nil:
		return nil, badHeader("", "the header's %v", s.err)
	}
	if err := h.place(int64(len(text))+lengthBytes, size); err != nil {
		return nil, err
	}
	return h, h.readDigests()
}

// scanTensor reads what follows a tensor's name. The offset of what it returns is that of the
// format, and its size that of its place.
func scanTensor(s *scanner, name string) (t handles.Tensor, bad *Error) {
	t.Name = name
	var dtype string
	var place []int
	var seen [3]bool
	first := func(i int, key string) {
		if seen[i] {
			s.twice(key)
		}
		seen[i] = true
	}
	s.members(func(key string) {
		switch key {
		case "dtype":
			first(0, key)
			dtype = s.string()
		case "shape":
			first(1, key)
			t.Shape = s.numbers()
		case "data_offsets":
			first(2, key)
			place = s.numbers()
		default:
			s.fail("tensor %s: the key %s, which the format does not have", errs.Words(name), errs.Words(key))
		}
	})
	if s.err != nil {
		return t, nil
	}
	var known bool
	switch t.Element, known = dtypes[dtype]; {
	case seen != [3]bool{true, true, true}:
		return t, badHeader(name, "it lacks dtype, shape or data_offsets")
	case name == "" || len(name) > handles.MaxTensorName:
		return t, badHeader("", "a tensor with a name of %s, where 1 to %d are allowed", errs.Bytes(len(name)), handles.MaxTensorName)
	case !known:
		return t, &Error{Tensor: name, Asked: "dtype " + errs.Words(dtype), Hint: "convert the tensor, or load the other files of the model", kind: ErrElement}
	case len(t.Shape) > handles.MaxTensorDims:
		return t, badHeader(name, "%d dimensions, where %d are allowed", len(t.Shape), handles.MaxTensorDims)
	case len(place) != 2 || place[0] > place[1]:
		return t, badHeader(name, "data_offsets %v, which are no begin and end", place)
	}
	// Size is 0 if any dimension is, and otherwise saturates.
	if size := t.Size(); size == math.MaxInt || size != place[1]-place[0] {
		return t, badHeader(name, "%s at data_offsets %v for a shape of %v and dtype %s", errs.Bytes(place[1]-place[0]), place, t.Shape, dtype)
	}
	t.Offset = place[0]
	return t, nil
}

// place sorts the tensors, and requires that they fill the data, which begins at start.
func (h *header) place(start, size int64) *Error {
	slices.SortStableFunc(h.tensors, func(a, b handles.Tensor) int {
		if a.Offset != b.Offset {
			return a.Offset - b.Offset
		}
		return a.Size() - b.Size() // empty ones come first
	})
	end, data := 0, int(size-start)
	for i := range h.tensors {
		t := &h.tensors[i]
		switch n := t.Size(); {
		case t.Offset < end:
			return badHeader(t.Name, "it begins at %d of the data, within tensor %s, which ends at %d", t.Offset, errs.Words(h.tensors[i-1].Name), end)
		case t.Offset > end:
			return badHeader(t.Name, "it begins at %d of the data, behind a gap from %d on", t.Offset, end)
		case n > data-end:
			return badHeader(t.Name, "it ends at %d of %s of data: the file was cut short", end+n, errs.Bytes(data))
		default:
			end += n
		}
		t.Offset += int(start)
	}
	if end != data {
		return badHeader("", "%s behind the last tensor", errs.Bytes(data-end))
	}
	return nil
}

// readDigests gives the tensors the digests that SaveSafetensors wrote.
func (h *header) readDigests() error {
	all, ok := h.metadata[digestsKey]
	if !ok {
		return nil
	}
	if len(all) != 8*len(h.tensors) || strings.Trim(all, "0123456789abcdef") != "" {
		return badHeader("", "metadata %s of %s for %s", digestsKey, errs.Bytes(len(all)), errs.Count(len(h.tensors), "tensor"))
	}
	for i := range h.tensors {
		h.tensors[i].Digest = digestName + all[8*i:8*i+8]
	}
	return nil
}

// digestName precedes the digits of a digest.
const digestName = "crc32c:"

// digestOf returns the text of a digest, without the cost of fmt: there may be many.
func digestOf(crc uint32) string {
	b := append(make([]byte, 0, len(digestName)+8), digestName...)
	return string(hex.AppendEncode(b, binary.BigEndian.AppendUint32(nil, crc)))
}
