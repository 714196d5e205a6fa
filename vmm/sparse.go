package vmm

import (
	"context"
	"fmt"

	"github.com/cuvmm/cuvmm/cuda"
	"github.com/cuvmm/cuvmm/internal/core"
	"github.com/cuvmm/cuvmm/internal/errs"
	"github.com/cuvmm/cuvmm/internal/life"
	"github.com/cuvmm/cuvmm/internal/memspec"
	"github.com/cuvmm/cuvmm/internal/pages"
	"github.com/cuvmm/cuvmm/internal/suspend"
	"github.com/cuvmm/cuvmm/internal/vrange"
)

// Sparse is a range of addresses with holes. It is cut into pages of one size, which are mapped
// and unmapped in any order; what has no page is a hole. The address is fixed for life.
//
// Pages come from a source (Pages), which recycles those that are unmapped. A page that is
// unmapped stays where it is until its memory or its addresses are wanted, so a program that
// maps the same pages again makes no driver call. Nothing may use it there meanwhile: the
// software driver names work that does, and work in a hole.
//
// All methods are safe for concurrent use. Changes of the ranges of one source run one after
// the other. If the Sparse is nil or was not made by NewSparse, methods that return an error
// return ErrInvalidArgument.
type Sparse struct {
	sleeper
	r       *pages.Range
	pages   *Pages
	watched life.Watched
}

// SparseOptions describe a sparse range. The zero value is a range as large as the device's
// memory, with pages of the granularity and a source of its own.
type SparseOptions struct {
	// Reserve is the size of the range in bytes, rounded up to whole pages. 0 is the size of
	// the device's memory, halved as often as necessary if there is not enough address space.
	Reserve int
	// Pages is where the range has its pages from. Ranges of one source share memory: what one
	// unmaps another maps. If it is nil the range has a source of its own, with pages as Page
	// and Memory say.
	Pages *Pages
	// Page and Memory are as in PagesOptions. With Pages they must be zero.
	Page   int
	Memory Properties
	// Access is the access of places to the range's pages. The device itself and, for memory
	// on the host, the memory's own location have read-write access unless they are named
	// here; all other places have none.
	Access []Access
	// Null lays one page under all holes, which they share, so that work in a hole, such as the
	// padding of a captured kernel, reads and writes something of no meaning in place of
	// failing. Each hole is a mapping then: NewSparse takes about as long as Map of all pages.
	//
	// The driver maps nothing over a mapping, so for a moment nothing lies under a hole that
	// Map, Share or Unmap changes. They wait first, until their context ends, for all work that
	// was submitted before and could use the range, and until they return the caller submits
	// none that reaches its holes. UnmapAfter waits for nothing: the page stays under the hole,
	// whose work may still use it, until Map or Unmap of the range takes it away. Other ranges
	// do not get it before.
	Null bool
	// Name is what errors and snapshots call the range. Names need not differ. A name has at
	// most 128 bytes of printable UTF-8, without spaces at its ends.
	Name string
	// Tag is the group that the range belongs to.
	Tag cuda.Tag
}

// Span is N pages from page First on.
type Span struct{ First, N int }

// NewSparse makes a range of holes: it reserves address space, and takes no memory yet. The
// caller closes it.
func NewSparse(d *cuda.Device, o SparseOptions) (*Sparse, error) {
	const op = "vmm.NewSparse"
	label := life.Label{Name: o.Name, Tag: string(o.Tag)}
	if err := label.Check(op); err != nil {
		return nil, err
	}
	p, own, err := sourceOf(op, d, o)
	if err != nil {
		return nil, err
	}
	return newSparse(op, d, p, own, o, label)
}

// sourceOf returns the source that the options name, or makes one.
func sourceOf(op string, d *cuda.Device, o SparseOptions) (p *Pages, own bool, err error) {
	if o.Pages == nil {
		p, err = newPages(op, d, PagesOptions{Page: o.Page, Memory: o.Memory, Name: o.Name, Tag: o.Tag})
		return p, true, err
	}
	in, err := o.Pages.inner(op)
	switch {
	case err != nil:
		return nil, false, err
	case core.SystemOf(d) == nil:
		return nil, false, errs.NilDevice(op)
	case in.System() != core.SystemOf(d):
		return nil, false, errs.ForeignError(op, "source of pages")
	case o.Page != 0 || o.Memory != (Properties{}):
		return nil, false, errs.Invalid(op, "a size or properties of pages besides a source", "set them in PagesOptions alone")
	}
	return o.Pages, false, nil
}

