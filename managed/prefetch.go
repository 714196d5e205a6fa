package managed

import (
	"fmt"

	"github.com/cuvmm/cuvmm/cuda"
	"github.com/cuvmm/cuvmm/internal/core"
	"github.com/cuvmm/cuvmm/internal/driver"
	"github.com/cuvmm/cuvmm/internal/errs"
	"github.com/cuvmm/cuvmm/internal/host"
)

// Prefetch moves the range to a location, as work on the stream; without one it returns
// when that is done. A range that is read mostly gets a copy there. Pages for which the
// location has no memory stay where they are, and the driver does not report it. While
// the stream captures a graph it returns ErrCapturing: no graph can contain a prefetch.
func (r Range) Prefetch(s *cuda.Stream, to cuda.Location) error {
	const op = "managed.Range.Prefetch"
	if err := r.acquire(op); err != nil {
		return err
	}
	defer r.release()
	m := r.h.m
	p, err := m.checkPlace(op, to, false)
	if err == nil {
		err = checkStream(op, m.sys, s)
	}
	if err == nil {
		err = m.prefetches(op, s)
	}
	if err == nil {
		err = p.supported(op, m)
	}
	if err != nil {
		return err
	}
	return m.on(op, s, func(st *core.Stream) error { return r.prefetch(op, st, p) })
}

// prefetch calls the entry point that the driver has.
func (r Range) prefetch(op string, st *core.Stream, to place) error {
	m := r.h.m
	if m.kind == hinted {
		return nil
	}
	call := driver.CallMemPrefetchAsync
	var res driver.Result
	if m.sys.Drv.Has(call) {
		res = m.sys.Drv.MemPrefetchAsync(st.Ctx.Handle, driver.Ptr(r.Ptr()), r.n, to.Location, st.Handle)
	} else {
		call = driver.CallMemPrefetchAsyncV1
		res = m.sys.Drv.MemPrefetchAsyncV1(st.Ctx.Handle, driver.Ptr(r.Ptr()), r.n, ordinal(to.Location), st.Handle)
	}
	if res != driver.Success {
		return st.Ctx.CallError(op, call, res, r.asked(fmt.Sprintf("prefetch to %v, on stream %#x,", to.asked, uintptr(st.Handle))))
	}
	return nil
}

// Discard drops the contents of the range, as work on the stream. Reads before the next
// write return undefined data; every write that is ordered behind the discard is kept.
// Afterwards the pages are on the stream's device: Discard is a [Range.DiscardPrefetch]
// there (see the package documentation), and LastPrefetch reports it. A page that the
// range shares with bytes outside it keeps its contents and location, so discarding a
// range smaller than a page may have no effect.
//
// Without a stream Discard returns when that is done. It returns
// ErrInvalidArgument for the legacy default stream, ErrCapturing while the stream
// captures a graph, ErrInUse while Host runs on the memory, and ErrNotSupported
// with a driver before CUDA 13.0 or if any device has no concurrent managed
// access.
func (r Range) Discard(s *cuda.Stream) error {
	return submit("managed.Range.Discard", s, []Range{r}, nil, kindDiscard, true)
}

// DiscardPrefetch is Discard with another location for the pages, in one driver call.
// Pages that Discard does not drop move there with their contents.
func (r Range) DiscardPrefetch(s *cuda.Stream, to cuda.Location) error {
	return submit("managed.Range.DiscardPrefetch", s, []Range{r}, []cuda.Location{to}, kindDiscardPrefetch, true)
}

// PrefetchBatch prefetches several ranges in one call, to one location for all or one for
// each. Its rules are those of Range.Prefetch, except that it refuses the legacy default
// stream. It first checks that there is at least one range, that all are of one System,
// and that none is of memory that is not managed. With a driver before CUDA 13.0, or if a
// device has no concurrent managed access, it makes one call for each.
func PrefetchBatch(s *cuda.Stream, ranges []Range, to ...cuda.Location) error {
	return batch("managed.PrefetchBatch", s, ranges, to, kindPrefetch)
}

// DiscardBatch discards several ranges in one call, under the rules of
// Range.Discard and PrefetchBatch.
func DiscardBatch(s *cuda.Stream, ranges []Range) error {
	return batch("managed.DiscardBatch", s, ranges, nil, kindDiscard)
}

