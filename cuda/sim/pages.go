package sim

import (
	"slices"
	"sort"

	"github.com/cuvmm/cuvmm/internal/driver"
)

// page is what the driver knows of a page of managed memory.
type page struct {
	// at is where it lies: a device, driver.DeviceCPU, or driver.DeviceInvalid
	// where it was never touched.
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
	lo := p.cut(s.lo)
	hi := p.cut(s.hi)
	for i := lo; i < hi; i++ {
		f(p.runs[i].span, &p.runs[i].page)
	}
	p.merge(max(lo, 1)-1, min(hi+1, len(p.runs)))
}

// find is the run that x lies in, or the end.
func (p *pages) find(x uint64) int {
	return sort.Search(len(p.runs), func(i int) bool { return x < p.runs[i].hi })
}

// cut makes x the border of two runs, and returns the one behind it.
func (p *pages) cut(x uint64) int {
	i := p.find(x)
	if i == len(p.runs) || p.runs[i].lo == x {
		return i
	}
	p.runs = slices.Insert(p.runs, i, p.runs[i])
	p.runs[i].hi, p.runs[i+1].lo = x, x
	return i + 1
}

// merge joins equal neighbours among the runs from lo up to hi.
func (p *pages) merge(lo, hi int) {
	last := lo
	for i := lo + 1; i < hi; i++ {
		if p.runs[i].page == p.runs[last].page {
			p.runs[last].hi = p.runs[i].hi
			continue
		}
		last++
		p.runs[last] = p.runs[i]
	}
	p.runs = slices.Delete(p.runs, last+1, hi)
}

// visit calls f for the parts of runs in s.
func (p *pages) visit(s span, f func(s span, pg page)) {
	for i := p.find(s.lo); i < len(p.runs) && p.runs[i].lo < s.hi; i++ {
		r := p.runs[i]
		f(span{max(r.lo, s.lo), min(r.hi, s.hi)}, r.page)
	}
}

// same is what is the same of all pages in s, or false.
func same[T comparable](p *pages, s span, of func(page) T) (v T, ok bool) {
	first, differ := true, false
	p.visit(s, func(_ span, pg page) {
		got := of(pg)
		if first {
			v, first = got, false
		}
		differ = differ || got != v
	})
	return v, !first && !differ
}
