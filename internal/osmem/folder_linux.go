//go:build linux && (amd64 || arm64)

package osmem

import (
	"errors"
	"fmt"
	"syscall"

	"golang.org/x/sys/unix"
)

// Folder is a directory whose files several processes map. Its files get the
// directory's own permissions to read and write. Its methods are safe for
// concurrent use.
//
// Locks here are those of open file descriptions: the kernel drops one when
// the last descriptor of its description is closed, wherever that is, in a
// process that was killed and in a socket's queue too. So nothing here can stay
// locked by mistake.
type Folder struct {
	fd   int
	perm uint32
	dev  uint64
}

// OpenFolder opens a directory that is there. Its owner decides what its files
// say, so that must be this process's user, or root; and not every user may write
// to it.
func OpenFolder(path string) (*Folder, error) {
	fd, err := unix.Open(path, unix.O_RDONLY|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
	if err != nil {
		return nil, fmt.Errorf("open folder %s: %w", path, err)
	}
	var stat unix.Stat_t
	if err = unix.Fstat(fd, &stat); err != nil {
		err = fmt.Errorf("fstat of folder %s: %w", path, err)
	} else {
		err = checkOwner(path, stat.Uid, stat.Mode)
	}
	if err != nil {
		unix.Close(fd)
		return nil, err
	}
	return &Folder{fd, stat.Mode & 0o666, stat.Dev}, nil
}

func checkOwner(path string, owner, mode uint32) error {
	switch me := uint32(unix.Geteuid()); {
	case owner != me && owner != 0:
		return fmt.Errorf("folder %s belongs to user %d, this process runs as user %d: take a folder of this user's or root's: %w",
			path, owner, me, unix.EPERM)
	case mode&0o002 != 0:
		return fmt.Errorf("folder %s has mode %04o, so every user may write to it: take that away (chmod o-w), and share it by group: %w",
			path, mode&0o7777, unix.EPERM)
	}
	return nil
}

// Close closes the folder's descriptor.
func (f *Folder) Close() error {
	err := unix.Close(f.fd)
	f.fd = -1
	return err
}

// NewFile makes a file of n zeroed bytes without a name. It vanishes with its
// maker unless it was linked. All of its room is taken from the file system at
// once: a page without room would kill the process that touches it.
func (f *Folder) NewFile(n uint64) (*Shared, error) {
	const remedy = "make room, or take a folder on another file system"
	var fs unix.Statfs_t
	if err := unix.Fstatfs(f.fd, &fs); err == nil && !fits(&fs, n) {
		return nil, fmt.Errorf("make a file of %d bytes (%s): the folder's has %d free: %w", n, remedy, fs.Bavail*uint64(fs.Bsize), unix.ENOSPC)
	}
	fd, err := unix.Openat(f.fd, ".", unix.O_TMPFILE|unix.O_RDWR|unix.O_CLOEXEC, f.perm)
	if err != nil {
		return nil, fmt.Errorf("make a file without a name (take a folder on another file system, such as /dev/shm): %w", err)
	}
	err = unix.Fchmod(fd, f.perm) // whatever the umask
	if err == nil {
		err = unix.Ftruncate(fd, int64(n))
	}
	if err == nil {
		err = commit(fd, n)
	}
	var s *Shared
	if err == nil {
		s, err = mapShared(fd, n)
	}
	if err != nil {
		unix.Close(fd)
		return nil, fmt.Errorf("make a file of %d bytes (%s): %w", n, remedy, err)
	}
	s.fd = fd
	return s, nil
}

// fits reports whether a file system has room for n bytes more. One without
// a limit reports no blocks at all.
func fits(fs *unix.Statfs_t, n uint64) bool {
	return fs.Blocks == 0 || n/uint64(fs.Bsize) <= fs.Bavail
}

// commitStep bounds what one call takes, since a file system in memory releases all of
// a call's room when a signal interrupts it.
const commitStep = 64 << 20

// commit takes the room for n bytes of a file.
func commit(fd int, n uint64) error {
	for at := uint64(0); at < n; {
		part := min(commitStep, n-at)
		switch err := unix.Fallocate(fd, 0, int64(at), int64(part)); err {
		case nil:
			at += part
		case unix.EINTR:
		default:
			return err
		}
	}
	return nil
}

// Link names a file that NewFile made. No file may have the name yet. From then on the
// file costs no descriptor.
func (f *Folder) Link(s *Shared, name string) error {
	// A process that changed its user cannot always read its own /proc; newer
	// kernels need none.
	err := unix.Linkat(s.fd, "", f.fd, name, unix.AT_EMPTY_PATH)
	if err != nil && !errors.Is(err, unix.EEXIST) {
		self := fmt.Sprintf("/proc/self/fd/%d", s.fd)
		err = unix.Linkat(unix.AT_FDCWD, self, f.fd, name, unix.AT_SYMLINK_FOLLOW)
	}
	if err != nil {
		return fmt.Errorf("name a file %q (is /proc mounted?): %w", name, err)
	}
	unix.Close(s.fd)
	s.fd = -1
	return nil
}

// OpenFile maps a file, and costs no descriptor.
func (f *Folder) OpenFile(name string) (*Shared, error) {
	fd, err := f.open(name)
	if err != nil {
		return nil, err
	}
	defer unix.Close(fd)
	var stat unix.Stat_t
	if err := unix.Fstat(fd, &stat); err != nil {
		return nil, fmt.Errorf("fstat of file %q: %w", name, err)
	}
	return mapShared(fd, uint64(stat.Size))
}

// Export makes a descriptor of a file, close-on-exec, that belongs to the
// caller and holds the file while it, or a duplicate in any process, is open.
func (f *Folder) Export(name string) (int, error) {
	fd, err := f.open(name)
	if err != nil {
		return -1, err
	}
	if err := lockShared(fd); err != nil {
		unix.Close(fd)
		return -1, fmt.Errorf("file %q: %w", name, err)
	}
	return fd, nil
}

// Held reports whether an exported descriptor of the file is open anywhere. A file that
// does not exist is not held; one that cannot be queried counts as held.
func (f *Folder) Held(name string) bool {
	// Between fork and exec a child has every descriptor.
	syscall.ForkLock.RLock()
	defer syscall.ForkLock.RUnlock()
	fd, err := unix.Openat(f.fd, name, unix.O_RDWR|unix.O_CLOEXEC|unix.O_NOFOLLOW, 0)
	if err != nil {
		return !errors.Is(err, unix.ENOENT)
	}
	defer unix.Close(fd)
	held, err := locked(fd, 0, 0)
	return held || err != nil
}

// Tail reads the last page of a file that may be the folder's, by a descriptor,
// and returns the file's size in bytes too. It touches no file of another file
// system, which could block.
func (f *Folder) Tail(fd int) (page []byte, size uint64, err error) {
	file, err := statOf(fd)
	if err != nil {
		return nil, 0, fmt.Errorf("%w: %w", ErrNotShared, err)
	}
	if idOf(&file).Device != f.dev || file.Mode&unix.S_IFMT != unix.S_IFREG {
		return nil, 0, fmt.Errorf("%w: descriptor %d is not of a file on the folder's file system", ErrNotShared, fd)
	}
	page, err = tail(fd, file.Size)
	return page, file.Size, err
}

// Is reports whether a descriptor is of the file of that name.
func (f *Folder) Is(name string, fd int) bool {
	var named unix.Stat_t
	file, err := IdentifyShared(fd)
	return err == nil && unix.Fstatat(f.fd, name, &named, unix.AT_SYMLINK_NOFOLLOW) == nil && file == FileID{named.Dev, named.Ino}
}

// Remove removes a file's name. Processes that have mapped it keep it.
func (f *Folder) Remove(name string) error {
	if err := unix.Unlinkat(f.fd, name, 0); err != nil && err != unix.ENOENT {
		return fmt.Errorf("remove file %q: %w", name, err)
	}
	return nil
}

func (f *Folder) open(name string) (int, error) {
	fd, err := unix.Openat(f.fd, name, unix.O_RDWR|unix.O_CLOEXEC|unix.O_NOFOLLOW, 0)
	if err != nil {
		return -1, fmt.Errorf("open file %q: %w", name, err)
	}
	return fd, nil
}

// Board is a mapped file with a lock for each of its bytes. The locks belong to
// this opening of it: another Board of the same file, in this process or another,
// has others.
type Board struct {
	*Shared
	own int // descriptor
}

// OpenBoard maps a file and keeps a descriptor of it for locking. The locks belong to a
// description of their own, not the mapping's: some kernels tear down a process's mappings
// up to a tenth of a second after its parent has seen it exit.
func (f *Folder) OpenBoard(name string) (*Board, error) {
	s, err := f.OpenFile(name)
	if err != nil {
		return nil, err
	}
	own, err := f.open(name)
	if err != nil {
		return nil, errors.Join(err, s.Close())
	}
	b := &Board{s, own}
	if id, err := IdentifyShared(own); err != nil || id != s.id {
		return nil, errors.Join(fmt.Errorf("file %q was replaced while it was opened: open it again", name), err, b.Close())
	}
	return b, nil
}

// Lock takes the lock of a byte, and waits for the process that has it.
func (b *Board) Lock(off uint64) error { return b.set(unix.F_OFD_SETLKW, unix.F_WRLCK, off) }

// Unlock gives it back.
func (b *Board) Unlock(off uint64) error { return b.set(unix.F_OFD_SETLK, unix.F_UNLCK, off) }

func (b *Board) set(how int, kind int16, off uint64) error {
	lock := unix.Flock_t{Type: kind, Start: int64(off), Len: 1}
	for {
		err := unix.FcntlFlock(uintptr(b.own), how, &lock)
		if err != unix.EINTR {
			return err
		}
	}
}

// Locked reports whether another opening of the file has the lock of a byte.
func (b *Board) Locked(off uint64) (bool, error) { return locked(b.own, off, 1) }

// Close unmaps the file and gives up all locks.
func (b *Board) Close() error {
	unix.Close(b.own)
	b.own = -1
	return b.Shared.Close()
}

// locked queries the locks on n bytes; 0 means all.
func locked(fd int, off, n uint64) (bool, error) {
	lock := unix.Flock_t{Type: unix.F_WRLCK, Start: int64(off), Len: int64(n)}
	err := unix.FcntlFlock(uintptr(fd), unix.F_OFD_GETLK, &lock)
	return err == nil && lock.Type != unix.F_UNLCK, err
}
