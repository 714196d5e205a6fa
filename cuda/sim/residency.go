package sim

import (
	"cmp"
	"fmt"
	"iter"
	"slices"

	"github.com/cuvmm/cuvmm/cuda"
	"github.com/cuvmm/cuvmm/internal/driver"
	"github.com/cuvmm/cuvmm/internal/host"
)

// A range is brought in pieces to the processor that touches it, so that one larger than a
// device's memory passes through it: large ones, and small ones where there is no
// room for a large one.
const (
	largePiece = 2 << 20
	smallPiece = 64 << 10
)

// account is the memory that a page is charged to.
func (m *Machine) account(where int32) *pool {
	if where == driver.DeviceCPU {
		return m.host
	}
	return m.devices[where].pool
}

// reachesPage reports whether a device, or the host, can touch a page where it
// lies, without its moving.
func (m *Machine) reachesPage(toucher, at int32) bool {
	switch {
	case toucher == driver.DeviceCPU:
		return m.devices[at].attributes[driver.AttrDirectManagedFromHost] != 0
	case at == driver.DeviceCPU:
		return true
	}
	return m.devices[toucher].reaches(m.devices[at])
}

// touch moves pages to a device or the host as its access would. It returns why it
// cannot, or "".
func (r *backing) touch(toucher int32, s span, write bool) string {
	m := r.m
	if toucher >= 0 {
		r.managed.touched = m.nextTouch()
	}
	return r.inPieces(s, func(s span) string {
		return r.arrange(s, func(pg page) (to int32, copied bool) {
			switch {
			case pg.at == driver.DeviceInvalid:
				if pg.preferred.Type != driver.LocationNone {
					if to := ordinalOf(pg.preferred); to == toucher || m.reachesPage(toucher, to) {
						return to, false
					}
				}
				return toucher, false
			case pg.at == toucher || !write && pg.copies.has(toucher):
				return pg.at, false
			case pg.readMostly && !write:
				return toucher, true
			case m.reachesPage(toucher, pg.at) &&
				(pg.accessedBy.has(toucher) || pg.preferred.Type != driver.LocationNone && ordinalOf(pg.preferred) == pg.at):
				return pg.at, false
			}
			return toucher, false
		}, write)
	})
}

// bring is touch for a prefetch, which moves pages whatever the advice.
func (r *backing) bring(to int32, s span) string {
	if to >= 0 {
		r.managed.touched = r.m.nextTouch()
	}
	return r.inPieces(s, func(s span) string {
		return r.arrange(s, func(pg page) (int32, bool) {
			return to, pg.readMostly && pg.at != driver.DeviceInvalid && pg.at != to
		}, false)
	})
}

func (r *backing) inPieces(s span, do func(span) string) string {
	for large := range s.pieces(largePiece) {
		if do(large) == "" {
			continue
		}
		for small := range large.pieces(smallPiece) {
			if why := do(small); why != "" {
				return why
			}
		}
	}
	return ""
}

// pieces cuts a span at the multiples of a unit.
func (s span) pieces(unit uint64) iter.Seq[span] {
	return func(yield func(span) bool) {
		for lo := s.lo; lo < s.hi; {
			hi := min(s.hi, (lo/unit+1)*unit)
			if !yield(span{lo, hi}) {
				return
			}
			lo = hi
		}
	}
}

// arrange moves the pages to where to says, or copies them there.
func (r *backing) arrange(s span, to func(page) (where int32, copied bool), write bool) string {
	m := r.m
	// Room first, since making it moves other pages, perhaps of this range.
	for {
		need := map[int32]uint64{}
		r.managed.pages.visit(s, func(s span, pg page) {
			if where, copied := to(pg); where != pg.at && !pg.copies.has(where) || copied && !pg.copies.has(where) {
				need[where] += s.size()
			}
		})
		short, ok := m.acquireAll(need)
		if ok {
			break
		}
		p, n := m.account(short), need[short]
		left := m.available(p)
		if m.pageOut(short, n-min(n, left), r, s) == 0 && n > left {
			return fmt.Sprintf("no room for %d bytes at %s: %d of %d are taken by memory that cannot be paged out",
				n, placeName(short), p.limit-left, p.limit)
		}
	}
	r.managed.pages.each(s, func(s span, pg *page) {
		where, copied := to(*pg)
		switch {
		case copied:
			pg.copies |= placeBit(where)
		case where != pg.at:
			if pg.at != driver.DeviceInvalid {
				m.account(pg.at).give(s.size())
			}
			pg.copies &^= placeBit(where)
			pg.at = where
		}
		if write {
			m.dropCopies(s, pg)
		}
	})
	return ""
}

