//go:build linux && (amd64 || arm64)

package osmem

import (
	"errors"
	"fmt"
	"syscall"

	"github.com/cuvmm/cuvmm/internal/host"
	"golang.org/x/sys/unix"
)

// Shared is memory in a file that has no name and is sealed against resizing.
// It crosses process borders by descriptor.
//
// Every holder of the memory, by an exported descriptor, a duplicate of one in
// any process, or a mapping, has a shared lock on the file: the lock belongs to
// the open file description, which lives as long as any of these. So
// [Shared.Held] is exact, even after a process was killed. The maker has one
// too, so no peer can lock the file exclusively as long as the maker lives.
type Shared struct {
	mem []byte
	fd  int // the maker's own description; -1 in an importer
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
	err = lockShared(fd)
	var s *Shared
	if err == nil {
		s, err = mapShared(fd, size)
	}
	if err != nil {
		unix.Close(fd)
		return nil, err
	}
	s.fd = fd
	return s, nil
}

// ErrNotShared is returned for a descriptor that no Shared exported.
var ErrNotShared = errors.New("the descriptor is not exported memory")

// OpenShared maps the memory behind an exported descriptor, which it does not
// consume. The result holds the memory until it is closed, and costs no
// descriptor.
func OpenShared(fd int) (*Shared, error) {
	size, err := checkShared(fd)
	if err != nil {
		return nil, err
	}
	own, err := reopen(fd)
	if err != nil {
		return nil, err
	}
	// The mapping keeps the description, and with it the lock.
	defer unix.Close(own)
	return mapShared(own, size)
}

// checkShared accepts what NewShared makes, and returns its size: a sealed file
// in memory. Anything else could block a process that reads it, or kill one that touches
// its mapping: a file of another file system, one that shrinks, or one of huge
// pages, of which the system may have none left.
func checkShared(fd int) (size uint64, err error) {
	refuse := func(why string, err error) (uint64, error) {
		return 0, errors.Join(fmt.Errorf("%w: descriptor %d %s", ErrNotShared, fd, why), err)
	}
	// First the seals: only files in memory have any, so nothing here waits for
	// another file system.
	got, err := unix.FcntlInt(uintptr(fd), unix.F_GET_SEALS, 0)
	if err != nil || got&seals != seals {
		return refuse("is not a memory file that is sealed against resizing", err)
	}
	if got&(unix.F_SEAL_WRITE|unix.F_SEAL_FUTURE_WRITE) != 0 {
		return refuse("is sealed against writing", nil)
	}
	var fs unix.Statfs_t
	if err := unix.Fstatfs(fd, &fs); err != nil || fs.Type != unix.TMPFS_MAGIC {
		return refuse("is not a memory file of ordinary pages", err)
	}
	file, err := statOf(fd)
	if err != nil {
		return refuse("cannot be examined", err)
	}
	return file.Size, nil
}

// IdentifyShared returns the identity of the file behind a descriptor.
func IdentifyShared(fd int) (FileID, error) {
	file, err := statOf(fd)
	return idOf(&file), err
}

// statOf reads what the kernel knows of any descriptor, without waiting for a remote
// file system or one in another process.
func statOf(fd int) (file unix.Statx_t, err error) {
	if err = unix.Statx(fd, "", unix.AT_EMPTY_PATH|unix.AT_STATX_DONT_SYNC, unix.STATX_BASIC_STATS, &file); err != nil {
		err = fmt.Errorf("statx of descriptor %d: %w", fd, err)
	}
	return file, err
}

func idOf(file *unix.Statx_t) FileID {
	return FileID{unix.Mkdev(file.Dev_major, file.Dev_minor), file.Ino}
}

// Tail reads the last page of the memory file behind an exported descriptor, and
// returns the file's size in bytes too.
func Tail(fd int) (page []byte, size uint64, err error) {
	if size, err = checkShared(fd); err != nil {
		return nil, 0, err
	}
	page, err = tail(fd, size)
	return page, size, err
}

func tail(fd int, size uint64) ([]byte, error) {
	page := make([]byte, min(size, host.PageSize()))
	n, err := unix.Pread(fd, page, int64(size)-int64(len(page)))
	if err != nil {
		return nil, fmt.Errorf("%w: read of descriptor %d: %w", ErrNotShared, fd, err)
	}
	return page[:n], nil
}

// Bytes is the memory.
func (s *Shared) Bytes() []byte { return s.mem }

// ID names the memory file.
func (s *Shared) ID() FileID { return s.id }

// Export makes a descriptor of the memory, close-on-exec, that belongs to the
// caller and holds the memory while it, or a duplicate in any process, is
// open. Only the maker can export.
func (s *Shared) Export() (int, error) { return reopen(s.fd) }

// Held reports whether a process other than the maker holds the memory. Only the maker
// can call it.
func (s *Shared) Held() bool {
	// Between fork and exec a child has every descriptor.
	syscall.ForkLock.RLock()
	defer syscall.ForkLock.RUnlock()
	held, err := locked(s.fd, 0, 0)
	return held || err != nil
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

// Close unmaps the memory and closes the maker's descriptor. The memory stays while
// other processes hold it.
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
	if err := roomForMappings(); err != nil {
		return err
	}
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
	if err := lockShared(own); err != nil {
		unix.Close(own)
		return -1, err
	}
	return own, nil
}

// lockShared gives a description the lock that says that it holds the file. It
// does not wait: a peer that has the exclusive lock, after the maker is gone,
// holds the file itself.
func lockShared(fd int) error {
	lock := unix.Flock_t{Type: unix.F_RDLCK}
	err := unix.FcntlFlock(uintptr(fd), unix.F_OFD_SETLK, &lock)
	if err != nil && err != unix.EAGAIN && err != unix.EACCES {
		return fmt.Errorf("lock descriptor %d: %w", fd, err)
	}
	return nil
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
