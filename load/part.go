package load

import (
	"fmt"
	"slices"

	"github.com/cuvmm/cuvmm/cuda"
	"github.com/cuvmm/cuvmm/handles"
	"github.com/cuvmm/cuvmm/internal/errs"
)

// Part is a tensor of a model or a block of one, and where it is to be loaded. It is a value:
// its methods return other parts.
type Part struct {
	of       *tensor
	from, to []int // of each dimension
	at       cuda.Ptr
	room     int
}

// Part returns a tensor as a whole, which is nowhere yet: see [Part.To].
func (m *Model) Part(name string) (Part, error) {
	i, there := m.byName[name]
	if !there {
		return Part{}, m.noTensor("load.Model.Part", name)
	}
	t := &m.tensors[i]
	return Part{of: t, from: make([]int, len(t.Shape)), to: slices.Clone(t.Shape)}, nil
}

func (m *Model) noTensor(op, name string) error {
	return &Error{Op: op, File: m.name(), Tensor: name, Hint: "take a name from Model.Tensors", kind: ErrNoTensor}
}

// name is that of the first file.
func (m *Model) name() string {
	if len(m.tensors) == 0 {
		return "a model without tensors"
	}
	return m.tensors[0].file.path
}

// Slice returns the part's elements from index from up to, not including, index to of a
// dimension.
func (p Part) Slice(dim, from, to int) (Part, error) {
	return p.slice("load.Part.Slice", dim, from, to)
}

func (p Part) slice(op string, dim, from, to int) (Part, error) {
	if err := p.has(op, dim); err != nil {
		return Part{}, err
	}
	if err := errs.CheckSlice(op, from, to, p.to[dim]-p.from[dim], "stay inside the dimension"); err != nil {
		return Part{}, err
	}
	p.from, p.to = slices.Clone(p.from), slices.Clone(p.to)
	p.from[dim], p.to[dim] = p.from[dim]+from, p.from[dim]+to
	return p, nil
}

// Shard returns the rank's part of a dimension that is divided evenly among so many ranks, as
// tensor parallelism does.
func (p Part) Shard(dim, rank, ranks int) (Part, error) {
	const op = "load.Part.Shard"
	if err := p.has(op, dim); err != nil {
		return Part{}, err
	}
	n := p.to[dim] - p.from[dim]
	if ranks <= 0 || rank < 0 || rank >= ranks || n%ranks != 0 {
		return Part{}, errs.Invalid(op, fmt.Sprintf("rank %d of %d, for dimension %d of tensor %s, which has length %d", rank, ranks, dim, errs.Words(p.of.Name), n),
			"pass a rank below the number of ranks, which divides the length; Slice takes any part")
	}
	return p.slice(op, dim, rank*(n/ranks), (rank+1)*(n/ranks))
}

func (p Part) has(op string, dim int) error {
	if p.of == nil {
		return errZeroPart(op)
	}
	if dim < 0 || dim >= len(p.from) {
		return errs.Invalid(op, fmt.Sprintf("dimension %d of tensor %s, which has %d", dim, errs.Words(p.of.Name), len(p.from)), "name one of its dimensions, from 0 up")
	}
	return nil
}

func errZeroPart(op string) error {
	return errs.Invalid(op, "a zero Part", "take it from Model.Part")
}

// To returns the part with the memory that it is to be loaded to: so many bytes of device memory,
// of a buffer, a block of a pool, published memory or any other.
func (p Part) To(at cuda.Ptr, bytes int) Part {
	p.at, p.room = at, bytes
	return p
}

// Name returns the tensor's name. It is empty for a zero Part.
func (p Part) Name() string {
	if p.of == nil {
		return ""
	}
	return p.of.Name
}

// Element returns the type of the elements.
func (p Part) Element() handles.ElementType {
	if p.of == nil {
		return handles.NoElement
	}
	return p.of.Element
}

// Shape returns the lengths of the part's dimensions.
func (p Part) Shape() []int {
	shape := make([]int, len(p.from))
	for i := range shape {
		shape[i] = p.to[i] - p.from[i]
	}
	return shape
}

// Size returns the size in bytes.
func (p Part) Size() int {
	t := handles.Tensor{Element: p.Element(), Shape: p.Shape()}
	return t.Size()
}

// block is where the bytes of a part are in its tensor's file.
type block struct {
	offset int64 // of the first
	bytes  int64
	rows   *rows // nil if they follow each other
}

// rows are runs of one length, at the strides of the outer dimensions.
type rows struct {
	run int64 // bytes
	// counts and strides of the runs, by dimension, the outermost first.
	counts, strides []int64
}

func (p Part) block() block {
	b := block{offset: int64(p.of.Offset), bytes: int64(p.Size())}
	stride, dim := int64(p.of.Element.Size()), len(p.from)-1
	for ; dim >= 0 && p.from[dim] == 0 && p.to[dim] == p.of.Shape[dim]; dim-- {
		stride *= int64(p.of.Shape[dim])
	}
	if dim < 0 {
		return b
	}
	// The innermost that is cut: its elements follow each other.
	r := &rows{run: stride * int64(p.to[dim]-p.from[dim])}
	b.offset += stride * int64(p.from[dim])
	for dim > 0 {
		stride *= int64(p.of.Shape[dim])
		dim--
		r.counts = append(r.counts, int64(p.to[dim]-p.from[dim]))
		r.strides = append(r.strides, stride)
		b.offset += stride * int64(p.from[dim])
	}
	slices.Reverse(r.counts)
	slices.Reverse(r.strides)
	b.rows = r
	return b
}

// each calls f for the runs of n bytes of the block from byte at on, with their places in the
// file.
func (b *block) each(at, n int64, f func(offset, n int64)) {
	r := b.rows
	if r == nil {
		f(b.offset+at, n)
		return
	}
	for n > 0 {
		i, in := at/r.run, at%r.run
		offset, part := b.offset+in, min(r.run-in, n)
		for d := len(r.counts) - 1; d >= 0; d-- {
			offset += i % r.counts[d] * r.strides[d]
			i /= r.counts[d]
		}
		f(offset, part)
		at, n = at+part, n-part
	}
}
