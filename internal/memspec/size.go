package memspec

import (
	"fmt"

	"github.com/cuvmm/cuvmm/internal/errs"
)

// MaxBytes exceeds the address space of any device; rounding larger sizes up would
// overflow.
const MaxBytes = 1 << 60

// CheckSize refuses sizes that are not a positive multiple of the granularity.
func CheckSize(op string, size int, gran uint64) error {
	g := int(gran)
	switch {
	case size <= 0:
		return errs.Invalid(op, "a size of "+errs.Count(size, "byte"), fmt.Sprintf("ask for a multiple of %s", errs.Bytes(g)))
	case size > MaxBytes:
		return errs.Invalid(op, fmt.Sprintf("a size of %s", errs.Bytes(size)), "no device has that much: ask for less")
	case size%g != 0:
		return errs.Invalid(op, fmt.Sprintf("a size of %s", errs.Bytes(size)),
			fmt.Sprintf("ask for a multiple of the granularity, %s: %s", errs.Bytes(g), errs.Bytes((size/g+1)*g)))
	}
	return nil
}
