//go:build linux && cgo && (amd64 || arm64) && !cuvmm_nocgo

package main

import (
	"context"
	"fmt"
	"slices"
	"sync"

	"github.com/cuvmm/cuvmm/cuda"
	"github.com/cuvmm/cuvmm/internal/core"
	"github.com/cuvmm/cuvmm/internal/driver"
	"github.com/cuvmm/cuvmm/internal/errs"
	"github.com/cuvmm/cuvmm/vmm"
)

// grown is a range of addresses whose first pages have memory, one of them at least.
type grown struct {
	*vmm.Sparse
	mu    sync.Mutex // held over a change
	pages int        // that are mapped
}

func (e *entry) newRange(bytes, page int, null bool, tag cuda.Tag) (ptr uintptr, err error) {
	const op = "cuvmm_range_open"
	if bytes <= 0 || page < 0 {
		return 0, errs.Invalid(op, fmt.Sprintf("%s in pages of %s", errs.Bytes(bytes), errs.Bytes(page)), "reserve at least one byte, in pages of whole granules, or 0 for the granularity")
	}
	err = whileAwake(op, tag, func() error {
		ptr, err = e.makeRange(vmm.SparseOptions{Reserve: bytes, Page: page, Null: null, Tag: tag})
		return err
	})
	return ptr, err
}

func (e *entry) makeRange(o vmm.SparseOptions) (ptr uintptr, err error) {
	u := core.SystemOf(e.dev).NewUndo(driver.Device(e.dev.Ordinal()))
	defer func() { err = u.After(err) }()
	e.mu.Lock()
	o.Access = slices.Clone(e.peers)
	e.mu.Unlock()
	s, err := vmm.NewSparse(e.dev, o)
	if err != nil {
		return 0, err
	}
	u.Own("sparse range", 0, s.Close)
	r := &grown{Sparse: s}
	if err := r.commit(0, nil); err != nil {
		return 0, err
	}
	if err := e.addRange(r); err != nil {
		return 0, err
	}
	u.Keep()
	return uintptr(s.Ptr()), nil
}

func (e *entry) addRange(r *grown) error {
	e.mu.Lock()
	defer e.mu.Unlock()
	if e.closed {
		return errs.ClosedError("cuvmm_range_open", "pool")
	}
	e.ranges[uintptr(r.Ptr())] = r
	return nil
}

func (e *entry) rangeAt(op string, ptr uintptr) (*grown, error) {
	e.mu.Lock()
	defer e.mu.Unlock()
	if r := e.ranges[ptr]; r != nil {
		return r, nil
	}
	return nil, errs.Invalid(op, fmt.Sprintf("no range of this pool begins at %#x", ptr), "pass the address that cuvmm_range_open gave")
}

// pagesOf returns how many pages so many bytes need: the first always.
func (r *grown) pagesOf(op string, bytes int) (int, error) {
	if bytes < 0 || bytes > r.Size() {
		return 0, errs.Invalid(op, fmt.Sprintf("%s of a range of %s", errs.Bytes(bytes), errs.Bytes(r.Size())), "stay within what was reserved")
	}
	return max(1, (bytes+r.Page()-1)/r.Page()), nil
}

// commit has memory lie under the first bytes, for work of the stream.
func (r *grown) commit(bytes int, on *cuda.Stream) error {
	n, err := r.pagesOf("cuvmm_range_commit", bytes)
	if err != nil {
		return err
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	if n <= r.pages {
		return nil
	}
	if err := r.Map(context.Background(), on, vmm.Span{First: r.pages, N: n - r.pages}); err != nil {
		return err
	}
	r.pages = n
	return nil
}

// release gives back what lies behind the first bytes, after all work that could use it.
func (r *grown) release(bytes int) error {
	n, err := r.pagesOf("cuvmm_range_release", bytes)
	if err != nil {
		return err
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	if n >= r.pages {
		return nil
	}
	if err := r.Unmap(context.Background(), vmm.Span{First: n, N: r.pages - n}); err != nil {
		return err
	}
	r.pages = n
	_, err = r.Pages().Trim(0)
	return err
}

// closeRange closes a range after all work that could use it. One whose closing fails stays.
func (e *entry) closeRange(ptr uintptr) error {
	r, err := e.rangeAt("cuvmm_range_close", ptr)
	if err == nil {
		err = r.Close()
	}
	if err != nil {
		return err
	}
	e.mu.Lock()
	defer e.mu.Unlock()
	delete(e.ranges, ptr)
	return nil
}
