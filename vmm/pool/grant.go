package pool

import (
	"slices"

	"github.com/cuvmm/cuvmm/internal/errs"
	"github.com/cuvmm/cuvmm/internal/memspec"
	"github.com/cuvmm/cuvmm/vmm"
)

// Grant lets further devices access all of the pool's memory, what it has and what it will
// have, as Options.Access does. What the pool has is granted in runs of chunks, which costs
// some 40 µs a chunk; from then on a new chunk takes about a millisecond, and no chunk
// moves. After an error it may be called again. Grant is safe for concurrent use; requests
// that need new memory wait for it.
func (p *Pool) Grant(access ...vmm.Access) error {
	const op = "pool.Grant"
	if err := p.made(op); err != nil {
		return err
	}
	p.misses.Lock()
	defer p.misses.Unlock()
	p.pressing.Lock()
	defer p.pressing.Unlock()
	if err := p.awake(op); err != nil {
		return err
	}
	all := withDevice(p.dev, slices.Clone(p.o.Access))
	more := slices.DeleteFunc(slices.Clone(access), func(a vmm.Access) bool { return slices.Contains(all, a) })
	if len(more) == 0 {
		return nil
	}
	all = append(all, more...)
	granted, err := memspec.CheckAccess(op, p.dev.System(), p.prop.Location, all)
	if err != nil {
		return err
	}
	p.mu.Lock()
	closed, regions := p.closed, slices.Concat(p.regions[:]...)
	p.mu.Unlock()
	if closed {
		return errs.ClosedError(op, p.object.Title())
	}
	for _, r := range regions {
		if err := r.grant(more); err != nil {
			return err
		}
	}
	p.o.Access = all
	p.access.Store(&granted)
	return nil
}

// grant grants what is mapped, in one driver call for each run of chunks. Nothing else works
// on the region.
func (r *region) grant(access []vmm.Access) error {
	for i := 0; i < len(r.chunks); {
		from := i
		for i < len(r.chunks) && r.chunks[i].Load() != nil && r.left(i) == 0 {
			i++
		}
		if i == from {
			i++
			continue
		}
		if err := r.res.SetAccess(from*int(r.chunk), (i-from)*int(r.chunk), access...); err != nil {
			return err
		}
	}
	return nil
}
