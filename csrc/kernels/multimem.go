package kernels

import _ "embed"

// Multimem is the PTX of the kernels that work through multicast addresses, for
// sm_90 and later. It must not be changed.
//
//go:embed multimem.ptx
var Multimem []byte

// The entries of Multimem beside those of the reductions, with their
// parameters. mc is a multicast address, aligned to 16 bytes; a unit is 4 bytes.
// The last two are launched with one block, and wait for the other devices, but no
// longer than the uint32 at abort, which is best host memory, is 0. Where it is
// not when they begin they do not arrive at all.
const (
	// Broadcast (mc, src address; n uint64) copies n words of 32 bits from src
	// to every replica.
	Broadcast = "cuvmm_multimem_broadcast_b32"
	// Barrier (mc, own address; target uint32; abort address) adds one to the
	// uint32 at mc in every replica, and waits until the device's own, at own,
	// is at least target, compared cyclically.
	Barrier = "cuvmm_multimem_barrier"
	// L2Norm (x address; n uint64; partialMC, partial, arrivedMC, arrived
	// address; target uint32; out, abort address) sets the float64 at out to
	// the L2 norm of the n float32 at x of all devices together, or leaves it
	// where the wait was aborted. partial is a float64 that is zero before,
	// arrived a uint32 counter as Barrier's.
	L2Norm = "cuvmm_multimem_l2norm_f32"
)

// Element is what a reduction adds up or compares.
type Element uint8

// The elements. B32 and B64 are bits; F16 and BF16 come in pairs.
const (
	U32 Element = iota
	S32
	B32
	U64
	S64
	B64
	F16
	BF16
	F32
	F64
)

// String is the element's name in PTX.
func (e Element) String() string {
	return [...]string{"u32", "s32", "b32", "u64", "s64", "b64", "f16", "bf16", "f32", "f64"}[e]
}

// UnitBytes is the size of what the kernels count: a pair of 16-bit elements, or
// one element.
func (e Element) UnitBytes() int {
	switch e {
	case U64, S64, B64, F64:
		return 8
	}
	return 4
}

// Op is how a reduction combines elements.
type Op uint8

// The operations.
const (
	Add Op = iota
	Min
	Max
	And
	Or
	Xor
)

// String is the operation's name in PTX.
func (o Op) String() string { return [...]string{"add", "min", "max", "and", "or", "xor"}[o] }

// Reduction is an operation on an element, one that the hardware has.
type Reduction struct {
	Element Element
	Op      Op
}

// Reductions are all that the hardware has from sm_90 on.
func Reductions() (all []Reduction) {
	for _, e := range []struct {
		element Element
		ops     []Op
	}{
		{U32, []Op{Add, Min, Max}},
		{S32, []Op{Add, Min, Max}},
		{B32, []Op{And, Or, Xor}},
		{U64, []Op{Add, Min, Max}},
		{S64, []Op{Min, Max}},
		{B64, []Op{And, Or, Xor}},
		{F16, []Op{Add, Min, Max}},
		{BF16, []Op{Add, Min, Max}},
		{F32, []Op{Add}},
		{F64, []Op{Add}},
	} {
		for _, o := range e.ops {
			all = append(all, Reduction{e.element, o})
		}
	}
	return all
}

// AllReduce is the entry (mc address; n uint64) that combines the n units of
// all replicas, and writes the result to every replica.
func (r Reduction) AllReduce() string { return "cuvmm_multimem_all_reduce_" + r.name() }

// HasRed reports whether there is a Red: floating-point ones only add.
func (r Reduction) HasRed() bool {
	return r.Op == Add || r.Element != F16 && r.Element != BF16
}

// Red is the entry (mc, src address; n uint64) that combines n units at src
// into every replica.
func (r Reduction) Red() string { return "cuvmm_multimem_red_" + r.name() }

func (r Reduction) name() string { return r.Op.String() + "_" + r.Element.String() }
