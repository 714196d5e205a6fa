package pool

import (
	"errors"
	"slices"

	"github.com/cuvmm/cuvmm/cuda"
	"github.com/cuvmm/cuvmm/internal/driver"
	"github.com/cuvmm/cuvmm/internal/ranges"
	"github.com/cuvmm/cuvmm/vmm"
)

// reserve makes a region of the size, or as large as address space allows. The
// caller holds slow.
func (p *Pool) reserve(k kind, size, least, chunk, pages uint64) (*region, error) {
	for {
		size = max(size, least)
		res, err := vmm.Reserve(p.dev, int(size), vmm.ReserveOptions{Align: int(max(maxAlign, p.gran))})
		if err == nil {
			r := &region{res: res, rng: ranges.Of(res), base: driver.Ptr(res.Ptr()), size: size, chunk: chunk, pages: pages, kind: k}
			r.chunks = newChunks(int(size / chunk))
			if k != mid {
				r.vacant = vacant{{0, len(r.chunks)}}
			}
			p.mu.Lock()
			defer p.mu.Unlock()
			p.regions[k] = append(p.regions[k], r)
			p.addPlace(place{from: r.base, to: r.end(), reg: r})
			return r, nil
		}
		if !errors.Is(err, cuda.ErrOutOfAddressSpace) || size == least && !p.closeEmpty() {
			return nil, addressShortage(err, size)
		}
		size = (size/4 + chunk - 1) / chunk * chunk
	}
}

// closeEmpty gives back the ranges of regions in which nothing is, and reports
// whether there were any. What could not be given back is left to Close. The
// caller holds slow.
func (p *Pool) closeEmpty() (closed bool) {
	p.mu.Lock()
	empty := slices.DeleteFunc(slices.Concat(p.regions[:]...), func(r *region) bool { return !r.empty() })
	for _, r := range empty {
		p.forget(r)
	}
	p.mu.Unlock()
	for _, r := range empty {
		if r.res.Close() == nil {
			closed = true
			continue
		}
		p.mu.Lock()
		p.stuck = append(p.stuck, r.res)
		p.mu.Unlock()
	}
	return closed
}

// forget takes a region out of the pool. The caller holds mu.
func (p *Pool) forget(r *region) {
	p.regions[r.kind] = slices.DeleteFunc(p.regions[r.kind], func(o *region) bool { return o == r })
	p.removePlace(r.base)
}
