//go:build linux && cgo && (amd64 || arm64) && !cuvmm_nocgo

package csrc

// OpenFirst is what Open does with its list of places.
var OpenFirst = open
