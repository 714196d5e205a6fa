package managed

import (
	"fmt"

	"github.com/cuvmm/cuvmm/cuda"
	"github.com/cuvmm/cuvmm/internal/core"
	"github.com/cuvmm/cuvmm/internal/driver"
	"github.com/cuvmm/cuvmm/internal/osmem"
)

// Prefetch moves the range to a place, as work on the stream; without one it
// returns when that is done. A range that is read mostly gets a copy there. What
// the place has no room for stays where it is, and the driver does not say so.
// While the stream captures a graph it is ErrCapturing: no graph can hold a
// prefetch.
func (r Range) Prefetch(s *cuda.Stream, to cuda.Location) error {
	const op = "managed.Range.Prefetch"
	if err := r.hold(op); err != nil {
		return err
	}
	defer r.drop()
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
		return st.Ctx.Fail(op, call, res, r.asked(fmt.Sprintf("prefetch to %v, on stream %#x,", to.asked, uintptr(st.Handle))))
	}
	return nil
}

// Discard says, as work on the stream, that nobody needs what is in the range.
// What is read before the next write is undefined. A page that the range shares
// with bytes outside of it keeps its contents, so of a range smaller than a page
// nothing may be discarded. Without a stream it returns when that is done. The
// legacy default stream is refused, and a stream that captures a graph is
// ErrCapturing. It is ErrInUse while Host runs on the memory, and
// ErrNotSupported with a driver before CUDA 13.0, or where a device has no
// concurrent managed access.
func (r Range) Discard(s *cuda.Stream) error {
	return discard("managed.Range.Discard", s, []Range{r}, nil, kindDiscard)
}

// DiscardPrefetch is Discard and then Prefetch, with less work for the driver:
// the pages come to the place without their contents, but for those that Discard
// leaves.
func (r Range) DiscardPrefetch(s *cuda.Stream, to cuda.Location) error {
	return discard("managed.Range.DiscardPrefetch", s, []Range{r}, []cuda.Location{to}, kindBoth)
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
	return batch("managed.DiscardPrefetchBatch", s, ranges, to, kindBoth)
}

// batchKind is what a batch does, by its driver call.
type batchKind driver.Call

const (
	kindPrefetch = batchKind(driver.CallMemPrefetchBatchAsync)
	kindDiscard  = batchKind(driver.CallMemDiscardBatchAsync)
	kindBoth     = batchKind(driver.CallMemDiscardAndPrefetchBatchAsync)
)

func (k batchKind) prefetches() bool { return k != kindDiscard }
func (k batchKind) discards() bool   { return k != kindPrefetch }

// discard is a batch of one, which a hint lets pass.
func discard(op string, s *cuda.Stream, one []Range, to []cuda.Location, k batchKind) error {
	return submit(op, s, one, to, k, true)
}

func batch(op string, s *cuda.Stream, ranges []Range, to []cuda.Location, k batchKind) error {
	if len(ranges) == 0 {
		return core.Invalid(op, "no ranges", "name at least one")
	}
	if k.prefetches() && len(to) != 1 && len(to) != len(ranges) {
		return core.Invalid(op, fmt.Sprintf("%s for %s", core.Count(len(to), "location"), core.Count(len(ranges), "range")), "name one for all, or one for each")
	}
	return submit(op, s, ranges, to, k, false)
}

func submit(op string, s *cuda.Stream, ranges []Range, to []cuda.Location, k batchKind, hints bool) error {
	for i, r := range ranges {
		if err := r.hold(op); err != nil {
			return member(i, len(ranges), err)
		}
		defer r.drop()
	}
	m := ranges[0].h.m
	for i, r := range ranges {
		switch o := r.h.m; {
		case o.sys != m.sys:
			return member(i, len(ranges), core.ForeignError(op, "range"))
		case o.kind == hinted && !hints:
			return member(i, len(ranges), core.Invalid(op, r.asked("a hint"), "only managed memory can be in a batch"))
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
		return core.Invalid(op, "the legacy default stream", "the driver takes batches and discards on streams that were created")
	}
	if m.kind == hinted {
		return m.on(op, s, func(*core.Stream) error { return nil })
	}
	for i, p := range places {
		if err := p.supported(op, m); err != nil {
			return member(i, len(to), err)
		}
	}
	if k.discards() && !m.sys.Drv.Has(driver.Call(k)) {
		return m.ctx.Fail(op, driver.Call(k), driver.MissingEntryPoint, core.Count(len(ranges), "range"))
	}
	if k.discards() {
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
		// First what loses nothing, in case the second call fails.
		inner, edges := cut(ranges, places)
		if k.prefetches() && len(edges.ranges) > 0 {
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

// parts are of ranges, each with its range's place, where there are any.
type parts struct {
	ranges []Range
	to     []place
}

// add adds what lies between two addresses of a range.
func (p *parts) add(r Range, from, until uint64, to []place) {
	if from < until {
		p.ranges = append(p.ranges, Range{r.h, r.off + from - uint64(r.Ptr()), until - from})
		p.to = append(p.to, to...)
	}
}

// cut parts ranges into the whole pages inside of them, which may be discarded,
// and the edges that share a page with other bytes, which must not: the driver
// works on pages.
func cut(ranges []Range, places []place) (inner, edges parts) {
	page := osmem.PageSize()
	for i, r := range ranges {
		var to []place
		if len(places) > 0 {
			to = places[min(i, len(places)-1):][:1]
		}
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
			return nil, core.Error(core.Failure{Op: op, Kind: core.InUse, Asked: r.asked("Host works on memory"),
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
	drv, c := st.Ctx.System().Drv, st.Ctx.Handle
	var res driver.Result
	switch k {
	case kindPrefetch:
		res = drv.MemPrefetchBatchAsync(c, ptrs, sizes, locations, first, st.Handle)
	case kindDiscard:
		res = drv.MemDiscardBatchAsync(c, ptrs, sizes, st.Handle)
	default:
		res = drv.MemDiscardAndPrefetchBatchAsync(c, ptrs, sizes, locations, first, st.Handle)
	}
	if res != driver.Success {
		return st.Ctx.Fail(op, driver.Call(k), res, fmt.Sprintf("%s from %s", core.Count(len(ranges), "range"), ranges[0].asked("one")))
	}
	return nil
}
