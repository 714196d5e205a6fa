// Package disk reads files through the page cache and past it, and replaces files as a whole.
package disk

import (
	"errors"
	"fmt"
	"io"
	"io/fs"
	"math/rand/v2"
	"os"
	"path/filepath"
	"syscall"
	"time"
)

// ErrNotFile: a folder, a device or a pipe.
var ErrNotFile = errors.New("not a regular file")

// File is a regular file that is open for reading. Its methods are safe for concurrent use,
// but for Close.
type File struct {
	f *os.File
	d direct
}

// State is what changes when a file is written.
type State struct {
	Bytes    int64
	Modified time.Time
}

// Open opens a file for reading. It does not wait for the other end of a pipe.
func Open(name string) (*File, error) {
	f, err := os.OpenFile(name, os.O_RDONLY|syscall.O_NONBLOCK, 0)
	if err != nil {
		return nil, err
	}
	info, err := f.Stat()
	if err == nil && !info.Mode().IsRegular() {
		err = &fs.PathError{Op: "open", Path: name, Err: ErrNotFile}
	}
	if err != nil {
		_ = f.Close() // only read
		return nil, err
	}
	file := &File{f: f}
	file.d.open(name, info)
	return file, nil
}

// Close closes the file. No other call runs.
func (f *File) Close() error { return errors.Join(f.d.close(), f.f.Close()) }

// State returns the file's state now.
func (f *File) State() (State, error) {
	info, err := f.f.Stat()
	if err != nil {
		return State{}, err
	}
	return State{info.Size(), info.ModTime()}, nil
}

// ReadAt fills p through the page cache. At the end of the file it returns io.ErrUnexpectedEOF.
func (f *File) ReadAt(p []byte, offset int64) error {
	if n, err := f.f.ReadAt(p, offset); n < len(p) {
		return ended(err)
	}
	return nil
}

func ended(err error) error {
	if err == nil || errors.Is(err, io.EOF) {
		return io.ErrUnexpectedEOF
	}
	return err
}

// Align returns the alignment of direct reads: of the memory, the offset and the length. It is 0
// if there are none.
func (f *File) Align() int { return f.d.align }

// Cached reads from the page cache as much of p as is there, and reports whether it is known
// what is there.
func (f *File) Cached(p []byte, offset int64) (n int, known bool) { return f.d.cached(f.f, p, offset) }

// ReadDirect fills p past the page cache, up to the end of the file. Memory, offset and length
// are aligned.
func (f *File) ReadDirect(p []byte, offset int64) (n int, err error) { return f.d.read(p, offset) }

// Replacement is a file that is written beside another one, and then takes its name.
type Replacement struct {
	f      *os.File
	folder string
	name   string
}

// Replace begins a file of so many bytes, whose space it reserves if the file system can.
func Replace(folder, name string, bytes int64) (*Replacement, error) {
	path := filepath.Join(folder, name)
	if info, err := os.Stat(path); err == nil && info.IsDir() { // before much is written
		return nil, &fs.PathError{Op: "replace", Path: path, Err: syscall.EISDIR}
	}
	beside := fmt.Sprintf(".%s.%016x.partial", name, rand.Uint64())
	f, err := os.OpenFile(filepath.Join(folder, beside), os.O_RDWR|os.O_CREATE|os.O_EXCL, 0o666)
	if err != nil {
		return nil, err
	}
	r := &Replacement{f, folder, name}
	if err := r.reserve(bytes); err != nil {
		return nil, errors.Join(err, r.Abandon())
	}
	return r, nil
}

func (r *Replacement) reserve(bytes int64) error {
	if err := allocate(r.f, bytes); err != nil {
		return fmt.Errorf("reserve %d bytes: %w", bytes, err)
	}
	return r.f.Truncate(bytes)
}

// WriteAt writes p.
func (r *Replacement) WriteAt(p []byte, offset int64) (int, error) { return r.f.WriteAt(p, offset) }

// Commit writes everything to the disk, gives the file its name in place of what had it, and
// writes that to the disk. If it fails, what had the name has it still, or the new file has.
func (r *Replacement) Commit() error {
	if err := r.f.Sync(); err != nil {
		return errors.Join(err, r.Abandon())
	}
	if err := os.Rename(r.f.Name(), filepath.Join(r.folder, r.name)); err != nil {
		return errors.Join(err, r.Abandon())
	}
	return errors.Join(r.f.Close(), syncFolder(r.folder))
}

// Abandon removes the file.
func (r *Replacement) Abandon() error {
	return errors.Join(r.f.Close(), os.Remove(r.f.Name()))
}
