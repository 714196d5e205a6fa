package pool

import (
	"fmt"

	"github.com/cuvmm/cuvmm/internal/driver"
	"github.com/cuvmm/cuvmm/internal/errs"
	"github.com/cuvmm/cuvmm/internal/phys"
)

// newChunk makes memory within the limit. The error of a chunk that cannot be had
// is a *shortage.
func (p *Pool) newChunk(size uint64) (*phys.Handle, error) {
	if !p.admit(size) {
		return nil, &shortage{kind: errs.Budget, size: size}
	}
	h, r, short := phys.TryCreate(p.sys, size, p.prop, p.account)
	if short == nil && r == driver.Success {
		raise(&p.mostHeld, p.reserved.Load())
		if p.decay > 0 {
			p.upkeep.Wake(p.decay, p.tend)
		}
		h.Recycle() // its blocks change owners, so it is not exported as it is
		return h, nil
	}
	p.gave(size)
	if short != nil {
		return nil, &shortage{kind: errs.Budget, size: size, err: short}
	}
	if r == driver.OutOfMemory {
		return nil, &shortage{kind: errs.OutOfMemory, size: size, call: driver.CallMemCreate, result: r}
	}
	return nil, p.sys.CallError(allocOp, driver.CallMemCreate, r, fmt.Sprintf("a chunk of %s on %s", errs.Bytes(size), p.where()), p.on...)
}

// admit counts the memory of a chunk that is to be made, if the limit leaves room for it.
func (p *Pool) admit(size uint64) bool {
	p.holding.Lock()
	defer p.holding.Unlock()
	n := p.reserved.Load()
	if l := p.limit.Load(); l > 0 && (n > l || size > l-n) {
		return false
	}
	p.reserved.Store(n + size)
	p.object.SetBytes(n + size)
	return true
}

// gave counts memory as given back.
func (p *Pool) gave(bytes uint64) {
	p.holding.Lock()
	defer p.holding.Unlock()
	p.object.SetBytes(p.reserved.Add(-bytes))
}

// drop releases a chunk that is mapped nowhere. If that fails the chunk is idle, and the
// next trim tries again.
func (p *Pool) drop(op string, h *phys.Handle) error {
	if r := h.Release(); r != driver.Success {
		p.setAside(h)
		return h.ReleaseError(op, r)
	}
	p.gave(h.Size)
	return nil
}

// setAside keeps chunks that are mapped nowhere.
func (p *Pool) setAside(chunks ...*phys.Handle) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.idle = append(p.idle, chunks...)
}

// takeIdleLocked takes chunks that are mapped nowhere. The caller holds mu.
func (p *Pool) takeIdleLocked(n int, size uint64) (chunks []*phys.Handle) {
	kept := p.idle[:0]
	for _, h := range p.idle {
		if len(chunks) < n && h.Size == size {
			chunks = append(chunks, h)
		} else {
			kept = append(kept, h)
		}
	}
	p.idle = kept
	return chunks
}
