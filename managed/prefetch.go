package managed

import (
	"fmt"

	"github.com/cuvmm/cuvmm/cuda"
	"github.com/cuvmm/cuvmm/internal/core"
	"github.com/cuvmm/cuvmm/internal/driver"
	"github.com/cuvmm/cuvmm/internal/errs"
	"github.com/cuvmm/cuvmm/internal/osmem"
)

// Prefetch moves the range to a place, as work on the stream; without one it
// returns when that is done. A range that is read mostly gets a copy there. What
// the place has no room for stays where it is, and the driver does not say so.
// While the stream captures a graph it is ErrCapturing: no graph can hold a
// prefetch.
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
		err = p.supported(op, m)
	}
	if err != nil {
		return err
	}
	return m.on(op, s, func(st *core.Stream) error { return r.prefetch(op, st, p) })
}

// prefetch asks the driver, in the form that it has.
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

// Discard drops the contents of the range, as work on the stream. What is read
// before the next write is undefined; every write that is ordered behind the
// discard is kept. The pages lie on the stream's device afterwards: Discard is a
// [Range.DiscardPrefetch] there, which the package explains, and LastPrefetch
// reports it. A page that the range shares with bytes outside of it keeps its
// contents and its place, so a range smaller than a page may lose nothing.
//
// Without a stream Discard returns when that is done. It returns
// ErrInvalidArgument for the legacy default stream, ErrCapturing while the stream
// captures a graph, ErrInUse while Host runs on the memory, and ErrNotSupported
// with a driver before CUDA 13.0 or if any device has no concurrent managed
// access.
func (r Range) Discard(s *cuda.Stream) error {
	return submit("managed.Range.Discard", s, []Range{r}, nil, kindDiscard, true)
}

// DiscardPrefetch is Discard with another place for the pages, in one call of the
// driver. Pages that Discard leaves alone move there with their contents.
func (r Range) DiscardPrefetch(s *cuda.Stream, to cuda.Location) error {
	return submit("managed.Range.DiscardPrefetch", s, []Range{r}, []cuda.Location{to}, kindDiscardPrefetch, true)
}

// PrefetchBatch prefetches several ranges in one call, to one location for all or
// to one for each. Its rules are those of Range.Prefetch, but that the legacy
// default stream is refused. All ranges are of one System, none is a hint's, and
// at least one is there: that is checked before anything is done. With a driver
// before CUDA 13.0, or where a device has no concurrent managed access, it is one
// call for each.
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

// batchKind is what a batch does.
type batchKind int

const (
	kindPrefetch batchKind = iota
	// kindDiscard takes no locations: pages go to the stream's device.
	kindDiscard
	kindDiscardPrefetch
)

func (k batchKind) discards() bool { return k != kindPrefetch }

// call is the driver's entry point. Its plain discard, cuMemDiscardBatchAsync, is
// not used: on a busy stream it is not ordered with what is submitted behind it,
// and loses what that writes.
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

func submit(op string, s *cuda.Stream, ranges []Range, to []cuda.Location, k batchKind, hints bool) error {
	for i, r := range ranges {
		if err := r.acquire(op); err != nil {
			return member(i, len(ranges), err)
		}
		defer r.release()
	}
	m := ranges[0].h.m
	for i, r := range ranges {
		switch o := r.h.m; {
		case o.sys != m.sys:
			return member(i, len(ranges), errs.ForeignError(op, "range"))
		case o.kind == hinted && !hints:
			return member(i, len(ranges), errs.Invalid(op, r.asked("a hint"), "only managed memory can be in a batch"))
		}
	}
	places, err := m.places(op, to)
	if err == nil {
		err = checkStream(op, m.sys, s)
	}
	if err != nil {
		return err
	}
	if s != nil && core.StreamOf(s).IsLegacy() {
		return errs.Invalid(op, "the legacy default stream", "the driver takes batches and discards on streams that were created")
	}
	if m.kind == hinted {
		return m.on(op, s, func(*core.Stream) error { return nil })
	}
	for i, p := range places {
		if err := p.supported(op, m); err != nil {
			return member(i, len(to), err)
		}
	}
	if k.discards() {
		if !m.sys.Drv.Has(k.call()) {
			return m.ctx.CallError(op, k.call(), driver.MissingEntryPoint, errs.Count(len(ranges), "range"))
		}
		if err := m.allConcurrent(op); err != nil {
			return err
		}
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
		// First what loses nothing, in case the second call fails.
		inner, edges := cut(ranges, to)
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

// prefetchAll is one call where the driver has it.
func (m *memory) prefetchAll(op string, st *core.Stream, ranges []Range, to []place) error {
	if !m.sys.Drv.Has(driver.CallMemPrefetchBatchAsync) || m.allConcurrent(op) != nil {
		return each(op, st, ranges, to)
	}
	return send(op, st, ranges, to, kindPrefetch)
}

// parts are of ranges, each with its range's place.
type parts struct {
	ranges []Range
	to     []place
}

// add adds what lies between two addresses of a range.
func (p *parts) add(r Range, from, until uint64, to place) {
	if from < until {
		p.ranges = append(p.ranges, Range{r.h, r.off + from - uint64(r.Ptr()), until - from})
		p.to = append(p.to, to)
	}
}

// cut parts ranges into the whole pages inside of them, which may be discarded,
// and the edges that share a page with other bytes, which must not: the driver
// works on pages.
func cut(ranges []Range, places []place) (inner, edges parts) {
	page := osmem.PageSize()
	for i, r := range ranges {
		to := places[min(i, len(places)-1)]
		start, end := uint64(r.Ptr()), uint64(r.Ptr())+r.n
		lo, hi := (start+page-1)/page*page, end/page*page
		if m := r.h.m; m.kind == owned && r.off+r.n == m.size {
			hi = (end + page - 1) / page * page // the rest of the page is nobody's
		}
		hi = max(lo, hi)
		inner.add(r, lo, hi, to)
		edges.add(r, start, min(lo, end), to)
		edges.add(r, hi, end, to)
	}
	return inner, edges
}

// member names the range of a batch that an error is about.
func member(i, n int, err error) error {
	if n == 1 {
		return err
	}
	return fmt.Errorf("range %d of %d: %w", i, n, err)
}

// places are the locations, none of which could never work.
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

// exclude keeps the CPU off the ranges while something is submitted that leaves
// their contents undefined. The lock of a memory is taken once for each range.
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

// each prefetches one range after the other.
func each(op string, st *core.Stream, ranges []Range, to []place) error {
	for i, r := range ranges {
		if err := r.prefetch(op, st, to[min(i, len(to)-1)]); err != nil {
			return member(i, len(ranges), err)
		}
	}
	return nil
}

// send makes the one call. Equal locations of neighbours are sent once.
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
