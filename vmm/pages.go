package vmm

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/cuvmm/cuvmm/cuda"
	"github.com/cuvmm/cuvmm/internal/budget"
	"github.com/cuvmm/cuvmm/internal/core"
	"github.com/cuvmm/cuvmm/internal/driver"
	"github.com/cuvmm/cuvmm/internal/errs"
	"github.com/cuvmm/cuvmm/internal/life"
	"github.com/cuvmm/cuvmm/internal/limits"
	"github.com/cuvmm/cuvmm/internal/memspec"
	"github.com/cuvmm/cuvmm/internal/pages"
	"github.com/cuvmm/cuvmm/internal/phys"
)

// Pages is a source of pages, physical memory of one size, for the sparse ranges of a device.
// It makes pages when they are needed, and recycles those that a range unmaps once the GPU has
// passed their last use. All methods are safe for concurrent use. If the Pages is nil or was
// not made by NewPages, methods that return an error return ErrInvalidArgument.
type Pages struct {
	s       *pages.Source
	dev     *cuda.Device
	watched life.Watched
}

// PagesOptions describe the pages of a source. The zero value is pages of the granularity, in
// the device's memory.
type PagesOptions struct {
	// Page is the size of a page in bytes, a multiple of the granularity; 0 is the
	// granularity. A page of 16 MiB is made, mapped and unmapped in the time of one of 2 MiB,
	// so larger pages are cheaper by the byte.
	Page int
	// Memory describes the memory of the pages, which is never shared with other processes.
	Memory Properties
	// Low and High are how many free pages the source has ready: when it has fewer than Low, a
	// goroutine makes pages until there are High, or Low if that is more, so that Map need not
	// make them. It makes none while a stream captures, nor within a second after memory was
	// given back because others lacked some, and stops where there is no memory.
	Low, High int
	// Idle is how long free pages beyond High stay that nobody needs: a goroutine gives back
	// those that were free for that long. 0 is ten seconds, and a negative one means that they
	// stay until Trim. All free pages go if the device or the budget lacks memory.
	Idle time.Duration
	// Zero has every page zeroed when it is mapped. Otherwise a page holds what its last user
	// left, which may be another tenant of the program.
	Zero bool
	// Budget limits the memory of the pages. A page counts once, however many ranges share it.
	// What the budget has no room for is refused with cuda.ErrBudget, after the functions of
	// its OnPressure were called. nil is no limit.
	Budget *cuda.Budget
	// Name is what errors call the source. Names need not differ. A name has at most 128 bytes
	// of printable UTF-8, without spaces at its ends.
	Name string
	// Tag is the group that the source belongs to.
	Tag cuda.Tag
}

// NewPages makes a source. It takes no memory yet. The caller closes it after the ranges that
// use it.
func NewPages(d *cuda.Device, o PagesOptions) (*Pages, error) {
	p, err := newPages("vmm.NewPages", d, o)
	if err != nil {
		return nil, err
	}
	p.s.Watch(&p.watched)
	return p, nil
}

func newPages(op string, d *cuda.Device, o PagesOptions) (*Pages, error) {
	label := life.Label{Name: o.Name, Tag: string(o.Tag)}
	if err := label.Check(op); err != nil {
		return nil, err
	}
	within, err := budget.Of(op, o.Budget)
	if err != nil {
		return nil, err
	}
	prop, gran, err := o.Memory.resolve(op, d)
	if err != nil {
		return nil, err
	}
	unit, err := addressUnit(op, d, gran)
	if err != nil {
		return nil, err
	}
	if o.Page == 0 {
		o.Page = int(unit)
	}
	if err := memspec.CheckSize(op, o.Page, unit); err != nil {
		return nil, err
	}
	if _, err := core.ContextOf(op, d); err != nil {
		return nil, err
	}
	if o.Low < 0 || o.High < 0 {
		return nil, errs.Invalid(op, fmt.Sprintf("marks of %d and %d pages", o.Low, o.High), "use 0 or more")
	}
	if o.Idle == 0 {
		o.Idle = idlePages
	}
	in := pages.Options{Memory: prop, Page: uint64(o.Page), Chosen: memspec.Granularity(o.Memory.Granularity), Zero: o.Zero, Low: o.Low, High: max(o.High, o.Low), Idle: o.Idle}
	in.Make = func(op string, s *pages.Source, n int, patient bool) ([]*phys.Handle, error) {
		if patient {
			return makePages(op, d, s, n, phys.Create)
		}
		return makePages(op, d, s, n, phys.TryCreate)
	}
	in.Remaining = func(op string) (uint64, error) { return remaining(op, d, prop.Location) }
	return &Pages{s: pages.NewSource(core.SystemOf(d), in, within, label), dev: d}, nil
}

// idlePages is how long free pages stay by default.
const idlePages = 10 * time.Second

// creator makes physical memory: phys.Create or phys.TryCreate.
type creator func(*core.System, uint64, driver.AllocationProp, *budget.Account) (*phys.Handle, driver.Result, error)

// makePages creates n pages, or none.
func makePages(op string, d *cuda.Device, s *pages.Source, n int, create creator) (made []*phys.Handle, err error) {
	for range n {
		h, res, short := create(s.System(), s.Page, s.Memory, s.Account)
		if short != nil || res != driver.Success {
			err := createError(op, s.Called(), d, int(s.Page), uint64(n)*s.Page, uint64(len(made))*s.Page, s.Memory, res, short)
			return nil, phys.Abandon(op, err, made...)
		}
		made = append(made, h)
	}
	return made, nil
}

