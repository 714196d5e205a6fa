//go:build linux && (amd64 || arm64)

package osmem

import (
	"errors"
	"fmt"
	"syscall"

	"golang.org/x/sys/unix"
)

// Shared is memory in a file that has no name and is sealed against resizing.
// It crosses process borders by descriptor.
//
// Whoever holds the memory from outside, by an exported descriptor, a
// duplicate of one in any process, or a mapping, holds a shared flock: the
// lock belongs to the open file description, which lives as long as any of
// these. So [Shared.Held] is exact, also after a process was killed.
type Shared struct {
	mem []byte
	fd  int // the maker's own description, without a lock; -1 in an importer
	id  FileID
}

// FileID names a memory file in this boot of the machine.
type FileID struct{ Device, Inode uint64 }

const seals = unix.F_SEAL_SHRINK | unix.F_SEAL_GROW | unix.F_SEAL_SEAL

// NewShared makes size zeroed bytes, in whole pages.
func NewShared(name string, size uint64) (*Shared, error) {
	fd, err := memfd(name, size, true)
	if err != nil {
		return nil, err
	}
	s, err := mapShared(fd, size)
	if err != nil {
		unix.Close(fd)
		return nil, err
	}
	s.fd = fd
	return s, nil
}

// ErrNotShared is the answer to a descriptor that no Shared exported.
var ErrNotShared = errors.New("the descriptor is not exported memory")

// OpenShared maps the memory behind an exported descriptor, which it does not
// consume. The result holds the memory until it is closed, and costs no
// descriptor.
func OpenShared(fd int) (*Shared, error) {
	var stat unix.Stat_t
	if err := unix.Fstat(fd, &stat); err != nil {
		return nil, fmt.Errorf("%w: fstat of descriptor %d: %w", ErrNotShared, fd, err)
	}
	if got, err := unix.FcntlInt(uintptr(fd), unix.F_GET_SEALS, 0); err != nil || got&seals != seals {
		return nil, fmt.Errorf("%w: descriptor %d is not a sealed memory file", ErrNotShared, fd)
	}
	own, err := reopen(fd)
	if err != nil {
		return nil, err
	}
	// The mapping keeps the description, and with it the lock.
	defer unix.Close(own)
	return mapShared(own, uint64(stat.Size))
}

// IdentifyShared tells which memory file a descriptor is of.
func IdentifyShared(fd int) (FileID, error) {
	var stat unix.Stat_t
	if err := unix.Fstat(fd, &stat); err != nil {
		return FileID{}, fmt.Errorf("fstat of descriptor %d: %w", fd, err)
	}
	return FileID{uint64(stat.Dev), stat.Ino}, nil
}

// Tail reads the last page of the file behind a descriptor, and tells the file's
// size in bytes. It reads regular files only.
func Tail(fd int) (page []byte, size uint64, err error) {
	var stat unix.Stat_t
	if err := unix.Fstat(fd, &stat); err != nil {
		return nil, 0, fmt.Errorf("%w: fstat of descriptor %d: %w", ErrNotShared, fd, err)
	}
	if stat.Mode&unix.S_IFMT != unix.S_IFREG {
		return nil, 0, fmt.Errorf("%w: descriptor %d is not of a file", ErrNotShared, fd)
	}
	size = uint64(stat.Size)
	page = make([]byte, min(size, PageSize()))
	n, err := unix.Pread(fd, page, int64(size)-int64(len(page)))
	if err != nil {
		return nil, 0, fmt.Errorf("%w: read of descriptor %d: %w", ErrNotShared, fd, err)
	}
	return page[:n], size, nil
}

// Bytes is the memory.
func (s *Shared) Bytes() []byte { return s.mem }

// ID names the memory file.
func (s *Shared) ID() FileID { return s.id }

// Export makes a descriptor of the memory, close-on-exec, that belongs to the
// caller and holds the memory while it, or a duplicate in any process, is
// open. Only the maker can export.
func (s *Shared) Export() (int, error) { return reopen(s.fd) }

