package suspend

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"

	"github.com/cuvmm/cuvmm/internal/core"
	"github.com/cuvmm/cuvmm/internal/driver"
	"github.com/cuvmm/cuvmm/internal/life"
)

// Out suspends members, after all work that could use their memory. After an error nothing has
// changed. Once memory was given back it goes forward, whether the context ends or not.
func Out(ctx context.Context, op string, o Options, members []Member) (*Suspension, error) {
	s, err := newSuspension(op, o, members)
	if err != nil {
		return nil, err
	}
	if err := s.out(ctx, op, func(p *plan) error { return s.sys.AwaitDevices(ctx, op, devicesOf(p)) }); err != nil {
		return nil, err
	}
	return s, nil
}

// OutAfter is Out that waits for nothing: the memory goes out of use at once, and a goroutine
// does the rest when the fence, which is made once that is so, and what members add to it have
// passed. Its error is that of the Suspension's Completion. Drain waits for it.
func OutAfter(op string, o Options, members []Member, fence func() (*core.Fence, error)) (*Suspension, error) {
	s, err := newSuspension(op, o, members)
	if err != nil {
		return nil, err
	}
	f, err := fence()
	if err != nil {
		s.giveUp(s.asked)
		return nil, err
	}
	s.sys.Go(func() {
		if err := s.out(context.Background(), op, func(*plan) error { return s.await(f) }); err != nil {
			s.end(err)
		}
	})
	return s, nil
}

// await waits until the GPU has passed the fence and the work that members add. The members
// are locked.
func (s *Suspension) await(f *core.Fence) error {
	for _, p := range s.asked {
		p.m.AddTo(f)
	}
	passed := make(chan struct{})
	s.sys.Reclaim(f, nil, func() error { close(passed); return nil })
	<-passed
	return nil
}

// devicesOf returns the devices that can use what is to be taken.
func devicesOf(p *plan) (all []driver.Device) {
	for _, c := range p.going() {
		for _, m := range c.maps {
			for _, d := range m.Access().Devices() {
				if !slices.Contains(all, d) {
					all = append(all, d)
				}
			}
		}
	}
	return all
}

// out takes the memory of members that Begin took out of use. wait waits for the GPU. Until
// the first memory is unmapped, an error or the end of the context undoes everything. From then
// on it goes forward: what cannot be copied any more stays.
func (s *Suspension) out(ctx context.Context, op string, wait func(*plan) error) (err error) {
	defer func() { s.turn <- struct{}{} }()
	places := s.asked
	defer func() {
		if err != nil {
			for _, p := range places {
				p.tellBack()
			}
		}
	}()
	return locked(places, func() (err error) {
		p := new(plan)
		defer func() {
			if err != nil {
				s.stay(p)
				s.giveUp(places)
			}
		}()
		for _, at := range places {
			if err := at.m.Settle(ctx, op); err != nil {
				return err
			}
		}
		late, err := s.recall(ctx, op)
		if err != nil {
			return err
		}
		p = newPlan(places)
		for _, c := range p.chunks {
			c.late = late[c.h]
		}
		for _, r := range p.ranges {
			if err := r.maps[0].Range.Pause(op, r.maps, p.byName[r.maps[0].Memory].first.sleep); err != nil {
				return err
			}
		}
		if err := p.acquire(op); err != nil {
			return err
		}
		going := p.going()
		if err := s.save(ctx, op, going, func() error {
			if err := wait(p); err != nil {
				return err
			}
			return s.tellLeaving(ctx)
		}); err != nil {
			if !slices.ContainsFunc(going, func(c *chunk) bool { return c.given }) {
				return err
			}
			keepRest(going, err)
		}
		s.leave(op, places, p)
		return nil
	})
}

// stay undoes what out has done so far.
func (s *Suspension) stay(p *plan) {
	for _, c := range p.chunks {
		if c.stays == "" && c.h.Taken() {
			c.untake()
		}
		c.forget()
	}
	for _, r := range p.ranges {
		r.maps[0].Range.Continue(r.maps)
	}
}

// keepRest has chunks stay that have not gone when copies failed.
func keepRest(going []*chunk, err error) {
	for _, c := range going {
		if !c.given {
			c.stays = fmt.Sprintf("its bytes could not be copied: %v", err)
			c.forget()
			c.untake()
		}
	}
}

