// Package kernels holds the library's own GPU kernels. They are PTX text, which
// the driver compiles for the GPU that it finds, so neither building nor
// running them needs a CUDA toolkit. The text is the source: Basic was written by
// hand, Multimem by a test of this package.
//
// On the software driver a kernel is the Go function that is registered under
// its entry's name (sim.RegisterKernel); for these kernels it has its own.
package kernels

import _ "embed"

// Basic is the PTX of the kernels below, for sm_70 and later. It must not be
// changed.
//
//go:embed basic.ptx
var Basic []byte

// The entries of Basic, with their parameters. Addresses are aligned to the
// elements, and n counts elements. Any one-dimensional launch does all of the
// work.
const (
	// VectorAdd (a, b, c address; n uint64) adds float32: c[i] = a[i] + b[i].
	VectorAdd = "cuvmm_vector_add_f32"
	// Fill (p address; n uint64; first, step uint32) sets
	// p[i] = first + i*step, modulo 2^32.
	Fill = "cuvmm_fill_u32"
	// Sum (p address; n uint64; sum address) adds n uint32 to the uint64 at
	// sum, modulo 2^64.
	Sum = "cuvmm_sum_u32"
	// AliasAdd (write, read, out address; n uint64; delta uint32), with write
	// and read two addresses of one memory, sets write[i] = read[i] + delta
	// and then out[i] = read[i], with fence.proxy.alias between the two.
	AliasAdd = "cuvmm_alias_add_u32"
)