// Held reports whether anybody but the maker holds the memory. Only the maker
// can ask.
func (s *Shared) Held() bool {
	// Between fork and exec a child has every descriptor.
	syscall.ForkLock.RLock()
	defer syscall.ForkLock.RUnlock()
	if unix.Flock(s.fd, unix.LOCK_EX|unix.LOCK_NB) != nil {
		return true
	}
	_ = unix.Flock(s.fd, unix.LOCK_UN)
	return false
}

// Place makes the pages [off, off+n) appear at addr too, which must lie inside
// a window.
func (s *Shared) Place(addr, off, n uint64, access Access) error {
	checkRange(off, n, uint64(len(s.mem)))
	if s.fd >= 0 {
		return place(s.fd, addr, off, n, access)
	}
	return duplicate(s.mem[off:off+n], addr, access)
}

// Close unmaps the memory and gives up the maker's descriptor. It lives on
// while others hold it.
func (s *Shared) Close() error {
	err := munmap(s.mem)
	s.mem = nil
	if s.fd >= 0 {
		unix.Close(s.fd)
		s.fd = -1
	}
	return err
}

// duplicate makes a second mapping of shared pages without a descriptor: a
// remapping of zero bytes copies instead of moving.
func duplicate(mem []byte, addr uint64, access Access) error {
	_, _, errno := unix.Syscall6(unix.SYS_MREMAP, address(mem), 0, uintptr(len(mem)),
		unix.MREMAP_MAYMOVE|unix.MREMAP_FIXED, uintptr(addr), 0)
	if errno != 0 {
		return fmt.Errorf("place %#x bytes in the address window at %#x: %w", len(mem), addr, errno)
	}
	return Protect(addr, uint64(len(mem)), access)
}

func mapShared(fd int, size uint64) (*Shared, error) {
	id, err := IdentifyShared(fd)
	if err != nil {
		return nil, err
	}
	mem, err := mmap(fd, 0, size, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED|unix.MAP_NORESERVE)
	if err != nil {
		return nil, fmt.Errorf("map %d shared bytes: %w", size, err)
	}
	return &Shared{mem: mem, fd: -1, id: id}, nil
}

// reopen makes a description of its own for the file behind fd, and locks it.
func reopen(fd int) (int, error) {
	own, err := unix.Open(fmt.Sprintf("/proc/self/fd/%d", fd), unix.O_RDWR|unix.O_CLOEXEC, 0)
	if err != nil {
		return -1, fmt.Errorf("open a new description of descriptor %d (is /proc mounted?): %w", fd, err)
	}
	// Held probes with the exclusive lock for an instant, so wait.
	for {
		if err = unix.Flock(own, unix.LOCK_SH); err != unix.EINTR {
			break
		}
	}
	if err != nil {
		unix.Close(own)
		return -1, fmt.Errorf("lock the new description of descriptor %d: %w", fd, err)
	}
	return own, nil
}

func memfd(name string, size uint64, sealed bool) (int, error) {
	flags := unix.MFD_CLOEXEC | unix.MFD_ALLOW_SEALING
	fd, err := unix.MemfdCreate(name, flags|unix.MFD_NOEXEC_SEAL)
	if err == unix.EINVAL { // kernels before 6.3
		fd, err = unix.MemfdCreate(name, flags)
	}
	if err != nil {
		return -1, fmt.Errorf("make a memory file of %d bytes: %w", size, err)
	}
	if err = unix.Ftruncate(fd, int64(size)); err == nil && sealed {
		_, err = unix.FcntlInt(uintptr(fd), unix.F_ADD_SEALS, seals)
	}
	if err != nil {
		unix.Close(fd)
		return -1, fmt.Errorf("size and seal a memory file of %d bytes: %w", size, err)
	}
	return fd, nil
}