// acquireAll acquires what is needed at each place, or nothing: then it says where not
// enough is free.
func (m *Machine) acquireAll(need map[int32]uint64) (short int32, ok bool) {
	var done []int32
	for where, n := range need {
		if !m.account(where).acquire(n) {
			for _, w := range done {
				m.account(w).give(need[w])
			}
			return where, false
		}
		done = append(done, where)
	}
	return 0, true
}

func placeName(where int32) string {
	if where == driver.DeviceCPU {
		return "the host"
	}
	return fmt.Sprintf("device %d", where)
}

// dropCopies releases the duplicates of pages.
func (m *Machine) dropCopies(s span, pg *page) {
	for where := range pg.copies.all(len(m.devices)) {
		m.account(where).give(s.size())
	}
	pg.copies = 0
}

// unpage releases the memory that the pages take.
func (m *Machine) unpage(s span, pg *page) {
	m.dropCopies(s, pg)
	if pg.at != driver.DeviceInvalid {
		m.account(pg.at).give(s.size())
	}
	pg.at = driver.DeviceInvalid
}

// all are the members of the set, on a machine with so many devices.
func (p places) all(devices int) func(yield func(int32) bool) {
	return func(yield func(int32) bool) {
		for where := driver.DeviceCPU; int(where) < devices; where++ {
			if p.has(where) && !yield(where) {
				return
			}
		}
	}
}

func (m *Machine) nextTouch() uint64 {
	m.touches++
	return m.touches
}

// pageOut moves managed pages from a device to the host until so many bytes
// are free there, those first that were not touched for the longest time, but
// no page in keep of the range that needs the room. It returns how many bytes
// it freed.
func (m *Machine) pageOut(where int32, need uint64, needs *backing, keep span) (freed uint64) {
	if where < 0 || !m.devices[where].concurrent() {
		return 0
	}
	ranges := []*backing{m.system}
	for r := range m.backing.all() {
		if r.v.managed != nil {
			ranges = append(ranges, r.v)
		}
	}
	slices.SortStableFunc(ranges, func(a, b *backing) int { return cmp.Compare(a.managed.touched, b.managed.touched) })
	for _, r := range ranges {
		var out []span
		r.managed.pages.visit(span{0, ^uint64(0)}, func(s span, pg page) {
			if pg.at != where && !pg.copies.has(where) {
				return
			}
			if r != needs {
				out = append(out, s)
				return
			}
			for _, s := range []span{{s.lo, min(s.hi, keep.lo)}, {max(s.lo, keep.hi), s.hi}} { // what lies before and behind
				if s.lo < s.hi {
					out = append(out, s)
				}
			}
		})
		for _, s := range out {
			if freed >= need {
				return freed
			}
			s.hi = min(s.hi, s.lo+roundUp(need-freed, host.PageSize()))
			freed += m.pageOutRange(r, where, s)
		}
	}
	return freed
}

// makeRoom pages out for memory that is allocated.
func (m *Machine) makeRoom(p *pool, need uint64) {
	for _, d := range m.devices {
		if d.pool == p {
			m.pageOut(int32(d.ordinal), need, nil, span{})
		}
	}
}

// pageOutRange moves pages that lie on a device, or have copies there, to the
// host, as far as that has room. It returns how many bytes it freed.
func (m *Machine) pageOutRange(r *backing, where int32, s span) (freed uint64) {
	r.managed.pages.each(s, func(s span, pg *page) {
		switch {
		case pg.copies.has(where):
			pg.copies &^= placeBit(where)
		case pg.copies.has(driver.DeviceCPU): // the copy becomes the page
			pg.copies &^= placeBit(driver.DeviceCPU)
			pg.at = driver.DeviceCPU
		case !m.host.acquire(s.size()):
			return
		default:
			pg.at = driver.DeviceCPU
		}
		m.account(where).give(s.size())
		freed += s.size()
	})
	return freed
}

// Resident returns how many of n bytes of managed memory lie on a device, copies of
// read-mostly pages included; device -1 is the host. Pages that no processor has touched
// lie nowhere.
func (m *Machine) Resident(p cuda.Ptr, n, device int) int {
	ptr := uint64(p)
	m.mu.Lock()
	defer m.mu.Unlock()
	var sum uint64
	count := func(s span, pg page) {
		if pg.at == int32(device) || pg.at != driver.DeviceInvalid && pg.copies.has(int32(device)) {
			sum += s.size()
		}
	}
	if _, ok := m.backing.find(ptr); !ok {
		m.system.managed.pages.visit(span{ptr, ptr + uint64(n)}, count)
	}
	for r := range m.backing.overlapping(ptr, ptr+uint64(n)) {
		if r.v.managed == nil {
			continue
		}
		s := span{max(ptr, r.lo) - r.lo, min(ptr+uint64(n), r.hi) - r.lo}
		r.v.managed.pages.visit(s, count)
	}
	return int(sum)
}
