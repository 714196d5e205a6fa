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

// Element is the type that a reduction adds up: the floating-point types that the hardware
// adds from sm_90 on, and the integers of counters.
type Element uint8

// The elements. F16 and BF16 come in pairs.
const (
	U32 Element = iota
	F16
	BF16
	F32
	F64
)

// Elements lists all of them.
func Elements() []Element { return []Element{U32, F16, BF16, F32, F64} }

// String is the element's name in PTX.
func (e Element) String() string {
	return [...]string{"u32", "f16", "bf16", "f32", "f64"}[e]
}

// UnitBytes is the size of what the kernels count: a pair of 16-bit elements, or
// one element.
func (e Element) UnitBytes() int {
	if e == F64 {
		return 8
	}
	return 4
}

// AllReduce is the entry (mc address; n uint64) that adds up the n units of
// all replicas, and writes the sums to every replica.
func (e Element) AllReduce() string { return "cuvmm_multimem_all_reduce_add_" + e.String() }

// Red is the entry (mc, src address; n uint64) that adds n units at src
// to every replica.
func (e Element) Red() string { return "cuvmm_multimem_red_add_" + e.String() }
