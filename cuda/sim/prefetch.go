package sim

import (
	"github.com/cuvmm/cuvmm/internal/driver"
	"github.com/cuvmm/cuvmm/internal/host"
)

// part is a range of managed memory that a call names, and where it is to go.
type part struct {
	addr, n uint64
	to      driver.Location
}

func (a *api) MemPrefetchAsync(c driver.Context, p driver.Ptr, n uint64, to driver.Location, h driver.Stream) driver.Result {
	return a.prefetch(driver.CallMemPrefetchAsync, c, p, n, to, h)
}

func (a *api) MemPrefetchAsyncV1(c driver.Context, p driver.Ptr, n uint64, device int32, h driver.Stream) driver.Result {
	return a.prefetch(driver.CallMemPrefetchAsyncV1, c, p, n, ofOrdinal(device), h)
}

func (a *api) prefetch(call driver.Call, c driver.Context, p driver.Ptr, n uint64, to driver.Location, h driver.Stream) driver.Result {
	s, r := a.enterStream(call, c, h)
	if r != driver.Success {
		return r
	}
	defer a.leave()
	if !s.context.device.concurrent() {
		return driver.InvalidDevice
	}
	return s.move(call, []part{{uint64(p), n, to}}, false)
}

func (a *api) MemPrefetchBatchAsync(c driver.Context, p []driver.Ptr, sizes []uint64, to []driver.Location, first []uint64, h driver.Stream) driver.Result {
	return a.batch(driver.CallMemPrefetchBatchAsync, c, p, sizes, to, first, h, false, true)
}

func (a *api) MemDiscardBatchAsync(c driver.Context, p []driver.Ptr, sizes []uint64, h driver.Stream) driver.Result {
	return a.batch(driver.CallMemDiscardBatchAsync, c, p, sizes, nil, nil, h, true, false)
}

func (a *api) MemDiscardAndPrefetchBatchAsync(c driver.Context, p []driver.Ptr, sizes []uint64, to []driver.Location, first []uint64, h driver.Stream) driver.Result {
	return a.batch(driver.CallMemDiscardAndPrefetchBatchAsync, c, p, sizes, to, first, h, true, true)
}

func (a *api) batch(call driver.Call, c driver.Context, p []driver.Ptr, sizes []uint64, to []driver.Location, first []uint64, h driver.Stream, discard, prefetch bool) driver.Result {
	s, r := a.enterStream(call, c, h)
	if r != driver.Success {
		return r
	}
	defer a.leave()
	for _, d := range a.m.devices {
		if !d.concurrent() {
			return driver.NotSupported
		}
	}
	switch {
	case s.isLegacy(), len(p) == 0, len(p) != len(sizes), len(to) != len(first):
		return driver.InvalidValue
	case prefetch && (len(to) == 0 || len(to) > len(p) || first[0] != 0):
		return driver.InvalidValue
	}
	parts := make([]part, len(p))
	at := 0
	for i := range p {
		parts[i] = part{addr: uint64(p[i]), n: sizes[i]}
		if prefetch {
			for at+1 < len(first) && first[at+1] <= uint64(i) {
				if first[at+1] <= first[at] {
					return driver.InvalidValue
				}
				at++
			}
			parts[i].to = to[at]
		}
	}
	if prefetch && at != len(to)-1 {
		return driver.InvalidValue
	}
	if !prefetch {
		return s.discardPlainly(parts)
	}
	return s.move(call, parts, discard)
}

