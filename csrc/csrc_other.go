//go:build !linux || !cgo || !(amd64 || arm64) || cuvmm_nocgo

package csrc

import "github.com/cuvmm/cuvmm/internal/driver"

// Driver is the real driver, which this build does not have: none is ever made.
type Driver struct{ driver.Driver }

// Open returns an *OpenError whose reason is NoCgo.
func Open(Options) (*Driver, error) { return nil, &OpenError{Reason: NoCgo} }
