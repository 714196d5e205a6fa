package suspend

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/cuvmm/cuvmm/cuda"
	"github.com/cuvmm/cuvmm/internal/budget"
	"github.com/cuvmm/cuvmm/internal/core"
	"github.com/cuvmm/cuvmm/internal/driver"
	"github.com/cuvmm/cuvmm/internal/errs"
	"github.com/cuvmm/cuvmm/internal/vrange"
)

// Pauses between two tries to create memory that is not there.
const (
	shortestWait = 5 * time.Millisecond
	longestWait  = 500 * time.Millisecond
)

// Resume wakes members; none stands for all that sleep. It waits for an OutAfter that runs, and
// while there is not enough memory, until the context ends. After an error all of them sleep
// on, and what is kept of them is kept. Members that are awake stay so.
//
// If a budget refuses, its owners are asked, without the members' locks: they may need those.
func (s *Suspension) Resume(ctx context.Context, op string, members []Member) error {
	for wait := shortestWait; ; wait = min(2*wait, longestWait) {
		err := s.resume(ctx, op, members)
		var short *budget.Shortage
		if !errors.As(err, &short) {
			return err
		}
		if s.sys.MakeRoom(ctx, short) {
			continue
		}
		if ctx.Done() == nil {
			return err
		}
		if err := pauseFor(ctx, wait, err); err != nil {
			return err
		}
	}
}

// pauseFor waits before the next try of what failed for want of memory.
func pauseFor(ctx context.Context, wait time.Duration, lack error) error {
	timer := time.NewTimer(wait)
	defer timer.Stop()
	select {
	case <-ctx.Done():
		return fmt.Errorf("%w (waiting for memory: %w)", lack, context.Cause(ctx))
	case <-timer.C:
		return nil
	}
}

// resume tries it once with the budgets as they are.
func (s *Suspension) resume(ctx context.Context, op string, members []Member) error {
	end, err := s.begin(ctx, op, members)
	if err != nil {
		return err
	}
	defer end()
	places := s.wake(op, members)
	if len(places) == 0 {
		return nil
	}
	err = locked(places, func() error {
		for _, p := range places {
			if err := p.m.Settle(ctx, op); err != nil {
				return err
			}
		}
		return s.in(ctx, op, places)
	})
	for _, p := range places {
		s.sys.RemoveSuspended(p.sleep) // also if Fill had them awake
		if err != nil {
			p.addAddresses()
			p.m.Step(func() { p.step(undone) })
		} else {
			p.m.Step(func() { p.step(done) })
		}
		p.m.Release()
	}
	s.prune()
	if err == nil {
		for _, p := range places {
			p.tellBack()
		}
	}
	return err
}

// begin waits until nothing else moves the memory, and has the turn until end is called. It refuses members that
// are not of the Suspension, or closed.
func (s *Suspension) begin(ctx context.Context, op string, members []Member) (end func(), err error) {
	if err := s.has(op, members); err != nil {
		return nil, err
	}
	select {
	case <-s.turn:
	case <-ctx.Done():
		return nil, fmt.Errorf("%s: %w", op, context.Cause(ctx))
	}
	end = func() { s.turn <- struct{}{} }
	if err := s.landed(op); err != nil {
		end()
		return nil, err
	}
	return end, nil
}

// has refuses members that are not of the Suspension, or closed.
func (s *Suspension) has(op string, members []Member) error {
	for _, m := range members {
		if !slices.ContainsFunc(s.asked, func(p *place) bool { return p.m.Status() == m.Status() }) {
			return errs.Invalid(op, m.What()+", which is not of this Suspension", "name memory that was suspended with it, or none for all of it")
		}
		if m.Closed() {
			return errs.ClosedError(op, "memory")
		}
	}
	return nil
}

// names reports whether a member is among those that the caller named; none stands for all.
func names(members []Member, m Member) bool {
	return len(members) == 0 || slices.ContainsFunc(members, func(n Member) bool { return n.Status() == m.Status() })
}

// sleeping returns the members that have not been resumed.
func (s *Suspension) sleeping() []*place {
	s.mu.Lock()
	defer s.mu.Unlock()
	return slices.Clone(s.places)
}

// wake begins to resume members that sleep, and holds them open.
func (s *Suspension) wake(op string, members []Member) (woken []*place) {
	for _, p := range s.sleeping() {
		if !names(members, p.m) || p.m.Status().State() != Suspended || p.m.Acquire(op) != nil {
			continue // it is awake, or was closed
		}
		p.m.Step(func() { p.step(begin) })
		woken = append(woken, p)
	}
	return woken
}

