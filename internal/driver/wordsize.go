//go:build 386 || arm || mips || mipsle

package driver

// Device addresses and sizes have 64 bits, and so has every platform that the
// vendor's driver exists for.
var _ = cuvmm_needs_a_64_bit_platform
