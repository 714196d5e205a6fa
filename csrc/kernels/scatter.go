package kernels

import _ "embed"

// Distribute is the PTX of Scatter, for sm_70 and later. It must not be changed.
//
//go:embed scatter.ptx
var Distribute []byte

// Scatter (from, table address; n uint64) is the entry of Distribute. Of the n entries at table, which
// are ScatterEntry, each has so many bytes at from go to an address.
const Scatter = "cuvmm_scatter"

// ScatterEntry has Bytes bytes at an offset go to an address. Tables of them begin at multiples of 16.
type ScatterEntry struct {
	To            uint64
	Offset, Bytes uint32
}