// in makes memory for what the members lack, maps it where it was, and brings the bytes back.
func (s *Suspension) in(ctx context.Context, op string, places []*place) (err error) {
	back := newPlan(places)
	for _, c := range back.chunks {
		c.maps = slices.DeleteFunc(c.maps, func(m *vrange.Mapping) bool { return !m.Away() })
	}
	back.chunks = slices.DeleteFunc(back.chunks, func(c *chunk) bool { return len(c.maps) == 0 })
	// Chunks whose memory comes back, as they went and as they come. That of others came with
	// another member.
	var lost, come []*chunk
	s.mu.Lock()
	for _, b := range back.chunks {
		if c := s.chunks[b.h]; c != nil {
			if b.at, b.kept, b.off = b.maps[0], c.kept, c.off; b.kept != nil {
				b.parts = c.parts // the member may have fewer by now
			}
			lost, come = append(lost, c), append(come, b)
			s.blank[c.h] = c.kept == nil && s.o.Fill == nil
		}
	}
	s.mu.Unlock()
	for _, p := range places {
		p.blank = slices.ContainsFunc(p.m.Mappings(), func(m *vrange.Mapping) bool { return s.blank[m.Memory] })
	}
	if err := s.renew(ctx, op, places, lost); err != nil {
		return err
	}
	var mapped []stretch
	defer func() {
		if err != nil {
			s.takeOutAgain(op, mapped)
			s.dropAll(op, lost)
		}
	}()
	if mapped, err = s.bring(ctx, op, back.chunks); err != nil {
		return err
	}
	if s.o.Fill != nil {
		if err := s.refill(ctx, op, come); err != nil {
			return err
		}
	}
	for _, r := range mapped {
		if err := r.maps[0].Range.Regrant(op, r.maps, r.reach); err != nil {
			return err
		}
	}
	for _, r := range mapped {
		r.maps[0].Range.Continue(r.maps)
	}
	s.returned(op, lost)
	return nil
}

// takeOutAgain unmaps what was put back. Copies may be in flight there, whatever failed. If they
// cannot be waited for, the memory stays, pinned, until the GPU has passed.
func (s *Suspension) takeOutAgain(op string, back []stretch) {
	var devices []driver.Device
	for _, r := range back {
		devices = append(devices, r.maps[0].Range.Devices()...)
	}
	if err := s.sys.WaitDevices(op, devices); err != nil && !errors.Is(err, cuda.ErrDeviceLost) {
		s.flying.Store(true)
		f := new(core.Fence)
		f.AddAllStreams()
		s.sys.Reclaim(f, nil, func() error { s.flying.Store(false); return nil })
	}
	for _, r := range back {
		if s.flying.Load() {
			r.maps[0].Range.Pin(r.maps)
		} else {
			_ = r.maps[0].Range.TakeOut(op, r.maps) // what is refused is pinned
		}
	}
}

// landed waits for copies of a Resume that failed.
func (s *Suspension) landed(op string) error {
	if !s.flying.Load() {
		return nil
	}
	if err := s.sys.WaitAll(op); err != nil {
		return err
	}
	s.flying.Store(false)
	return nil
}

// renew makes memory for all chunks, or for none. While the device has not enough it waits,
// without memory, so that two processes which wait for each other's do not hold half each.
func (s *Suspension) renew(ctx context.Context, op string, places []*place, lost []*chunk) error {
	for wait := shortestWait; ; wait = min(2*wait, longestWait) {
		r, err := s.renewAll(op, lost)
		if err != nil && r == driver.OutOfMemory && s.lift(op, lost) {
			r, err = s.renewAll(op, lost)
		}
		if err == nil || r != driver.OutOfMemory || ctx.Done() == nil {
			return err
		}
		if err := s.awaitRoom(ctx, op, wait, lost, err); err != nil {
			return err
		}
		for _, p := range places {
			if p.m.Closed() {
				return errs.ClosedError(op, "memory")
			}
		}
	}
}

// awaitRoom waits before the next try of what failed for want of memory, until each device has as
// much free as all chunks need: what another process gives back is seen soon. Free memory may be
// in the wrong place, so it does not wait for long, and not for less than a tenth of that.
func (s *Suspension) awaitRoom(ctx context.Context, op string, wait time.Duration, lost []*chunk, lack error) error {
	need := map[*cuda.Device]uint64{}
	for _, c := range lost {
		if c.h.Away() && c.h.Asked.Location.Type == driver.LocationDevice {
			need[c.maps[0].Range.CUDA.Devices()[c.h.Asked.Location.ID]] += c.size
		}
	}
	for end := time.Now().Add(wait); ; {
		if err := pauseFor(ctx, max(shortestWait, wait/10), lack); err != nil {
			return err
		}
		if !time.Now().Before(end) || len(need) > 0 && room(op, need) {
			return nil
		}
	}
}

