package pool

import (
	"fmt"

	"github.com/cuvmm/cuvmm/internal/core"
)

// SetLimit changes the most physical memory, in bytes, that the pool may have;
// 0 is no limit. Where it has more, free memory that the GPU has passed is given
// back at once, as far as there is some; what is still above the limit stays,
// and the pool makes no more until it is below.
func (p *Pool) SetLimit(bytes int) error {
	if bytes < 0 {
		return core.Invalid("pool.SetLimit", fmt.Sprintf("%d bytes", bytes), "use a size in bytes, or 0 for no limit")
	}
	p.limit.Store(uint64(bytes))
	if have := p.reserved.Load(); bytes > 0 && have > uint64(bytes) {
		_, err := p.Trim(int(have - uint64(bytes)))
		return err
	}
	return nil
}

// impossible is why a request is refused that no freeing could make room for,
// before anything is given up for it; nil of others.
func (p *Pool) impossible(w *want) *shortage {
	n := p.lacking(w)
	if l := p.limit.Load(); l > 0 && n > l {
		return &shortage{kind: core.Budget, size: n}
	}
	if len(p.on) > 0 && n > p.dev.TotalMemory() {
		return &shortage{kind: core.OutOfMemory, size: n}
	}
	return nil
}
