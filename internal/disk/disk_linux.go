package disk

import (
	"errors"
	"io/fs"
	"os"

	"golang.org/x/sys/unix"
)

// direct is the way past the page cache. Without an alignment there is none.
type direct struct {
	f     *os.File
	align int
}

// open opens the file once more for direct reads, if the kernel says how they are aligned
// (Linux 6.1) and the name is still the same file.
func (d *direct) open(name string, info fs.FileInfo) {
	f, err := os.OpenFile(name, os.O_RDONLY|unix.O_DIRECT|unix.O_NONBLOCK, 0)
	if err != nil {
		return
	}
	same, err := f.Stat()
	var s unix.Statx_t
	if err == nil {
		err = unix.Statx(int(f.Fd()), "", unix.AT_EMPTY_PATH, unix.STATX_DIOALIGN, &s)
	}
	if err != nil || !os.SameFile(info, same) || s.Mask&unix.STATX_DIOALIGN == 0 || s.Dio_mem_align == 0 || s.Dio_offset_align == 0 {
		_ = f.Close() // only opened
		return
	}
	*d = direct{f, int(max(s.Dio_mem_align, s.Dio_offset_align))} // both are powers of two
}

func (d *direct) close() error {
	if d.f == nil {
		return nil
	}
	return d.f.Close()
}

func (d *direct) read(p []byte, offset int64) (n int, err error) {
	for n < len(p) {
		got, err := unix.Pread(int(d.f.Fd()), p[n:], offset+int64(n))
		switch {
		case err == unix.EINTR:
			continue
		case err != nil:
			return n, err
		}
		n += got
		if got == 0 || n%d.align != 0 { // the file's end
			return n, nil
		}
	}
	return n, nil
}

func (d *direct) cached(f *os.File, p []byte, offset int64) (n int, known bool) {
	for n < len(p) {
		got, err := unix.Preadv2(int(f.Fd()), [][]byte{p[n:]}, offset+int64(n), unix.RWF_NOWAIT)
		switch {
		case err == unix.EINTR:
			continue
		case err == unix.EAGAIN:
			return n, true
		case err != nil: // a file system that cannot say
			return n, false
		case got <= 0:
			return n, true
		}
		n += got
	}
	return n, true
}

// allocate reserves space. File systems that cannot do so are no error. Some would first take all
// that others may need, and then find that it is too little, so they are asked before.
func allocate(f *os.File, bytes int64) error {
	if bytes == 0 {
		return nil
	}
	var fs unix.Statfs_t
	if err := unix.Fstatfs(int(f.Fd()), &fs); err == nil && fs.Bsize > 0 && fs.Blocks > 0 && uint64(bytes)/uint64(fs.Bsize) > fs.Bfree {
		return unix.ENOSPC
	}
	for {
		err := unix.Fallocate(int(f.Fd()), 0, 0, bytes)
		switch {
		case err == unix.EINTR:
			continue
		case errors.Is(err, unix.EOPNOTSUPP), errors.Is(err, unix.ENOSYS):
			return nil
		}
		return err
	}
}

func syncFolder(folder string) error {
	f, err := os.Open(folder)
	if err != nil {
		return err
	}
	err = f.Sync()
	if errors.Is(err, unix.EINVAL) { // a file system without folders on a disk
		err = nil
	}
	return errors.Join(err, f.Close())
}