// room reports whether devices have so many bytes free.
func room(op string, need map[*cuda.Device]uint64) bool {
	for d, n := range need {
		if free, _, err := d.MemoryInfo(); err != nil || uint64(free) < n {
			return false
		}
	}
	return true
}

func (s *Suspension) renewAll(op string, lost []*chunk) (driver.Result, error) {
	var all uint64
	for _, c := range lost {
		all += c.size
	}
	var failed atomic.Pointer[lack]
	var renewing sync.WaitGroup
	for _, there := range byDevice(lost) {
		renewing.Go(func() {
			for _, c := range there {
				if failed.Load() != nil {
					return
				}
				if c.h.Taken() {
					c.h.Return() // the driver had refused to take it
				} else if r, short := c.h.Renew(); short != nil || r != driver.Success {
					failed.CompareAndSwap(nil, &lack{c, r, short})
					return
				}
			}
		})
	}
	renewing.Wait()
	l := failed.Load()
	if l == nil {
		return driver.Success, nil
	}
	var renewed []*chunk
	for _, c := range lost {
		if !c.h.Away() && !c.h.Taken() {
			renewed = append(renewed, c)
		}
	}
	s.dropAll(op, renewed) // before the error says who has the memory
	return l.result, s.o.Lack(op, l.chunk.first.m, l.chunk.h, all, l.result, l.short)
}

// lack is why no memory was made for a chunk: the driver refused, or a budget.
type lack struct {
	chunk  *chunk
	result driver.Result
	short  error
}

// dropAll takes the memory of chunks again, which is mapped no longer.
func (s *Suspension) dropAll(op string, chunks []*chunk) {
	for _, c := range chunks {
		for c.h.Take(op) != nil { // a query of its properties runs
			time.Sleep(pause)
		}
		s.drop(op, c)
	}
}

// reach returns the device that is to write a chunk through a mapping and may not, or none.
func (s *Suspension) reach(c *chunk, m *vrange.Mapping) (none driver.Location) {
	if c.at != m {
		return none
	}
	var by *cuda.Device
	switch {
	case c.kept != nil:
		by = c.kept.dev
	case s.o.Fill != nil:
		by = c.first.m.Device()
	default:
		return none
	}
	if at := (driver.Location{Type: driver.LocationDevice, ID: int32(by.Ordinal())}); m.Access().Mode(at) != driver.AccessReadWrite {
		return at
	}
	return none
}

// filling is bytes of a member that a source writes.
type filling struct {
	p    *place
	at   driver.Ptr
	size uint64
}

// refill has the source write the bytes of chunks that come back, each run of them at once.
func (s *Suspension) refill(ctx context.Context, op string, come []*chunk) error {
	var all []filling
	for _, c := range come {
		end := uint64(c.first.m.Base()) + c.first.m.Used()
		for _, p := range c.parts {
			at := c.at.Ptr() + driver.Ptr(p.off)
			if uint64(at) >= end {
				break
			}
			size := min(p.size, end-uint64(at))
			if n := len(all); n > 0 && all[n-1].p == c.first && all[n-1].at+driver.Ptr(all[n-1].size) == at {
				all[n-1].size += size
			} else {
				all = append(all, filling{c.first, at, size})
			}
		}
	}
	for _, f := range all {
		s.sys.RemoveSuspended(f.p.sleep) // Fill writes there
		if err := s.o.Fill(ctx, f.p.m, f.at, f.size); err != nil {
			return fmt.Errorf("%s: filling %s: %w", op, f.p.m.What(), err)
		}
	}
	return nil
}

// returned ends the Suspension's part in chunks that are back.
func (s *Suspension) returned(op string, lost []*chunk) {
	owed := false
	s.mu.Lock()
	for _, c := range lost {
		delete(s.chunks, c.h)
		owed = owed || c.owed != nil
		c.owed = nil
	}
	s.mu.Unlock()
	for _, c := range lost {
		c.forget()
		c.h.Release() // the members have counts
	}
	s.resize()
	var err error
	if owed {
		err = errs.New(errs.Failure{Op: op, Kind: errs.InUse, Asked: "memory that the driver did not take", Hint: "it is in use again: suspend it anew"})
	}
	s.settle(err)
}
