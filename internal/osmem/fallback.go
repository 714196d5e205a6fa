//go:build !linux || !(amd64 || arm64)

package osmem

import (
	"errors"
	"fmt"
	"sync"
)

var errLinux = fmt.Errorf("needs Linux on amd64 or arm64: %w", errors.ErrUnsupported)

// Linux reports whether this is one of the systems on which everything works.
const Linux = false

// block is the unit in which a heap arena is committed.
const block = 2 << 20

// Arena is a large range of memory that is committed block by block, when it
// is first used, and reads zero where it was not written.
type Arena struct {
	mu     sync.Mutex
	size   uint64
	blocks map[uint64][]byte
}

// NewArena makes an arena of size bytes. Its pages cannot be placed.
func NewArena(size uint64, placeable bool) (*Arena, error) {
	return &Arena{size: size, blocks: map[uint64][]byte{}}, nil
}

// Run is the longest contiguous piece of memory that starts at off, at most n
// bytes of it.
func (a *Arena) Run(off, n uint64) []byte {
	checkRange(off, n, a.size)
	a.mu.Lock()
	defer a.mu.Unlock()
	b := a.blocks[off/block]
	if b == nil {
		b = make([]byte, block)
		a.blocks[off/block] = b
	}
	b = b[off%block:]
	n = min(n, uint64(len(b)))
	return b[:n:n]
}

// Discard makes the range read zero, and frees whole blocks of it.
func (a *Arena) Discard(off, n uint64) error {
	checkRange(off, n, a.size)
	a.mu.Lock()
	defer a.mu.Unlock()
	for n > 0 {
		part := min(n, block-off%block)
		if part == block {
			delete(a.blocks, off/block)
		} else if b := a.blocks[off/block]; b != nil {
			clear(b[off%block : off%block+part])
		}
		off, n = off+part, n-part
	}
	return nil
}

func (a *Arena) Place(addr, off, n uint64, access Access) error { return errLinux }

func (a *Arena) Close() error {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.blocks = nil
	return nil
}

// Alloc returns n zeroed bytes. The caller keeps the slice until Free.
func Alloc(n uint64) ([]byte, error) { return make([]byte, n, roundUp(n)), nil }

// Free frees what Alloc returned.
func Free(mem []byte) error { return nil }

// AllocHuge is Alloc: there are no huge pages here.
func AllocHuge(n uint64) ([]byte, error) { return Alloc(n) }

// Populate does nothing: the memory is there.
func Populate(mem []byte) error { return nil }

// Forget makes memory of Alloc read zero.
func Forget(mem []byte) error {
	clear(mem)
	return nil
}

func Window(size, align uint64) (base uint64, err error)  { return 0, errLinux }
func Commit(addr, n uint64) ([]byte, error)               { return nil, errLinux }
func Clear(addr, n uint64) error                          { return errLinux }
func Protect(addr, n uint64, access Access) error         { return errLinux }
func NewShared(name string, size uint64) (*Shared, error) { return nil, errLinux }
func OpenShared(fd int) (*Shared, error)                  { return nil, errLinux }
func Tail(fd int) (page []byte, size uint64, err error)   { return nil, 0, errLinux }
func IdentifyShared(fd int) (FileID, error)               { return FileID{}, errLinux }

// ErrNotShared is returned for a descriptor that no Shared exported.
var ErrNotShared = errors.New("the descriptor is not exported memory")

// Shared is memory that crosses process borders: there is none here.
type Shared struct{}

// FileID names a memory file.
type FileID struct{ Device, Inode uint64 }

func (s *Shared) Bytes() []byte                                  { return nil }
func (s *Shared) ID() FileID                                     { return FileID{} }
func (s *Shared) Export() (int, error)                           { return -1, errLinux }
func (s *Shared) Held() bool                                     { return false }
func (s *Shared) Place(addr, off, n uint64, access Access) error { return errLinux }
func (s *Shared) Close() error                                   { return nil }

// Folder is a directory whose files several processes map: there is none here.
type Folder struct{}

// Board is a mapped file with a lock for each of its bytes.
type Board struct{ *Shared }

func OpenFolder(path string) (*Folder, error)           { return nil, errLinux }
func (f *Folder) Close() error                          { return nil }
func (f *Folder) NewFile(n uint64) (*Shared, error)     { return nil, errLinux }
func (f *Folder) Link(s *Shared, name string) error     { return errLinux }
func (f *Folder) OpenFile(name string) (*Shared, error) { return nil, errLinux }
func (f *Folder) Export(name string) (int, error)       { return -1, errLinux }
func (f *Folder) Held(name string) bool                 { return false }
func (f *Folder) Tail(fd int) ([]byte, uint64, error)   { return nil, 0, errLinux }
func (f *Folder) Is(name string, fd int) bool           { return false }
func (f *Folder) Remove(name string) error              { return errLinux }
func (f *Folder) OpenBoard(name string) (*Board, error) { return nil, errLinux }
func (b *Board) Lock(off uint64) error                  { return errLinux }
func (b *Board) Unlock(off uint64) error                { return errLinux }
func (b *Board) Locked(off uint64) (bool, error)        { return false, errLinux }
func (b *Board) Close() error                           { return nil }
