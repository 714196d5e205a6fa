//go:build linux && cgo && (amd64 || arm64) && !cuvmm_nocgo

package main

import (
	"errors"
	"fmt"

	"github.com/cuvmm/cuvmm/cuda"
	"github.com/cuvmm/cuvmm/internal/errs"
	"github.com/cuvmm/cuvmm/internal/share"
	"github.com/cuvmm/cuvmm/vmm"
)

// A segment is an allocation of one handle, which other processes can map. PyTorch's
// MemPool keeps its cache on top of segments.

func (e *entry) newSegment(bytes int, tag cuda.Tag) (ptr uintptr, err error) {
	if bytes <= 0 {
		return 0, errs.Invalid("cuvmm_segment_alloc", errs.Bytes(bytes), "allocate at least one byte")
	}
	err = whileAwake("cuvmm_segment_alloc", tag, func() error {
		ptr, err = e.makeSegment(bytes, tag)
		return err
	})
	return ptr, err
}

func (e *entry) makeSegment(bytes int, tag cuda.Tag) (ptr uintptr, err error) {
	memory := vmm.Properties{Handles: vmm.PosixFD}
	granule, err := vmm.GranularityOf(e.dev, memory)
	if err != nil {
		return 0, err
	}
	one := vmm.FixedChunks((bytes-1)/granule*granule + granule)
	b, err := vmm.NewBuffer(e.dev, vmm.BufferOptions{Reserve: bytes, Chunks: one, Memory: memory, Tag: tag})
	if err != nil {
		return 0, err
	}
	if err = b.Grow(bytes); err == nil {
		err = e.addSegment(b)
	}
	if err != nil {
		return 0, share.Of(b).Abandon("cuvmm_segment_alloc", err)
	}
	return uintptr(b.Ptr()), nil
}

func (e *entry) addSegment(b *vmm.Buffer) error {
	e.mu.Lock()
	defer e.mu.Unlock()
	if e.closed {
		return errs.ClosedError("cuvmm_segment_alloc", "pool")
	}
	if len(e.peers) > 0 {
		if err := b.SetAccess(e.peers...); err != nil {
			return err
		}
	}
	e.segments[uintptr(b.Ptr())] = b
	return nil
}

// endSegments refuses new segments and ranges, as the pool is about to be closed, or fails if
// there are any.
func (e *entry) endSegments() error {
	e.mu.Lock()
	defer e.mu.Unlock()
	if n, m := len(e.segments), len(e.ranges); n+m > 0 {
		return errs.New(errs.Failure{Op: "cuvmm_pool_close", Kind: errs.InUse, Asked: fmt.Sprintf("a pool with %d segments and %d ranges", n, m), Hint: "free them first"})
	}
	e.closed = true
	return nil
}

// freeSegment closes a segment when the stream's work is done. A segment whose closing
// fails stays, so that the caller can try again.
func (e *entry) freeSegment(ptr, stream uintptr) error {
	s, err := e.stream(stream)
	if err != nil {
		return err
	}
	e.mu.Lock()
	b := e.segments[ptr]
	delete(e.segments, ptr)
	e.mu.Unlock()
	if b == nil {
		return errs.Invalid("cuvmm_segment_free", fmt.Sprintf("no segment of this pool begins at %#x", ptr), "pass the address that cuvmm_segment_alloc gave, once")
	}
	err = b.CloseAfter(s)
	if errors.Is(err, cuda.ErrCapturing) { // the stream cannot be marked: wait for the device instead
		err = b.Close()
	}
	if err != nil {
		e.mu.Lock()
		e.segments[ptr] = b
		e.mu.Unlock()
	}
	return err
}