// DiscardPrefetchBatch discards several ranges and prefetches them, in one call,
// under the rules of Range.Discard and PrefetchBatch.
func DiscardPrefetchBatch(s *cuda.Stream, ranges []Range, to ...cuda.Location) error {
	return batch("managed.DiscardPrefetchBatch", s, ranges, to, kindDiscardPrefetch)
}

// batchKind is the operation of a batch.
type batchKind int

const (
	kindPrefetch batchKind = iota
	// kindDiscard has no locations: pages move to the stream's device.
	kindDiscard
	kindDiscardPrefetch
)

func (k batchKind) discards() bool { return k != kindPrefetch }

// call returns the driver's entry point. The driver's plain discard,
// cuMemDiscardBatchAsync, is not used: on a busy stream it is not ordered with later work
// and loses its writes.
func (k batchKind) call() driver.Call {
	if k.discards() {
		return driver.CallMemDiscardAndPrefetchBatchAsync
	}
	return driver.CallMemPrefetchBatchAsync
}

func batch(op string, s *cuda.Stream, ranges []Range, to []cuda.Location, k batchKind) error {
	if len(ranges) == 0 {
		return errs.Invalid(op, "no ranges", "name at least one")
	}
	if k != kindDiscard && len(to) != 1 && len(to) != len(ranges) {
		return errs.Invalid(op, fmt.Sprintf("%s for %s", errs.Count(len(to), "location"), errs.Count(len(ranges), "range")), "name one for all, or one for each")
	}
	return submit(op, s, ranges, to, k, false)
}

// submit checks the ranges and locations, and submits the operation. hints allows memory
// that is not managed, on which nothing is done.
func submit(op string, s *cuda.Stream, ranges []Range, to []cuda.Location, k batchKind, hints bool) error {
	for i, r := range ranges {
		if err := r.acquire(op); err != nil {
			return member(i, len(ranges), err)
		}
		defer r.release()
	}
	m := ranges[0].h.m
	places, err := m.checkBatch(op, s, ranges, to, hints)
	if err != nil {
		return err
	}
	if m.kind == hinted {
		return m.on(op, s, func(*core.Stream) error { return nil })
	}
	switch {
	case !k.discards():
		err = m.prefetches(op, s)
	case !m.sys.Drv.Has(k.call()):
		err = m.ctx.CallError(op, k.call(), driver.MissingEntryPoint, errs.Count(len(ranges), "range"))
	default:
		err = m.allConcurrent(op)
	}
	if err != nil {
		return err
	}
	for i, p := range places {
		if err := p.supported(op, m); err != nil {
			return member(i, len(to), err)
		}
	}
	if k.discards() {
		unlock, err := exclude(op, ranges)
		if err != nil {
			return err
		}
		defer unlock()
	}
	return m.on(op, s, func(st *core.Stream) error {
		if !k.discards() {
			return m.prefetchAll(op, st, ranges, places)
		}
		to := places
		if k == kindDiscard {
			to = []place{{Location: driver.Location{Type: driver.LocationDevice, ID: int32(st.Ctx.Device)}}}
		}
		// First the call that drops nothing, in case the second fails.
		inner, edges := splitPages(ranges, to)
		if k != kindDiscard && len(edges.ranges) > 0 {
			if err := m.prefetchAll(op, st, edges.ranges, edges.to); err != nil {
				return err
			}
		}
		if len(inner.ranges) == 0 {
			return nil
		}
		return send(op, st, inner.ranges, inner.to, k)
	})
}

// checkBatch refuses ranges, locations and streams that no driver accepts.
func (m *memory) checkBatch(op string, s *cuda.Stream, ranges []Range, to []cuda.Location, hints bool) ([]place, error) {
	for i, r := range ranges {
		switch o := r.h.m; {
		case o.sys != m.sys:
			return nil, member(i, len(ranges), errs.ForeignError(op, "range"))
		case o.kind == hinted && !hints:
			return nil, member(i, len(ranges), errs.Invalid(op, r.asked("memory that is not managed"), "only managed memory can be in a batch"))
		}
	}
	places, err := m.places(op, to)
	if err == nil {
		err = checkStream(op, m.sys, s)
	}
	if err == nil && s != nil && core.StreamOf(s).IsLegacy() {
		err = errs.Invalid(op, "the legacy default stream", "the driver accepts batches and discards on streams that were created")
	}
	return places, err
}