// newSparse makes a range with pages of a source, which belongs to it if own is set.
func newSparse(op string, d *cuda.Device, p *Pages, own bool, o SparseOptions, label life.Label) (s *Sparse, err error) {
	u := p.s.System().NewUndo(core.DeviceOf(p.s.Memory.Location))
	defer func() { err = u.After(err) }()
	if own {
		u.Own("page source", 0, func() error { return p.s.Close(op, false) })
	}
	access, err := bufferAccess(op, d, p.s.Memory.Location, o.Access)
	if err != nil {
		return nil, err
	}
	if o.Reserve < 0 || o.Reserve > memspec.MaxBytes {
		return nil, errReserve(op, o.Reserve)
	}
	res, err := reserveFor(op, d, uint64(o.Reserve), 0, p.s.Page, ReserveOptions{})
	if err != nil {
		return nil, err
	}
	u.Own("address range", 0, func() error { return res.Close(op) })
	r, err := pages.NewRange(op, p.s, d, res, access, label)
	if err != nil {
		return nil, err
	}
	r.Own = own
	u.Own("sparse range", 0, func() error {
		r.Closer.Life.Close()
		return r.Teardown(op, false)
	})
	if o.Null {
		if err := r.Cover(op); err != nil {
			return nil, err
		}
	}
	u.Keep()
	s = publicSparse(r, p)
	r.Watch(&s.watched)
	return s, nil
}

// publicSparse returns a Sparse of the inner state that its user may lose.
func publicSparse(r *pages.Range, p *Pages) *Sparse {
	return &Sparse{sleeper: suspend.Hold(r), r: r, pages: p}
}

// addressUnit returns what offsets of memory of some granularity are multiples of in a range
// that the device reserves.
func addressUnit(op string, d *cuda.Device, gran uint64) (uint64, error) {
	unit, err := vrange.Granularity(op, d)
	return max(unit, gran), err
}

// inner returns the inner state, or an error for a Sparse that no function made.
func (s *Sparse) inner(op string) (*pages.Range, error) {
	if s == nil || s.r == nil {
		return nil, errs.Invalid(op, "a nil sparse range", "make one with NewSparse")
	}
	return s.r, nil
}

// Ptr returns the address of the range, fixed for life.
func (s *Sparse) Ptr() cuda.Ptr { return cuda.Ptr(s.r.Base()) }

// Size returns the size of the range in bytes.
func (s *Sparse) Size() int { return int(s.r.Size()) }

// Page returns the size of a page in bytes.
func (s *Sparse) Page() int { return int(s.r.Page()) }

// Pages returns the source that the range has its pages from. If it is the range's own, Close
// of the range closes it.
func (s *Sparse) Pages() *Pages { return s.pages }

// Device returns the device that the range was made on.
func (s *Sparse) Device() *cuda.Device { return s.r.Device() }

// Name returns the name that the range was given, if any.
func (s *Sparse) Name() string { return s.r.Label().Name }

// Tag returns the tag that the range was given, if any.
func (s *Sparse) Tag() cuda.Tag { return cuda.Tag(s.r.Label().Tag) }

// SparseStats are the numbers of a range, in pages.
type SparseStats struct {
	// Pages that the range has addresses for, and those of them that are mapped: the others
	// are holes.
	Pages, Mapped int
	// Shared mapped pages are mapped elsewhere, too.
	Shared int
	// Freed pages were unmapped, and lie under their holes yet.
	Freed int
	// Stuck pages could not be unmapped after a failure. Map and Close try again.
	Stuck int
	// Suspended mapped pages have no memory until Resume.
	Suspended int
}

// Stats returns the range's numbers now.
func (s *Sparse) Stats() SparseStats { return SparseStats(s.r.Numbers()) }

// PageState is what a page of a range is to its user.
type PageState int

// The states of a page.
const (
	PageHole      = PageState(pages.Hole)
	PageFreed     = PageState(pages.Freed)  // a hole, under which a page lies yet
	PageMapped    = PageState(pages.Mapped) // nowhere else
	PageShared    = PageState(pages.Shared) // mapped, and at other places, too
	PageStuck     = PageState(pages.Stuck)  // could not be unmapped after a failure
	PageSuspended = PageState(pages.Away)   // mapped, and without memory until Resume
)

// String returns "hole", "freed", "mapped", "shared", "stuck" or "suspended".
func (s PageState) String() string {
	names := [...]string{"hole", "freed", "mapped", "shared", "stuck", "suspended"}
	if s < 0 || int(s) >= len(names) {
		return fmt.Sprintf("PageState(%d)", int(s))
	}
	return names[s]
}

// States returns the state of each page of the range now, for a picture of it.
func (s *Sparse) States() []PageState {
	in := s.r.States()
	all := make([]PageState, len(in))
	for i, st := range in {
		all[i] = PageState(st)
	}
	return all
}

// Map maps pages where the spans have holes: all of them, or none. Pages that are mapped
// already stay. on is the stream whose later work uses them first, which the caller orders all
// other use behind; nil stands for any stream. Contents are undefined, unless the source zeroes
// its pages, on that stream.
//
// A page that work of the same stream was to use last is taken at once. Others are taken when
// the GPU has passed them, and if that is not enough new ones are made. Map waits for the GPU,
// until ctx ends, only where a hole still has a page of another stream under it. Where there is
// no memory it has the owners of the budget free some, also in ranges of the same source, and
// tries again once; if ctx has a deadline, it tries until then. On a stream that captures a graph
// it returns ErrCapturing, unless all pages are mapped already.
func (s *Sparse) Map(ctx context.Context, on *cuda.Stream, spans ...Span) error {
	const op = "vmm.Sparse.Map"
	in, err := s.inner(op)
	if err != nil {
		return err
	}
	if ctx == nil {
		return errNilContext(op)
	}
	return in.Map(ctx, op, on, spansOf(spans))
}

