//go:build linux && cgo && (amd64 || arm64) && !cuvmm_nocgo

package csrc

import "github.com/cuvmm/cuvmm/internal/nvml"

// OpenFirst is what Open does with its list of places.
var OpenFirst = openFirst

// NVMLFrom opens the first of the places named.
func NVMLFrom(places ...string) nvml.Library { return &nvmlLibrary{candidates: places} }

// Cached is how the loader's cache is read, and NoteOwners how a library's notes
// are.
var Cached = cached

func NoteOwners(notes []byte, wide bool) map[string]bool {
	owners := map[string]bool{}
	addOwners(owners, notes, wide)
	return owners
}