// discardPlainly discards without a prefetch, as the real driver does: at once on
// an idle stream, and behind a busy one on a thread that nothing waits for, so
// that it takes the contents of what is written meanwhile.
func (s *stream) discardPlainly(parts []part) driver.Result {
	m := s.m
	var of []*backing
	for _, p := range parts {
		r, _, ok := m.pagesAt(driver.Ptr(p.addr), p.n)
		if !ok {
			return driver.InvalidValue
		}
		of = append(of, r)
	}
	if r := s.refuseCapture(); r != driver.Success {
		return r
	}
	discard := func() {
		for i, p := range parts {
			if r, pages, ok := m.pagesAt(driver.Ptr(p.addr), p.n); ok && r == of[i] {
				r.discardPages(pages)
			}
		}
	}
	if s.tail == nil {
		discard()
		return driver.Success
	}
	m.enqueue(&op{stream: s.context.late, deps: []*op{s.tail}, task: task{run: func(site) *fault {
		m.mu.Lock()
		defer m.mu.Unlock()
		discard()
		return nil
	}}})
	return driver.Success
}

// move submits a move of pages to another place, without their contents if discard is set.
func (s *stream) move(call driver.Call, parts []part, discard bool) driver.Result {
	m := s.m
	for i, p := range parts {
		if _, _, ok := m.pagesAt(driver.Ptr(p.addr), p.n); !ok {
			return driver.InvalidValue
		}
		to, r := m.checkPlace(p.to)
		if r != driver.Success {
			return r
		}
		parts[i].to = to
	}
	if r := s.refuseCapture(); r != driver.Success {
		return r
	}
	_, r := s.submit(task{run: func(at site) *fault {
		m.mu.Lock()
		defer m.mu.Unlock()
		for _, p := range parts {
			r, pages, ok := m.pagesAt(driver.Ptr(p.addr), p.n)
			if !ok {
				return m.illegal(at, call, p.addr, p.addr, p.n, m.whatIsAt(p.addr, at.submitted))
			}
			if discard {
				r.discardPages(pages)
			}
			if why := r.bring(ordinalOf(p.to), pages); why != "" {
				m.note("%v of [%#x, %#x+%#x) ended before its end: %s", call, p.addr, p.addr, p.n, why)
			}
		}
		return nil
	}}, s.context.late.tail) // plain discards went the same way before it
	if r != driver.Success {
		return r
	}
	// The attribute has the last request, whether it was carried out or not.
	for _, p := range parts {
		if r, at, ok := m.pagesAt(driver.Ptr(p.addr), p.n); ok {
			r.managed.pages.each(at, func(_ span, pg *page) { pg.prefetched = p.to })
		}
	}
	return driver.Success
}

// discardPages leaves the pages with poison.
func (r *backing) discardPages(s span) {
	r.managed.pages.each(s, r.m.unpage)
	if r.mem == nil { // the system's memory
		fill(systemBytes(s), PoisonByte)
		return
	}
	for b := range r.mem.runs(s.lo, s.size()) {
		fill(b, PoisonByte)
	}
}

func (a *api) MemRangeGetAttribute(c driver.Context, attr driver.RangeAttribute, p driver.Ptr, n uint64, out []int32) driver.Result {
	return a.rangeAttributes(driver.CallMemRangeGetAttribute, c, []driver.RangeAttribute{attr}, []uint64{uint64(len(out))}, p, n, out)
}

func (a *api) MemRangeGetAttributes(c driver.Context, attrs []driver.RangeAttribute, counts []uint64, p driver.Ptr, n uint64, out []int32) driver.Result {
	return a.rangeAttributes(driver.CallMemRangeGetAttributes, c, attrs, counts, p, n, out)
}

func (a *api) rangeAttributes(call driver.Call, c driver.Context, attrs []driver.RangeAttribute, counts []uint64, p driver.Ptr, n uint64, out []int32) driver.Result {
	if _, r := a.enterContext(call, c); r != driver.Success {
		return r
	}
	defer a.leave()
	r, s, ok := a.m.pagesAt(p, n)
	if !ok || len(attrs) == 0 || len(attrs) != len(counts) {
		return driver.InvalidValue
	}
	for i, attr := range attrs {
		if counts[i] > uint64(len(out)) || !a.m.rangeAttribute(attr, &r.managed.pages, s, out[:counts[i]]) {
			return driver.InvalidValue
		}
		out = out[counts[i]:]
	}
	return driver.Success
}

