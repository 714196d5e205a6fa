//go:build linux && (amd64 || arm64)

package osmem

import (
	"fmt"
	"unsafe"

	"golang.org/x/sys/unix"
)

// Linux reports whether this is one of the systems on which everything works.
const Linux = true

// Arena is a large range of memory that is committed page by page, when it is
// first touched, and reads zero where it was not. Its methods are safe for
// concurrent use as long as the callers keep to disjoint ranges.
type Arena struct {
	mem []byte
	fd  int // of a placeable arena; -1 otherwise
}

// NewArena makes an arena of size bytes. A placeable one costs a file
// descriptor, and its pages can also be placed in a [Window].
func NewArena(size uint64, placeable bool) (*Arena, error) {
	fd, flags := -1, unix.MAP_PRIVATE|unix.MAP_ANONYMOUS|unix.MAP_NORESERVE
	if placeable {
		var err error
		if fd, err = memfd("cuvmm-host", size, false); err != nil {
			return nil, err
		}
		flags = unix.MAP_SHARED | unix.MAP_NORESERVE
	}
	mem, err := mmap(fd, 0, size, unix.PROT_READ|unix.PROT_WRITE, flags)
	if err != nil {
		if fd >= 0 {
			unix.Close(fd)
		}
		return nil, fmt.Errorf("reserve an arena of %d bytes: %w", size, err)
	}
	return &Arena{mem: mem, fd: fd}, nil
}

// Run is the longest contiguous piece of memory that starts at off, at most n
// bytes of it.
func (a *Arena) Run(off, n uint64) []byte {
	checkRange(off, n, uint64(len(a.mem)))
	return a.mem[off : off+n : off+n]
}

// Discard returns the pages of the range to the system; it reads zero afterwards. The
// range must be whole pages.
func (a *Arena) Discard(off, n uint64) error {
	checkRange(off, n, uint64(len(a.mem)))
	if n == 0 {
		return nil
	}
	var err error
	if a.fd >= 0 {
		err = unix.Fallocate(a.fd, unix.FALLOC_FL_PUNCH_HOLE|unix.FALLOC_FL_KEEP_SIZE, int64(off), int64(n))
	} else {
		err = unix.Madvise(a.mem[off:off+n], unix.MADV_DONTNEED)
	}
	if err != nil {
		return fmt.Errorf("discard %d bytes at %#x: %w", n, off, err)
	}
	return nil
}

// Place makes the pages [off, off+n) of a placeable arena appear at addr too,
// which must lie inside a window.
func (a *Arena) Place(addr, off, n uint64, access Access) error {
	checkRange(off, n, uint64(len(a.mem)))
	return place(a.fd, addr, off, n, access)
}

// Close unmaps the arena. Pages placed from it stay until they are cleared.
func (a *Arena) Close() error {
	err := munmap(a.mem)
	a.mem = nil
	if a.fd >= 0 {
		unix.Close(a.fd)
		a.fd = -1
	}
	return err
}

// Alloc returns n bytes of zeroed memory, in whole pages, that the Go
// collector does not know.
func Alloc(n uint64) ([]byte, error) {
	mem, err := mmap(-1, 0, roundUp(n), unix.PROT_READ|unix.PROT_WRITE, unix.MAP_PRIVATE|unix.MAP_ANONYMOUS|unix.MAP_NORESERVE)
	if err != nil {
		return nil, fmt.Errorf("map %d bytes: %w", n, err)
	}
	return mem[:n], nil
}

// Free frees what Alloc returned. After an error the memory is still mapped.
func Free(mem []byte) error { return munmap(mem[:cap(mem)]) }

// Forget returns whole pages of what Alloc or Commit returned to the system; they
// read zero afterwards.
func Forget(mem []byte) error {
	if err := unix.Madvise(mem, unix.MADV_DONTNEED); err != nil {
		return fmt.Errorf("discard %d bytes: %w", len(mem), err)
	}
	return nil
}

func mmap(fd int, off int64, n uint64, prot, flags int) ([]byte, error) {
	if err := roomForMappings(); err != nil {
		return nil, err
	}
	p, err := unix.MmapPtr(fd, off, nil, uintptr(n), prot, flags)
	if err != nil {
		return nil, err
	}
	return unsafe.Slice((*byte)(p), n), nil
}

func munmap(mem []byte) error {
	if len(mem) == 0 {
		return nil
	}
	cutMappings()
	return unix.MunmapPtr(unsafe.Pointer(&mem[0]), uintptr(len(mem)))
}

func address(mem []byte) uintptr { return uintptr(unsafe.Pointer(&mem[0])) }
