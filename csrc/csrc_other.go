//go:build !linux || !cgo || !(amd64 || arm64) || cuvmm_nocgo

package csrc

// Open returns an *OpenError whose reason is NoCgo.
func Open(Options) (*Driver, error) { return nil, &OpenError{Reason: NoCgo} }
