// Package osmem provides memory of the operating system. The software driver lives on
// its address windows, arenas whose pages come and go, sealed memory files that other
// processes map, and files with names and locks for machines that share a folder.
//
// On Linux (amd64 and arm64) everything works. Elsewhere the package compiles
// and arenas live on the Go heap; what needs the Linux kernel (address
// windows, pages placed at an address, memory files) returns an error that
// matches errors.ErrUnsupported.
package osmem

import (
	"fmt"

	"github.com/cuvmm/cuvmm/internal/host"
)

// Access says what the CPU may do with placed pages.
type Access int

const (
	AccessNone Access = iota
	AccessRead
	AccessReadWrite
)

// HugePage is the size of a huge page in bytes.
const HugePage = 2 << 20

// roundUp rounds n up to whole pages.
func roundUp(n uint64) uint64 {
	page := host.PageSize()
	return (n + page - 1) / page * page
}

// checkRange panics unless [off, off+n) lies within size bytes: a range that
// does not is a defect of the caller, and going on would touch memory of
// another owner.
func checkRange(off, n, size uint64) {
	if off > size || n > size-off {
		panic(fmt.Sprintf("osmem: range [%#x, %#x+%#x) leaves the arena of %#x bytes", off, off, n, size))
	}
}
