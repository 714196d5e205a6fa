package pages

import (
	"context"
	"errors"
	"fmt"

	"github.com/cuvmm/cuvmm/cuda"
	"github.com/cuvmm/cuvmm/internal/core"
	"github.com/cuvmm/cuvmm/internal/life"
	"github.com/cuvmm/cuvmm/internal/phys"
	"github.com/cuvmm/cuvmm/internal/vrange"
)

// Replace gives a place whose page other places use, too, a page of its own with the same
// bytes, copied behind the work of a stream, or of none if it is nil. A page that no other place
// uses stays. Replace waits for the copy, and for all work that could use the range, because an
// address cannot change under work that runs. If ctx ends first nothing has changed.
func (r *Range) Replace(ctx context.Context, op string, on *cuda.Stream, at int) error {
	return r.try(ctx, op, func() error {
		if _, err := r.check(op, []Span{{at, 1}}); err != nil {
			return err
		}
		if err := r.mayChange(op, core.StreamOf(on)); err != nil {
			return err
		}
		r.changes.Lock()
		defer r.changes.Unlock()
		return r.replace(ctx, op, on, at)
	})
}

// replace is Replace of a range on which no other change runs.
func (r *Range) replace(ctx context.Context, op string, on *cuda.Stream, at int) error {
	s := r.source
	p, own, err := r.forReplace(op, s.lane(core.StreamOf(on)), at)
	if err != nil || own == nil {
		return err
	}
	copied, err := r.copyTo(op, on, at, own)
	if err != nil {
		return err
	}
	for {
		if err := r.System().AwaitDevices(ctx, op, r.res.Devices()); err != nil {
			copied.end(op)
			return err
		}
		begun := false
		err := r.turn(op, func() error {
			begun = true
			s.advance()
			return r.swap(op, p, copied)
		})
		if !begun { // a Suspension has begun, and waits for this change
			copied.end(op)
		}
		if !errors.Is(err, errWaits) {
			return err
		}
	}
}

// forReplace returns a live place, and a free page that is mapped at no place that has passed;
// nil if the place has a page of its own.
func (r *Range) forReplace(op string, on *lane, at int) (p *place, own *page, err error) {
	s := r.source
	err = r.turn(op, func() error {
		s.mu.Lock()
		p = r.places.at(at)
		hole := p == nil || !p.live
		alone := !hole && p.page.uses == 1
		s.mu.Unlock()
		switch {
		case hole:
			return r.errHole(op, at)
		case alone:
			return nil
		}
		pages, _, err := s.acquire(op, 1, on)
		if err != nil {
			return err
		}
		if err := s.unmap(op, s.passedPlaces(pages)); err != nil {
			s.end(op, pages)
			return err
		}
		own = pages[0]
		return nil
	})
	return p, own, err
}

// copied is a page to which a place's page is copied, at an address of its own. The Replace holds
// the page, also while it waits, without turn.
type copied struct {
	s  *Source
	at *vrange.Range
	to *page
	on *core.Stream
}

// copyTo submits the copy. The page belongs to what it returns.
func (r *Range) copyTo(op string, on *cuda.Stream, at int, to *page) (*copied, error) {
	c := &copied{s: r.source, to: to}
	if err := c.begin(op, on, r, at); err != nil {
		c.end(op)
		return nil, err
	}
	return c, nil
}

func (c *copied) begin(op string, on *cuda.Stream, r *Range, at int) (err error) {
	if on == nil {
		if on, err = r.dev.Transfer(); err != nil {
			return err
		}
	}
	page := c.s.Page
	if c.at, err = vrange.Reserve(op, r.dev, int(page), 0, 0); err != nil {
		return err
	}
	c.to.h.Retain()
	if err := c.at.MapRun(op, 0, []*phys.Handle{c.to.h}, r.access); err != nil {
		c.to.h.Release() // the page has a count, or its old places do
		return err
	}
	c.on = core.StreamOf(on)
	return on.Copy(cuda.Ptr(c.at.Base), cuda.Ptr(r.Base())+cuda.Ptr(at)*cuda.Ptr(page), int(page))
}

// end gives the page back, when the GPU has passed a copy that may be in flight. What the driver
// refuses is one of the System's leftovers.
func (c *copied) end(op string) {
	u := c.s.System().NewUndo(core.DeviceOf(c.s.Memory.Location))
	c.s.ending.Add(1)
	first := true
	u.Own("page", int(c.s.Page), func() error {
		if !c.s.turn.TryLock() {
			return life.ErrAgain
		}
		defer c.s.turn.Unlock()
		if first {
			first = false
			defer c.s.ending.Add(-1)
		}
		if err := c.unmap(op); err != nil {
			return err
		}
		c.s.end(op, holding{c.to})
		return nil
	})
	f := new(core.Fence)
	if c.on != nil {
		f.AddStreams([]*core.Stream{c.on})
	}
	u.Behind(f)
	_ = u.After(nil) // it leaves everything to the reclaimer
}

// unmap ends the mapping at the address of the copy's own.
func (c *copied) unmap(op string) error {
	if c.at == nil {
		return nil
	}
	if c.at.Mapped() || c.at.Stuck() > 0 {
		if err := c.at.UnmapRun(op, 0, c.s.Page); err != nil {
			return err
		}
	}
	return c.at.Close(op)
}

// swap puts the page of a copy in the place of the one that is there. No work uses the range,
// but what this library has submitted meanwhile.
func (r *Range) swap(op string, p *place, c *copied) error {
	s := r.source
	if err := c.unmap(op); err != nil {
		c.end(op) // which tries again
		return err
	}
	r.mu.Lock() // so that no copy begins
	defer r.mu.Unlock()
	s.mu.Lock()
	gone := r.places.at(p.at) != p || !p.live
	busy := !r.copied.passed()
	s.mu.Unlock()
	switch {
	case gone:
		c.end(op)
		return r.errHole(op, p.at)
	case busy:
		return errWaits
	}
	held := holding{c.to}
	s.mu.Lock()
	p.use(false)
	held.addLocked(s, p.page) // which its other places may free meanwhile
	s.mu.Unlock()
	made, err := r.exchange(op, p, c.to)
	if made == nil {
		r.live.set(p.at, false)
	} else {
		s.mu.Lock()
		made.use(true)
		s.mu.Unlock()
	}
	s.end(op, held)
	return err
}

// exchange unmaps a place and maps another page there, or, if that fails, the old one again. It
// returns what is mapped then; nil is a hole.
func (r *Range) exchange(op string, p *place, next *page) (*place, error) {
	if err := r.source.unmapRun(op, []*place{p}); err != nil {
		return nil, fmt.Errorf("%w (so page %d is out of use until Map or Close can unmap it)", err, p.at)
	}
	made, err := r.mapRuns(op, []int{p.at}, []*page{next})
	if err == nil {
		return made[0], nil
	}
	back, failed := r.mapRuns(op, []int{p.at}, []*page{p.page})
	if failed != nil {
		return nil, fmt.Errorf("%w (and undoing it failed, so that page %d is a hole: %w)", err, p.at, failed)
	}
	return back[0], err
}
