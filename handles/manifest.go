package handles

import (
	"bytes"
	"crypto/sha256"
	"encoding/binary"
	"encoding/json"
	"fmt"
	"math"
	"slices"
	"unicode/utf8"

	"github.com/cuvmm/cuvmm/internal/errs"
)

// Limits of a Manifest.
const (
	// MaxTensors is the maximum number of tensors.
	MaxTensors = 1 << 20
	// MaxTensorName is the maximum length of a tensor's name, in bytes.
	MaxTensorName = 4096
	// MaxTensorDims is the maximum number of a tensor's dimensions.
	MaxTensorDims = 64
)

// Tensor describes a tensor in memory: contiguous elements in row-major order.
type Tensor struct {
	Name    string      `json:"name"`
	Element ElementType `json:"element"`
	// Shape has the lengths of the dimensions, the outermost first. A scalar has none.
	Shape []int `json:"shape"`
	// Offset is where the tensor begins, in bytes from the start of the memory.
	Offset int `json:"offset"`
	// Digest is a digest of the bytes, such as "crc32c:0a1b2c3d", or empty.
	Digest string `json:"digest,omitempty"`
}

// Size returns the size in bytes. It saturates, and is 0 for shapes that Manifest.Validate refuses.
func (t *Tensor) Size() int {
	n := t.Element.Size()
	for _, d := range t.Shape {
		switch {
		case d <= 0:
			return 0
		case n > math.MaxInt/d:
			n = math.MaxInt
		default:
			n *= d
		}
	}
	return n
}

// Manifest says which tensors memory holds, and where. It is a plain value, which a publisher
// passes to its followers beside the memory.
type Manifest struct {
	// Bytes is the size of the memory.
	Bytes int `json:"bytes"`
	// Tensors are in the order of their offsets, and do not overlap.
	Tensors []Tensor `json:"tensors"`
}

// Validate checks a manifest that came from elsewhere. After it every tensor lies within
// Bytes, no two overlap, and each name occurs once. Whoever maps the memory compares Bytes with
// its size.
func (m *Manifest) Validate() error {
	const op = "handles.Manifest.Validate"
	bad := func(t *Tensor, hint, format string, args ...any) error {
		return errs.Peer(op, ErrManifest, "tensor "+errs.Words(t.Name)+": "+fmt.Sprintf(format, args...), hint)
	}
	if m.Bytes < 0 || m.Bytes > maxBytes {
		return errs.Peer(op, ErrManifest, fmt.Sprintf("%d bytes of memory", m.Bytes), "declare the size of the memory")
	}
	if len(m.Tensors) > MaxTensors {
		return errs.Peer(op, ErrManifest, fmt.Sprintf("%d tensors, where %d is the most", len(m.Tensors), MaxTensors), "divide the memory")
	}
	names, end := make(map[string]struct{}, len(m.Tensors)), 0
	for i := range m.Tensors {
		t := &m.Tensors[i]
		if t.Name == "" || len(t.Name) > MaxTensorName || !utf8.ValidString(t.Name) {
			return errs.Peer(op, ErrManifest, fmt.Sprintf("tensor %d has a name of %s", i, errs.Bytes(len(t.Name))),
				fmt.Sprintf("name it in UTF-8 of 1 to %d bytes", MaxTensorName))
		}
		if _, again := names[t.Name]; again {
			return bad(t, "name each tensor once", "the name occurs twice")
		}
		names[t.Name] = struct{}{}
		if t.Element.Size() == 0 {
			return bad(t, "use an element type of a fixed size", "elements of type %v", t.Element)
		}
		if len(t.Shape) > MaxTensorDims || slices.ContainsFunc(t.Shape, func(d int) bool { return d < 0 }) {
			return bad(t, fmt.Sprintf("use at most %d dimensions, of lengths from 0", MaxTensorDims), "a shape of %v", t.Shape)
		}
		size := t.Size()
		if t.Offset < end || t.Offset > m.Bytes || size > m.Bytes-t.Offset {
			return bad(t, "sort the tensors by offset, without overlap, within the memory",
				"%s from offset %d on, behind a tensor that ends at %d of %d", errs.Bytes(size), t.Offset, end, m.Bytes)
		}
		end = t.Offset + size
	}
	return nil
}

// ByName returns the tensors by their names.
func (m *Manifest) ByName() map[string]Tensor {
	all := make(map[string]Tensor, len(m.Tensors))
	for _, t := range m.Tensors {
		all[t.Name] = t
	}
	return all
}

