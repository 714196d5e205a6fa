package sim

import "github.com/cuvmm/cuvmm/internal/driver"

// page is what the driver knows of a page of managed memory.
type page struct {
	// at is where it lies: a device, driver.DeviceCPU, or driver.DeviceInvalid
	// where nobody has touched it.
	at int32
	// copies are where read-only duplicates lie beside it, accessedBy is the
	// advice.
	copies, accessedBy places
	readMostly         bool
	// preferred and prefetched have type none where there is no such advice,
	// and where the page was never prefetched.
	preferred, prefetched driver.Location
}

// places is a set of devices and the host.
type places uint64

func placeBit(where int32) places {
	if where == driver.DeviceCPU {
		return 1 << 63
	}
	return 1 << where
}

func (p places) has(where int32) bool { return p&placeBit(where) != 0 }

// pages are those of a range, in bytes from its start, as runs of equal ones.
type pages struct{ runs []pageRun }

type pageRun struct {
	span
	page
}

func newPages(size uint64, p page) pages { return pages{[]pageRun{{span{0, size}, p}}} }

// each calls f for the runs in s, which may change them.
func (p *pages) each(s span, f func(s span, pg *page)) {
	p.cut(s.lo)
	p.cut(s.hi)
	for i := range p.runs {
		if r := &p.runs[i]; r.lo >= s.lo && r.hi <= s.hi {
			f(r.span, &r.page)
		}
	}
	p.merge()
}

// cut makes x the border of two runs.
func (p *pages) cut(x uint64) {
	for i, r := range p.runs {
		if r.lo < x && x < r.hi {
			p.runs = append(p.runs[:i+1], p.runs[i:]...)
			p.runs[i].hi, p.runs[i+1].lo = x, x
			return
		}
	}
}

func (p *pages) merge() {
	merged := p.runs[:1]
	for _, r := range p.runs[1:] {
		if last := &merged[len(merged)-1]; last.page == r.page {
			last.hi = r.hi
			continue
		}
		merged = append(merged, r)
	}
	p.runs = merged
}

// same is what is the same of all pages in s, or false.
func same[T comparable](p *pages, s span, of func(page) T) (v T, ok bool) {
	first := true
	for _, r := range p.runs {
		if r.hi <= s.lo || r.lo >= s.hi {
			continue
		}
		if got := of(r.page); first {
			v, first = got, false
		} else if got != v {
			return v, false
		}
	}
	return v, !first
}
