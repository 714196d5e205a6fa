package main

import (
	"errors"
	"fmt"
	"sync"

	"github.com/cuvmm/cuvmm/cuda"
	"github.com/cuvmm/cuvmm/internal/errs"
	"github.com/cuvmm/cuvmm/vmm"
)

// segments are allocations of one handle each, which other processes can map, for
// a cache of the caller's own on top: PyTorch's MemPool.
var segments sync.Map // the address to a *vmm.Buffer

func (e *entry) newSegment(bytes int) (ptr uintptr, err error) {
	b, err := vmm.NewBuffer(e.dev, vmm.BufferOptions{Reserve: bytes, Memory: vmm.Properties{Handles: vmm.PosixFD}})
	if err != nil {
		return 0, err
	}
	if err := b.Grow(bytes); err != nil {
		return 0, errors.Join(err, b.Close())
	}
	segments.Store(uintptr(b.Ptr()), b)
	return uintptr(b.Ptr()), nil
}

// freeSegment gives a segment back when the stream's work is done.
func (e *entry) freeSegment(ptr, stream uintptr) error {
	b, there := segments.LoadAndDelete(ptr)
	if !there {
		return errs.Invalid("cuvmm_segment_free", fmt.Sprintf("no segment begins at %#x", ptr), "pass the address that cuvmm_segment_alloc gave, once")
	}
	s, err := e.stream(stream)
	if err == nil {
		err = b.(*vmm.Buffer).CloseAfter(s)
	}
	if errors.Is(err, cuda.ErrCapturing) {
		err = b.(*vmm.Buffer).Close()
	}
	return err
}