func (a *api) MemGetLocationInfo(p driver.Ptr, n, summary, sampling uint64, out []driver.Location) driver.Result {
	m := a.m
	m.mu.Lock()
	defer m.mu.Unlock()
	r, _, ok := m.pagesAt(p, n)
	switch {
	case m.options.DriverVersion < int(driver.LocatorVersion):
		return driver.MissingEntryPoint
	case m.closed:
		return driver.Deinitialized
	case !ok || summary == 0 || summary > n || sampling > summary || uint64(len(out)) != (n-1)/summary+1:
		return driver.InvalidValue
	case sampling == 0:
		sampling = host.PageSize()
	}
	from := uint64(p) - r.lo // of the system's memory 0 is the first byte
	for i := range out {
		lo := from + uint64(i)*summary
		out[i] = mostFrequent(&r.managed.pages, span{lo, min(lo+summary, from+n)}, sampling)
	}
	return driver.Success
}

// mostFrequent returns where most of the pages are that lie at multiples of a distance from
// the beginning on.
func mostFrequent(p *pages, s span, distance uint64) (most driver.Location) {
	counts := map[int32]uint64{}
	best := uint64(0)
	p.visit(s, func(run span, pg page) {
		counts[pg.at] += (run.hi-s.lo-1)/distance - (run.lo-s.lo+distance-1)/distance + 1
		if counts[pg.at] <= best {
			return
		}
		if best, most = counts[pg.at], (driver.Location{}); pg.at != driver.DeviceInvalid {
			most = ofOrdinal(pg.at)
		}
	})
	return most
}

// rangeAttribute reads one attribute of pages. It returns false if there is no such
// attribute, or it does not have that many elements.
func (m *Machine) rangeAttribute(attr driver.RangeAttribute, p *pages, s span, out []int32) bool {
	if attr == driver.RangeAccessedBy {
		by := m.accessedBy(p, s)
		for i := range out {
			out[i] = driver.DeviceInvalid
			if i < len(by) {
				out[i] = by[i]
			}
		}
		return len(out) > 0
	}
	const withTypes = 12020
	if len(out) != 1 || attr > driver.RangeLastPrefetch && m.options.DriverVersion < withTypes {
		return false
	}
	switch attr {
	case driver.RangeReadMostly:
		out[0] = 0
		if mostly, all := same(p, s, func(pg page) bool { return pg.readMostly }); mostly && all {
			out[0] = 1
		}
	case driver.RangePreferredLocation:
		out[0] = ordinalOrInvalid(location(p, s, preferred))
	case driver.RangePreferredType:
		out[0] = int32(location(p, s, preferred).Type)
	case driver.RangePreferredID:
		out[0] = location(p, s, preferred).ID
	case driver.RangeLastPrefetch:
		out[0] = ordinalOrInvalid(location(p, s, prefetched))
	case driver.RangeLastPrefetchType:
		out[0] = int32(location(p, s, prefetched).Type)
	case driver.RangeLastPrefetchID:
		out[0] = location(p, s, prefetched).ID
	default:
		return false
	}
	return true
}

func preferred(pg page) driver.Location  { return pg.preferred }
func prefetched(pg page) driver.Location { return pg.prefetched }

// location is what is the same of all pages, or none.
func location(p *pages, s span, of func(page) driver.Location) driver.Location {
	l, ok := same(p, s, of)
	if !ok || l.Type == driver.LocationNone {
		return driver.Location{ID: driver.DeviceInvalid}
	}
	return l
}

func ordinalOrInvalid(l driver.Location) int32 {
	if l.Type == driver.LocationNone {
		return driver.DeviceInvalid
	}
	return ordinalOf(l)
}

// accessedBy lists the processors that have the advice for all of the pages.
func (m *Machine) accessedBy(p *pages, s span) (by []int32) {
	all := ^places(0)
	p.visit(s, func(_ span, pg page) { all &= pg.accessedBy })
	for where := range all.all(len(m.devices)) {
		by = append(by, where)
	}
	return by
}
