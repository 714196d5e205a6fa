package vmm

import (
	"fmt"

	"github.com/cuvmm/cuvmm/cuda"
	"github.com/cuvmm/cuvmm/internal/driver"
	"github.com/cuvmm/cuvmm/internal/memspec"
)

// AccessMode is what a place may do with mapped memory.
type AccessMode uint8

// The values are the driver's.
const (
	NoAccess  = AccessMode(driver.AccessNone)
	ReadOnly  = AccessMode(driver.AccessRead)
	ReadWrite = AccessMode(driver.AccessReadWrite)
)

// String names the mode.
func (m AccessMode) String() string { return memspec.Mode(m).String() }

// Access is the access of one place.
type Access struct {
	Location cuda.Location
	Mode     AccessMode
}

// String writes "device 0: read-only".
func (a Access) String() string { return fmt.Sprintf("%v: %v", a.Location, a.Mode) }

// accessList is the access that places have to memory, in the driver's form.
type accessList = memspec.Access

// checkAccess converts the access that a caller requests into the driver's form, for
// memory at a location, and refuses what cannot work.
func checkAccess(op string, s *cuda.System, memory driver.Location, access []Access) (accessList, error) {
	return memspec.CheckAccess(op, s, memory, access)
}
