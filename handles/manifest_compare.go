package handles

import (
	"cmp"
	"crypto/sha256"
	"encoding/binary"
	"fmt"
	"slices"
	"strings"

	"github.com/cuvmm/cuvmm/internal/errs"
)

// Identity returns a SHA-256 over all but the digests: memory with other contents in the same
// tensors has the same identity.
func (m *Manifest) Identity() [sha256.Size]byte {
	b := binary.LittleEndian.AppendUint64([]byte("cuvmm manifest 2\n"), uint64(m.Bytes))
	h := sha256.New()
	for _, t := range m.sorted() {
		for _, text := range []string{t.Name, t.Kind} {
			b = binary.LittleEndian.AppendUint32(b, uint32(len(text)))
			b = append(b, text...)
		}
		b = append(b, byte(t.Element), byte(len(t.Shape)))
		for i, stride := range t.strides() {
			b = binary.LittleEndian.AppendUint64(b, uint64(t.Shape[i]))
			b = binary.LittleEndian.AppendUint64(b, uint64(stride))
		}
		b = binary.LittleEndian.AppendUint64(b, uint64(t.Offset))
		b = binary.LittleEndian.AppendUint64(b, uint64(t.Alias))
		h.Write(b)
		b = b[:0]
	}
	h.Write(b)
	return [sha256.Size]byte(h.Sum(nil))
}

// sorted returns the tensors by offset and name: those at one offset have no order of their own.
func (m *Manifest) sorted() []Tensor {
	order := func(a, b Tensor) int {
		return cmp.Or(cmp.Compare(a.Offset, b.Offset), strings.Compare(a.Name, b.Name))
	}
	if slices.IsSortedFunc(m.Tensors, order) {
		return m.Tensors
	}
	return slices.SortedFunc(slices.Values(m.Tensors), order)
}

// strides returns the one form of the strides: explicit, and 0 where nothing depends on them.
func (t *Tensor) strides() []int {
	all, step := make([]int, len(t.Shape)), 1
	if t.Size() == 0 {
		return all
	}
	for i, d := range slices.Backward(t.Shape) {
		if len(t.Strides) > 0 {
			step = t.Strides[i]
		}
		if d > 1 {
			all[i] = step
		}
		step *= d // used without Strides alone
	}
	return all
}

// mostDifferences bounds the differences that an error names.
const mostDifferences = 8

// Match returns an error that names the fields in which m differs from what the caller expects,
// or nil if their identities are equal.
func (m *Manifest) Match(expected *Manifest) error {
	if m.Identity() == expected.Identity() {
		return nil
	}
	var named []string
	more := 0
	differ := func(format string, args ...any) {
		if len(named) == mostDifferences {
			more++
			return
		}
		named = append(named, fmt.Sprintf(format, args...))
	}
	if m.Bytes != expected.Bytes {
		differ("bytes %d instead of %d", m.Bytes, expected.Bytes)
	}
	rest := m.ByName()
	for _, want := range expected.sorted() {
		got, there := rest[want.Name]
		delete(rest, want.Name)
		if name := errs.Words(want.Name); !there {
			differ("no tensor %s", name)
		} else if d := got.differences(&want); len(d) > 0 {
			differ("tensor %s has %s", name, strings.Join(d, ", "))
		}
	}
	for _, got := range m.sorted() {
		if _, unexpected := rest[got.Name]; unexpected {
			differ("a tensor %s that is not expected", errs.Words(got.Name))
		}
	}
	text := strings.Join(named, "; ")
	if more > 0 {
		text += fmt.Sprintf("; and %d more", more)
	}
	return errs.Peer("handles.Manifest.Match", ErrMismatch, text, "use memory of the same model, laid out in the same way")
}

// differences names the fields in which two tensors of one name differ.
func (t *Tensor) differences(want *Tensor) (all []string) {
	differ := func(field string, got, want any) {
		all = append(all, fmt.Sprintf("%s %v instead of %v", field, got, want))
	}
	if t.Element != want.Element {
		differ("element", t.Element, want.Element)
	}
	if !slices.Equal(t.Shape, want.Shape) {
		differ("shape", t.Shape, want.Shape)
	} else if got, want := t.strides(), want.strides(); !slices.Equal(got, want) {
		differ("strides", got, want)
	}
	if t.Offset != want.Offset {
		differ("offset", t.Offset, want.Offset)
	}
	if t.Kind != want.Kind {
		differ("kind", errs.Words(t.Kind), errs.Words(want.Kind))
	}
	if t.Alias != want.Alias {
		differ("alias group", t.Alias, want.Alias)
	}
	return all
}
