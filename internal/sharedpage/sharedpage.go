// Package sharedpage provides single pages of memory that two processes share: each
// is a memory file of exactly one page, sealed so that neither side can take
// the memory away while the other uses it.
//
// On other systems than Linux the package compiles, and everything returns an
// error that matches errors.ErrUnsupported.
package sharedpage

import (
	"errors"
	"sync/atomic"
	"unsafe"
)

// ErrNoPage reports a descriptor of something other than a sealed memory file of one
// page.
var ErrNoPage = errors.New("not a sealed memory file of one page")

const wordSize = 8

// Page is one page, mapped here, outside of Go's memory.
type Page struct{ mem []byte }

// Word returns one of the page's words of 64 bits, which another process and the GPU
// may change at any time.
func (p *Page) Word(i int) *atomic.Uint64 {
	return (*atomic.Uint64)(unsafe.Pointer(&p.mem[wordSize*i : wordSize*(i+1)][0]))
}

// Words returns how many words the page has.
func (p *Page) Words() int { return len(p.mem) / wordSize }

// Pointer returns the address of the page.
func (p *Page) Pointer() unsafe.Pointer { return unsafe.Pointer(unsafe.SliceData(p.mem)) }

// Size returns the page's size in bytes.
func (p *Page) Size() uint64 { return uint64(len(p.mem)) }