// inner returns the inner state, or an error for a Pages that no function made.
func (p *Pages) inner(op string) (*pages.Source, error) {
	if p == nil || p.s == nil {
		return nil, errs.Invalid(op, "a nil source of pages", "make one with NewPages")
	}
	return p.s, nil
}

// Page returns the size of a page in bytes.
func (p *Pages) Page() int { return int(p.s.Page) }

// Device returns the device that the source was made on.
func (p *Pages) Device() *cuda.Device { return p.dev }

// Requested returns the properties that the pages are created with, every default resolved.
func (p *Pages) Requested() Properties { return properties(p.s.Memory, Granularity(p.s.Chosen)) }

// Name returns the name that the source was given, if any.
func (p *Pages) Name() string { return p.s.Label().Name }

// Tag returns the tag that the source was given, if any.
func (p *Pages) Tag() cuda.Tag { return cuda.Tag(p.s.Label().Tag) }

// PagesStats are the numbers of a source, in pages.
type PagesStats struct {
	// Pages are all that the source has. Used of them are mapped and in use, each once,
	// however many ranges share it. The others are free.
	Pages, Used int
	// Waiting free pages have work behind them that the GPU had not passed when the source
	// last asked.
	Waiting int
	// Made counts pages that were created, Returned those that were given back to the driver,
	// Recycled those that went to another place, and Reused those that were mapped again where
	// they lay, which takes no driver call.
	Made, Returned, Recycled, Reused int
}

// Stats returns the source's numbers now.
func (p *Pages) Stats() PagesStats {
	s := p.s.Stats()
	return PagesStats{Pages: s.Pages, Used: s.Used, Waiting: s.Waiting, Made: s.Made, Returned: s.Returned, Recycled: s.Recycled, Reused: s.Reused}
}

// Trim gives free pages that the GPU has passed back to the driver: at least need bytes if
// there are so many, or all if need is 0. It returns how many bytes it gave back, and does not
// wait for the GPU.
func (p *Pages) Trim(need int) (freed int, err error) {
	const op = "vmm.Pages.Trim"
	in, err := p.inner(op)
	if err != nil {
		return 0, err
	}
	switch {
	case need < 0:
		return 0, errs.Invalid(op, fmt.Sprintf("%d bytes", need), "use a size in bytes, or 0 for all")
	case need == 0:
		need = memspec.MaxBytes
	}
	if !in.Closer.Acquire() {
		return 0, errs.ClosedError(op, in.Title())
	}
	defer in.Closer.Release()
	n, err := in.Trim(op, uint64(need))
	return int(n), err
}

// Fill makes pages until one more would leave less than headroom bytes of memory free, or exceed
// the budget, and returns how many free pages the source has then. If less is free already it
// gives free pages back. What is free is what the driver says, or the limit of the control group
// (Device.MemoryLimit) if that has less; for pages on the host it is the kernel's estimate, or the
// limit of a control group.
//
// The pages are for later calls of Map, which need make none. They stay, whatever
// PagesOptions.Idle says, until Trim gives them back, or the device or the budget lacks memory.
// When ctx ends Fill returns, and what it has made goes as other free pages do.
func (p *Pages) Fill(ctx context.Context, headroom int) (free int, err error) {
	const op = "vmm.Pages.Fill"
	in, err := p.inner(op)
	switch {
	case err != nil:
		return 0, err
	case ctx == nil:
		return 0, errNilContext(op)
	case headroom < 0:
		return 0, errs.Invalid(op, fmt.Sprintf("a headroom of %d bytes", headroom), "use a size in bytes, or 0 for none")
	}
	if !in.Closer.Acquire() {
		return 0, errs.ClosedError(op, in.Title())
	}
	defer in.Closer.Release()
	err = in.Fill(ctx, op, uint64(headroom))
	st := in.Stats()
	return st.Pages - st.Used, err
}

// remaining returns how much memory can be taken at a location.
func remaining(op string, d *cuda.Device, at driver.Location) (uint64, error) {
	if at.Type != driver.LocationDevice {
		h, err := limits.OfHost()
		l, known := h.Tightest()
		if !known {
			return 0, errors.Join(errs.New(errs.Failure{Op: op, Kind: errs.NotSupported, Asked: "the free memory of the host, which is not known here",
				Hint: "map as many pages as the program is to have"}), err)
		}
		return l.Remaining(), nil
	}
	on, err := d.System().Device(int(at.ID))
	if err != nil {
		return 0, err
	}
	free, _, err := on.MemoryInfo()
	if err != nil {
		return 0, err
	}
	if l, limited, err := on.MemoryLimit(); err == nil && limited { // a file that makes no sense limits nothing
		free = min(free, l.Remaining())
	}
	return uint64(free), nil
}

// Close gives all pages back. While a range uses the source it returns ErrInUse, and the source
// stays open. It is idempotent, and after an error it may be called again.
func (p *Pages) Close() error {
	const op = "vmm.Pages.Close"
	in, err := p.inner(op)
	if err != nil {
		return err
	}
	if err := in.Close(op, true); err != nil {
		return err
	}
	p.watched.Stop()
	return nil
}

// Released returns the completion of the source's closing.
func (p *Pages) Released() cuda.Completion { return p.s.Closer.Completion() }
