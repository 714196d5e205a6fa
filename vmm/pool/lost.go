package pool

import (
	"fmt"

	"github.com/cuvmm/cuvmm/internal/core"
	"github.com/cuvmm/cuvmm/internal/life"
)

// lose leaves a place to the System's list of leftovers, after unmapping it failed: it is
// unknown what is mapped there. The place is out of use, and its memory counts as the
// pool's, until a try succeeds or Close gives back the region; give then makes the place
// free. The caller holds no lock of the pool that comes before a region's turn.
func (p *Pool) lose(op string, reg *region, from, to int, err error, give func()) error {
	bytes := uint64(0)
	for i := from; i < to; i++ {
		if c := reg.chunks[i].Load(); c != nil && c.handle.Mappings.Load() <= 1 { // else it is in use elsewhere
			bytes += c.handle.Size
		}
	}
	p.sys.Left("memory", int(bytes), core.DeviceOf(p.prop.Location), err, func() error {
		if !p.pressing.TryRLock() {
			return life.ErrAgain // Check runs, or Close, which may give it back
		}
		defer p.pressing.RUnlock()
		for i := from; i < to; i++ {
			if reg.chunks[i].Load() == nil {
				continue
			}
			gone, err := reg.vacatePiece(op, i, i+1)
			p.gave(gone)
			if err != nil {
				return err
			}
		}
		give()
		return nil
	})
	return fmt.Errorf("%w (System.Drain tries it again)", err)
}

// loseSpan is lose for a span that no shard owns.
func (p *Pool) loseSpan(op string, reg *region, s *span, err error) error {
	return p.lose(op, reg, reg.index(s.from), reg.index(s.to), err, func() {
		p.mu.Lock()
		defer p.mu.Unlock()
		reg.remove(s)
	})
}