// Unmap waits for all work that could use the range (see the package documentation), and makes
// holes of the spans. What is a hole already stays one. When ctx ends first nothing has
// changed. An error of the driver, which only a range with a null page returns, says that this
// page is not under all of the holes yet: holes they are, and the next Map, Unmap or Close tries again.
func (s *Sparse) Unmap(ctx context.Context, spans ...Span) error {
	const op = "vmm.Sparse.Unmap"
	in, err := s.inner(op)
	if err != nil {
		return err
	}
	if ctx == nil {
		return errNilContext(op)
	}
	return in.Unmap(ctx, op, spansOf(spans))
}

// UnmapAfter makes holes of the spans at once, and frees their pages when the work that is on
// the streams now is done. It never waits, and makes no driver call for a stream that only this
// library can reach. Without a stream it returns ErrInvalidArgument, and with one that captures
// a graph ErrCapturing; then nothing has changed. What is a hole already stays one.
func (s *Sparse) UnmapAfter(streams []*cuda.Stream, spans ...Span) error {
	const op = "vmm.Sparse.UnmapAfter"
	in, err := s.inner(op)
	if err != nil {
		return err
	}
	if len(streams) == 0 {
		return errs.Invalid(op, "no streams", "name the streams whose work uses the pages, or use Unmap, which waits for all of it")
	}
	of := make([]*core.Stream, len(streams))
	for i, st := range streams {
		if of[i] = core.StreamOf(st); of[i] == nil {
			return errs.NilStream(op)
		}
	}
	return in.UnmapAfter(op, of, spansOf(spans))
}

// Share maps pages of another range of the same source, or of this one, once more: those of the
// spans, in their order, one behind the other from page at on, which must be holes. All of them
// are mapped, or none. A page has a count of the places that use it, and is free when the last
// one is unmapped: whoever unmaps it names the streams that used it there. All places see what
// is written through one. Share waits for the GPU, until ctx ends, only where a hole still has a
// page under it.
func (s *Sparse) Share(ctx context.Context, from *Sparse, at int, spans ...Span) error {
	const op = "vmm.Sparse.Share"
	in, err := s.inner(op)
	if err != nil {
		return err
	}
	if ctx == nil {
		return errNilContext(op)
	}
	other, err := from.inner(op)
	if err != nil {
		return err
	}
	return in.Share(ctx, op, other, spansOf(spans), at)
}

// Replace gives a page that other places use, too, memory of its own, with the same bytes, so
// that it can be written. A page that no other place uses stays as it is. The bytes are copied
// behind the work that is on the stream, or of no stream if it is nil, and no work may write
// the page meanwhile. Replace waits for the copy, and then for all work that could use the range
// (see the package documentation), since an address cannot change under work that runs. After an
// error, and when ctx ends first, nothing has changed, unless the error says that the page is a
// hole now. On a stream that captures a graph it returns ErrCapturing.
func (s *Sparse) Replace(ctx context.Context, on *cuda.Stream, page int) error {
	const op = "vmm.Sparse.Replace"
	in, err := s.inner(op)
	if err != nil {
		return err
	}
	if ctx == nil {
		return errNilContext(op)
	}
	return in.Replace(ctx, op, on, page)
}

func spansOf(all []Span) []pages.Span {
	in := make([]pages.Span, len(all))
	for i, s := range all {
		in[i] = pages.Span(s)
	}
	return in
}

// Close waits for all work that could use the range (see the package documentation), unmaps its
// pages, which its source keeps for other ranges, and gives the addresses back. It is
// idempotent, and after an error it may be called again.
func (s *Sparse) Close() error {
	const op = "vmm.Sparse.Close"
	in, err := s.inner(op)
	if err != nil {
		return err
	}
	return in.Closer.Close(func() error {
		if err := in.Wait(op); err != nil {
			return err
		}
		return s.teardown(op, true)
	})
}

// CloseAfter takes the range out of use at once, and unmaps its pages when the work that is on
// the streams now is done. It never blocks. Without a stream it returns ErrInvalidArgument, and
// with one that captures a graph ErrCapturing; then nothing has changed.
func (s *Sparse) CloseAfter(streams ...*cuda.Stream) error {
	const op = "vmm.Sparse.CloseAfter"
	in, err := s.inner(op)
	if err != nil {
		return err
	}
	sys := in.System()
	return life.CloseAfter(&in.Closer, sys,
		func() (*core.Fence, error) { return core.FenceOf(sys, op, streams) },
		func() error { return s.teardown(op, false) })
}

// Released returns the completion of the range's closing.
func (s *Sparse) Released() cuda.Completion { return s.r.Closer.Completion() }

func (s *Sparse) teardown(op string, wait bool) error {
	if err := s.r.Teardown(op, wait); err != nil {
		return err
	}
	s.watched.Stop()
	return nil
}
