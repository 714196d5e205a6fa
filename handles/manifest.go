package handles

import (
	"bytes"
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
	// MaxTensorKind is the maximum length of a tensor's kind, in bytes.
	MaxTensorKind = 64
)

// Tensor describes a tensor in memory.
type Tensor struct {
	Name    string      `json:"name"`
	Element ElementType `json:"element"`
	// Shape has the lengths of the dimensions, the outermost first. A scalar has none.
	Shape []int `json:"shape"`
	// Strides has the distance between neighbours in each dimension, in elements. Nil means
	// row-major order without gaps.
	Strides []int `json:"strides,omitempty"`
	// Offset is where the tensor begins, in bytes from the start of the memory.
	Offset int `json:"offset"`
	// Kind is what the tensor is in its model, such as "parameter" or "buffer", or empty.
	Kind string `json:"kind,omitempty"`
	// Alias numbers the group of tensors that this one shares memory with, such as tied
	// weights. 0 means none: its bytes are its own.
	Alias int `json:"alias,omitempty"`
	// Digest is a digest of the bytes, such as "crc32c:0a1b2c3d", or empty.
	Digest string `json:"digest,omitempty"`
}

// Size returns the bytes from the first element to the end of the last. It saturates, and is 0
// for shapes and strides that Manifest.Validate refuses.
func (t *Tensor) Size() int {
	if len(t.Strides) > 0 && len(t.Strides) != len(t.Shape) {
		return 0
	}
	n := 1 // elements
	for i, d := range t.Shape {
		switch {
		case d <= 0:
			return 0
		case len(t.Strides) == 0:
			n = saturatingMul(n, d)
		case t.Strides[i] < 0:
			return 0
		default:
			n += min(saturatingMul(d-1, t.Strides[i]), math.MaxInt-n)
		}
	}
	return saturatingMul(n, t.Element.Size())
}

func saturatingMul(a, b int) int {
	if b > 0 && a > math.MaxInt/b {
		return math.MaxInt
	}
	return a * b
}

// Manifest says which tensors memory holds, and where. It is a plain value, which a publisher
// passes to its followers beside the memory.
type Manifest struct {
	// Bytes is the size of the memory.
	Bytes int `json:"bytes"`
	// Tensors are in the order of their offsets. Only those of one alias group overlap.
	Tensors []Tensor `json:"tensors"`
}

// Validate checks a manifest that came from elsewhere. After it every tensor lies within
// Bytes, no two overlap unless they are of one alias group, and each name occurs once. Whoever
// maps the memory compares Bytes with its size.
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
	names := make(map[string]struct{}, len(m.Tensors))
	start, end, group := 0, 0, 0 // of the tensor before; the end of all before; the group of those that reach there
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
		negative := func(d int) bool { return d < 0 }
		if len(t.Shape) > MaxTensorDims || slices.ContainsFunc(t.Shape, negative) {
			return bad(t, fmt.Sprintf("use at most %d dimensions, of lengths from 0", MaxTensorDims), "a shape of %v", t.Shape)
		}
		if len(t.Strides) > 0 && len(t.Strides) != len(t.Shape) || slices.ContainsFunc(t.Strides, negative) {
			return bad(t, "use a stride from 0 for each dimension, or none", "strides of %v, of the shape %v", t.Strides, t.Shape)
		}
		if len(t.Kind) > MaxTensorKind || !utf8.ValidString(t.Kind) || t.Alias < 0 {
			return bad(t, fmt.Sprintf("use a kind of at most %d bytes of UTF-8, and a number from 0", MaxTensorKind), "a kind of %s and alias group %d", errs.Bytes(len(t.Kind)), t.Alias)
		}
		size := t.Size()
		if t.Offset < start || t.Offset > m.Bytes || size > m.Bytes-t.Offset {
			return bad(t, "sort the tensors by offset, within the memory", "%s from offset %d on, behind a tensor at %d, in %s", errs.Bytes(size), t.Offset, start, errs.Bytes(m.Bytes))
		}
		if t.Offset < end && (t.Alias == 0 || t.Alias != group) {
			return bad(t, "give tensors that share memory one alias group, and others memory of their own",
				"it begins at %d, behind a tensor that ends at %d and is not of its alias group", t.Offset, end)
		}
		start, end, group = t.Offset, max(end, t.Offset+size), t.Alias
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
