//go:build linux && (amd64 || arm64)

package osmem

import (
	"errors"
	"fmt"
	"unsafe"

	"golang.org/x/sys/unix"
)

// AllocHuge is Alloc for whole huge pages: memory that is aligned to HugePage, and that the
// kernel backs with huge pages if it has some. Any part of it that is whole huge pages can be
// freed by itself.
func AllocHuge(n uint64) ([]byte, error) {
	mem, err := mmap(-1, 0, n+HugePage, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_PRIVATE|unix.MAP_ANONYMOUS|unix.MAP_NORESERVE)
	if err != nil {
		return nil, fmt.Errorf("map %d bytes: %w", n, err)
	}
	head := (HugePage - uint64(address(mem))%HugePage) % HugePage
	for _, extra := range [][]byte{mem[:head], mem[head+n:]} {
		if err := munmap(extra); err != nil {
			return nil, errors.Join(fmt.Errorf("align %d bytes: %w", n, err), munmap(mem))
		}
	}
	mem = mem[head : head+n : head+n]
	// Without huge pages the memory works as well, only slower.
	_ = unix.Madvise(mem, unix.MADV_HUGEPAGE)
	return mem, nil
}

// Populate makes the pages of the memory exist, and returns an error if the system has none.
// mem is memory of AllocHuge that is not in use yet.
func Populate(mem []byte) error {
	err := unix.Madvise(mem, unix.MADV_POPULATE_WRITE)
	if errors.Is(err, unix.EINVAL) { // before Linux 5.14
		for i := 0; i < len(mem); i += 4096 {
			*(*byte)(unsafe.Pointer(&mem[i])) = 0
		}
		return nil
	}
	if err != nil {
		return fmt.Errorf("populate %d bytes: %w", len(mem), err)
	}
	return nil
}
