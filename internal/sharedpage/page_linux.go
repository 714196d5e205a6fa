package sharedpage

import (
	"errors"
	"fmt"
	"os"

	"golang.org/x/sys/unix"
)

const seals = unix.F_SEAL_SHRINK | unix.F_SEAL_GROW | unix.F_SEAL_SEAL

// New makes a page of zeros, and a descriptor of it, closed on exec, for
// the other process. The caller closes both.
func New() (p *Page, fd int, err error) {
	flags := unix.MFD_CLOEXEC | unix.MFD_ALLOW_SEALING
	fd, err = unix.MemfdCreate("cuvmm words", flags|unix.MFD_NOEXEC_SEAL)
	if errors.Is(err, unix.EINVAL) { // kernels before 6.3
		fd, err = unix.MemfdCreate("cuvmm words", flags)
	}
	if err != nil {
		return nil, -1, os.NewSyscallError("memfd_create", err)
	}
	err = os.NewSyscallError("ftruncate", unix.Ftruncate(fd, int64(os.Getpagesize())))
	if err == nil {
		_, err = unix.FcntlInt(uintptr(fd), unix.F_ADD_SEALS, seals)
		err = os.NewSyscallError("fcntl F_ADD_SEALS", err)
	}
	if err == nil {
		p, err = mapPage(fd)
	}
	if err != nil {
		_ = unix.Close(fd)
		return nil, -1, err
	}
	return p, fd, nil
}

// Open maps the page of a descriptor that another process sent. The descriptor stays the
// caller's and may be closed at once. Anything other than a memory file of one page,
// sealed against resizing, is ErrNoPage: touching it might kill this process.
func Open(fd int) (*Page, error) {
	got, err := unix.FcntlInt(uintptr(fd), unix.F_GET_SEALS, 0)
	if err != nil {
		return nil, fmt.Errorf("%w: it cannot be sealed", ErrNoPage)
	}
	if got&seals != seals {
		return nil, fmt.Errorf("%w: seals %#x, where %#x are needed", ErrNoPage, got, seals)
	}
	var stat unix.Stat_t
	if err := unix.Fstat(fd, &stat); err != nil {
		return nil, os.NewSyscallError("fstat", err)
	}
	if page := int64(os.Getpagesize()); stat.Size != page || stat.Mode&unix.S_IFMT != unix.S_IFREG {
		return nil, fmt.Errorf("%w: %d bytes of mode %#o, where a page has %d", ErrNoPage, stat.Size, stat.Mode, page)
	}
	p, err := mapPage(fd)
	if err != nil {
		return nil, fmt.Errorf("%w: %w", ErrNoPage, err)
	}
	return p, nil
}

func mapPage(fd int) (*Page, error) {
	mem, err := unix.Mmap(fd, 0, os.Getpagesize(), unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED)
	if err != nil {
		return nil, os.NewSyscallError("mmap", err)
	}
	return &Page{mem}, nil
}

// Close unmaps the page, which neither this process nor the GPU may use any more.
// Idempotent.
func (p *Page) Close() error {
	mem := p.mem
	p.mem = nil
	if mem == nil {
		return nil
	}
	return os.NewSyscallError("munmap", unix.Munmap(mem))
}