// give unmaps chunks whose bytes are safe, and gives their memory back to the driver.
func (s *Suspension) give(op string, chunks []*chunk) {
	for _, r := range ranges(chunks, nil) {
		_ = r.maps[0].Range.TakeOut(op, r.maps) // what is refused is pinned
	}
	s.mu.Lock()
	for _, c := range chunks {
		s.chunks[c.h] = c
	}
	s.mu.Unlock()
	for _, c := range chunks {
		c.given = true
		s.drop(op, c)
	}
}

// leave gives back what has not gone yet of the memory, whose bytes are safe, and ends the
// suspension's part in the members.
func (s *Suspension) leave(op string, places []*place, p *plan) {
	var giving sync.WaitGroup
	for _, there := range byDevice(slices.DeleteFunc(p.going(), func(c *chunk) bool { return c.given })) {
		giving.Go(func() { s.give(op, there) })
	}
	giving.Wait()
	for _, r := range p.ranges {
		r.maps[0].Range.Continue(r.maps) // what stays is there
	}
	s.mu.Lock()
	s.places, s.slept = slices.Clone(places), true
	s.mu.Unlock()
	s.all = p.chunks
	if s.o.After != nil {
		s.o.After()
	}
	if s.o.Guard {
		s.guard = s.lay(op, p.going())
	}
	s.SetBytes(s.account())
	for _, at := range places {
		at.m.Step(func() { at.step(done) })
	}
	s.settle(nil)
	for _, at := range places {
		at.m.Release()
	}
}

// account brings the report up to date, and returns how much host memory is used.
func (s *Suspension) account() uint64 {
	s.mu.Lock()
	defer s.mu.Unlock()
	r := report(s.asked, s.all, func(c *chunk) (bool, reason) {
		switch {
		case c.stays != "":
			return false, reason{c.stays, c.stays}
		case c.owed != nil:
			// Its error has an address of the chunk.
			return false, reason{"owed", fmt.Sprintf("the driver refused, and is asked again: %v", c.owed)}
		case c.late != "":
			return false, reason{c.late, c.late}
		}
		return c.pinned()
	})
	r.Guard = s.guard
	s.report = r
	return r.Host
}

// errFlying is why memory is owed that copies may still use.
var errFlying = errors.New("the copies of a Resume that failed could not be waited for")

// drop releases the memory of a chunk that is unmapped, and was taken. What the driver refuses
// is owed: it is one of the System's leftovers.
func (s *Suspension) drop(op string, c *chunk) {
	err := errFlying
	if !s.flying.Load() {
		err = c.unpin(op)
	}
	if err == nil {
		if r := c.h.Drop(); r != driver.Success {
			err = c.h.ReleaseError(op, r)
		}
	}
	s.mu.Lock()
	before := c.owed
	c.owed = err
	s.mu.Unlock()
	if err != nil && before == nil {
		s.sys.Left("suspended memory", int(c.size), core.DeviceOf(c.h.Asked.Location), err, func() error { return s.dropAgain(op, c) })
	}
}

// dropAgain is drop for the System's leftovers. It waits for nobody who moves bytes.
func (s *Suspension) dropAgain(op string, c *chunk) error {
	select {
	case <-s.turn:
	default:
		return life.ErrAgain
	}
	defer func() { s.turn <- struct{}{} }()
	if c.owed == nil {
		return nil // it was resumed
	}
	if s.flying.Load() {
		return life.ErrAgain
	}
	if s.drop(op, c); c.owed != nil {
		return c.owed
	}
	s.account()
	s.settle(nil)
	s.prune()
	return nil
}

// settle ends the Released of the Suspension once nothing is owed. The caller has the turn.
func (s *Suspension) settle(err error) {
	s.mu.Lock()
	end := !s.ended
	for _, c := range s.chunks {
		end = end && c.owed == nil
	}
	s.ended = s.ended || end
	s.mu.Unlock()
	if end {
		s.end(err)
	}
}

// unpin tries to unmap again what could not be unmapped.
func (c *chunk) unpin(op string) error {
	for _, m := range c.maps {
		if err := m.Unpin(op); err != nil {
			return err
		}
	}
	return nil
}