// Identity returns a SHA-256 over all but the digests: memory with other contents in the same
// tensors has the same identity.
func (m *Manifest) Identity() [sha256.Size]byte {
	b := binary.LittleEndian.AppendUint64([]byte("cuvmm manifest 1\n"), uint64(m.Bytes))
	h := sha256.New()
	for _, t := range m.Tensors {
		b = binary.LittleEndian.AppendUint32(b, uint32(len(t.Name)))
		b = append(b, t.Name...)
		b = append(b, byte(t.Element), byte(len(t.Shape)))
		for _, d := range t.Shape {
			b = binary.LittleEndian.AppendUint64(b, uint64(d))
		}
		b = binary.LittleEndian.AppendUint64(b, uint64(t.Offset))
		h.Write(b)
		b = b[:0]
	}
	h.Write(b)
	return [sha256.Size]byte(h.Sum(nil))
}

// Match returns an error that names the first difference between m and what the caller
// expects, or nil if their identities are equal.
func (m *Manifest) Match(expected *Manifest) error {
	const op = "handles.Manifest.Match"
	differ := func(format string, args ...any) error {
		return errs.Peer(op, ErrMismatch, fmt.Sprintf(format, args...), "use memory of the same model, laid out in the same way")
	}
	for i := range min(len(m.Tensors), len(expected.Tensors)) {
		got, want := &m.Tensors[i], &expected.Tensors[i]
		name := errs.Words(want.Name)
		switch {
		case got.Name != want.Name:
			return differ("tensor %d is named %s, where %s is expected", i, errs.Words(got.Name), name)
		case got.Element != want.Element:
			return differ("tensor %s has elements of type %v, where %v is expected", name, got.Element, want.Element)
		case !slices.Equal(got.Shape, want.Shape):
			return differ("tensor %s has the shape %v, where %v is expected", name, got.Shape, want.Shape)
		case got.Offset != want.Offset:
			return differ("tensor %s begins at %d, where %d is expected", name, got.Offset, want.Offset)
		}
	}
	if len(m.Tensors) != len(expected.Tensors) {
		return differ("%s, where %d are expected", errs.Count(len(m.Tensors), "tensor"), len(expected.Tensors))
	}
	if m.Bytes != expected.Bytes {
		return differ("%s of memory, where %s are expected", errs.Bytes(m.Bytes), errs.Bytes(expected.Bytes))
	}
	return nil
}

// maxManifest bounds the text of a manifest, in bytes.
const maxManifest = 256 << 20

// MarshalBinary returns the manifest as JSON.
func (m *Manifest) MarshalBinary() ([]byte, error) {
	if err := m.Validate(); err != nil {
		return nil, err
	}
	return json.Marshal(m)
}

// UnmarshalBinary is the reverse of MarshalBinary, and validates what it reads.
func (m *Manifest) UnmarshalBinary(text []byte) error {
	const op = "handles.Manifest.UnmarshalBinary"
	if len(text) > maxManifest {
		return errs.Peer(op, ErrManifest, errs.Bytes(len(text))+" of text", fmt.Sprintf("%s is the most", errs.Bytes(maxManifest)))
	}
	if err := checkCounts(op, text); err != nil { // before the decoder makes them
		return err
	}
	var read Manifest
	d := json.NewDecoder(bytes.NewReader(text))
	d.DisallowUnknownFields()
	err := d.Decode(&read)
	if err == nil && len(bytes.TrimSpace(text[d.InputOffset():])) > 0 {
		err = fmt.Errorf("bytes behind the manifest")
	}
	if err != nil {
		return errs.PeerCause(err, op, ErrManifest, errs.Bytes(len(text))+" of text", "pass what MarshalBinary returned")
	}
	if err := read.Validate(); err != nil {
		return err
	}
	*m = read
	return nil
}

// maxValues bounds what a manifest's text has beside tensors, such as the lengths of dimensions.
const maxValues = 16 * MaxTensors

// checkCounts refuses text that would become many more values than a manifest has, however short it is.
func checkCounts(op string, text []byte) error {
	objects, values, quoted := 0, 0, false
	for i := 0; i < len(text); i++ {
		switch c := text[i]; {
		case c == '"':
			quoted = !quoted
		case quoted && c == '\\':
			i++
		case quoted:
		case c == '{':
			objects++
		case c == ',' || c == '[':
			values++
		}
	}
	switch {
	case objects > MaxTensors+1:
		return errs.Peer(op, ErrManifest, fmt.Sprintf("%d tensors, where %d is the most", objects-1, MaxTensors), "divide the memory")
	case values > maxValues:
		return errs.Peer(op, ErrManifest, fmt.Sprintf("%d values, where %d is the most", values, maxValues), "pass what MarshalBinary returned")
	}
	return nil
}