// prefetchAll makes one call if the driver has it, and otherwise one for each range.
func (m *memory) prefetchAll(op string, st *core.Stream, ranges []Range, to []place) error {
	if !m.sys.Drv.Has(driver.CallMemPrefetchBatchAsync) || m.allConcurrent(op) != nil {
		return each(op, st, ranges, to)
	}
	return send(op, st, ranges, to, kindPrefetch)
}

// parts are parts of ranges, each with its range's location.
type parts struct {
	ranges []Range
	to     []place
}

// add adds the part between two addresses of a range.
func (p *parts) add(r Range, from, until uint64, to place) {
	if from < until {
		p.ranges = append(p.ranges, Range{r.h, r.off + from - uint64(r.Ptr()), until - from})
		p.to = append(p.to, to)
	}
}

// splitPages splits ranges into the whole pages inside them, which may be discarded, and
// the edges that share a page with other bytes, which must not be: the driver works on
// pages.
func splitPages(ranges []Range, places []place) (inner, edges parts) {
	page := host.PageSize()
	for i, r := range ranges {
		to := places[min(i, len(places)-1)]
		start, end := uint64(r.Ptr()), uint64(r.Ptr())+r.n
		lo, hi := (start+page-1)/page*page, end/page*page
		if m := r.h.m; m.kind == owned && r.off+r.n == m.size {
			hi = (end + page - 1) / page * page // no other memory shares the last page
		}
		hi = max(lo, hi)
		inner.add(r, lo, hi, to)
		edges.add(r, start, min(lo, end), to)
		edges.add(r, hi, end, to)
	}
	return inner, edges
}

// member adds to an error the range of a batch that it concerns.
func member(i, n int, err error) error {
	if n == 1 {
		return err
	}
	return fmt.Errorf("range %d of %d: %w", i, n, err)
}

// places converts the locations, and refuses those that no driver accepts.
func (m *memory) places(op string, to []cuda.Location) ([]place, error) {
	places := make([]place, len(to))
	for i, l := range to {
		var err error
		if places[i], err = m.checkPlace(op, l, false); err != nil {
			return nil, member(i, len(to), err)
		}
	}
	return places, nil
}

// exclude excludes Host functions on the ranges while work is submitted that makes their
// contents undefined. It locks a memory once for each of its ranges.
func exclude(op string, ranges []Range) (unlock func(), err error) {
	locked := 0
	unlock = func() {
		for _, r := range ranges[:locked] {
			r.h.m.host.RUnlock()
		}
	}
	for _, r := range ranges {
		if !r.h.m.host.TryRLock() {
			unlock()
			return nil, errs.New(errs.Failure{Op: op, Kind: errs.InUse, Asked: r.asked("Host works on memory"),
				Hint: "discard when its function has returned"})
		}
		locked++
	}
	return unlock, nil
}

// each makes one call for each range.
func each(op string, st *core.Stream, ranges []Range, to []place) error {
	for i, r := range ranges {
		if err := r.prefetch(op, st, to[min(i, len(to)-1)]); err != nil {
			return member(i, len(ranges), err)
		}
	}
	return nil
}

// send makes one call for all ranges. Equal locations of adjacent ranges are sent once.
func send(op string, st *core.Stream, ranges []Range, to []place, k batchKind) error {
	ptrs, sizes := make([]driver.Ptr, len(ranges)), make([]uint64, len(ranges))
	for i, r := range ranges {
		ptrs[i], sizes[i] = driver.Ptr(r.Ptr()), r.n
	}
	var locations []driver.Location
	var first []uint64
	for i, p := range to {
		if i == 0 || p.Location != locations[len(locations)-1] {
			locations, first = append(locations, p.Location), append(first, uint64(i))
		}
	}
	drv := st.Ctx.System().Drv
	move := drv.MemPrefetchBatchAsync
	if k.discards() {
		move = drv.MemDiscardAndPrefetchBatchAsync
	}
	if res := move(st.Ctx.Handle, ptrs, sizes, locations, first, st.Handle); res != driver.Success {
		return st.Ctx.CallError(op, k.call(), res, fmt.Sprintf("%s from %s", errs.Count(len(ranges), "range"), ranges[0].asked("one")))
	}
	return nil
}
