package managed

import (
	"fmt"
	"slices"

	"github.com/cuvmm/cuvmm/cuda"
	"github.com/cuvmm/cuvmm/internal/driver"
)

// AccessedBy is who accesses a range besides where it lies: the devices, and the
// host, that the driver keeps a mapping for, so that they touch the range without
// a fault where they can reach it. The set lives in the driver; every method asks
// it anew. Of nodes of the host it knows nothing: name the host.
type AccessedBy struct{ r Range }

// AccessedBy is the range's set.
func (r Range) AccessedBy() AccessedBy { return AccessedBy{r} }

// Add puts a device or the host in. One that is there stays.
func (a AccessedBy) Add(l cuda.Location) error {
	return a.change("managed.AccessedBy.Add", driver.AdviseSetAccessedBy, l)
}

// Remove takes a device or the host out, also where only part of the range had
// it.
func (a AccessedBy) Remove(l cuda.Location) error {
	return a.change("managed.AccessedBy.Remove", driver.AdviseUnsetAccessedBy, l)
}

func (a AccessedBy) change(op string, advice driver.Advice, l cuda.Location) error {
	return a.r.advised(op, func(m *memory) error {
		places, err := m.accessors(op, l)
		if err != nil {
			return err
		}
		return a.r.advise(op, advice, places[0].Location)
	})
}

// Contains reports whether all of the range has the location in its set.
func (a AccessedBy) Contains(l cuda.Location) (bool, error) {
	const op = "managed.AccessedBy.Contains"
	if err := a.r.acquire(op); err != nil {
		return false, err
	}
	defer a.r.release()
	if _, err := a.r.h.m.accessors(op, l); err != nil {
		return false, err
	}
	all, err := a.r.accessedBy(op)
	return slices.Contains(all, l), err
}

// All are the members of the set, for all of the range: the host first, then the
// devices in order.
func (a AccessedBy) All() ([]cuda.Location, error) {
	const op = "managed.AccessedBy.All"
	if err := a.r.acquire(op); err != nil {
		return nil, err
	}
	defer a.r.release()
	return a.r.accessedBy(op)
}

// Assign makes the set what is named. All of it is checked first, and only what
// differs is sent to the driver. Where that fails in the middle, what was
// changed is changed back, for all of the range. What only part of the range has
// reads as absent: Assign leaves it, unless it is named and changed back. Use
// Remove to take it out, or assign part by part.
func (a AccessedBy) Assign(to ...cuda.Location) error {
	const op = "managed.AccessedBy.Assign"
	return a.r.advised(op, func(m *memory) error {
		want, err := m.accessors(op, to...)
		if err != nil {
			return err
		}
		now, err := a.r.accessedBy(op)
		if err != nil {
			return err
		}
		var steps []step
		for _, p := range want {
			add := step{driver.AdviseSetAccessedBy, p.Location}
			if !slices.Contains(now, p.asked) && !slices.Contains(steps, add) {
				steps = append(steps, add)
			}
		}
		for _, l := range now {
			if !slices.Contains(to, l) {
				steps = append(steps, step{driver.AdviseUnsetAccessedBy, driver.Location{Type: driver.LocationType(l.Type), ID: int32(l.ID)}})
			}
		}
		return a.r.take(op, steps)
	})
}

// step is one change of a set.
type step struct {
	advice driver.Advice
	at     driver.Location
}

func (s step) undo() step {
	if s.advice == driver.AdviseSetAccessedBy {
		return step{driver.AdviseUnsetAccessedBy, s.at}
	}
	return step{driver.AdviseSetAccessedBy, s.at}
}

// take takes the steps, all or none.
func (r Range) take(op string, steps []step) error {
	for i, s := range steps {
		err := r.advise(op, s.advice, s.at)
		if err == nil {
			continue
		}
		for _, done := range slices.Backward(steps[:i]) {
			u := done.undo()
			undo := r.advise(op, u.advice, u.at)
			if undo != nil {
				undo = r.advise(op, u.advice, u.at) // once more, since nobody could later
			}
			if undo != nil {
				err = fmt.Errorf("%w (and the set keeps a change, since undoing it failed: %w)", err, undo)
			}
		}
		return err
	}
	return nil
}

// accessors are locations that the set can have.
func (m *memory) accessors(op string, all ...cuda.Location) ([]place, error) {
	places := make([]place, len(all))
	for i, l := range all {
		var err error
		if places[i], err = m.checkPlace(op, l, true); err != nil {
			return nil, err
		}
	}
	for _, p := range places {
		if err := p.supported(op, m); err != nil {
			return nil, err
		}
	}
	return places, nil
}

// accessedBy reads the set.
func (r Range) accessedBy(op string) ([]cuda.Location, error) {
	out := make([]int32, 1+len(r.h.m.dev.System().Devices()))
	for i := range out {
		out[i] = driver.DeviceInvalid
	}
	if err := r.read(op, driver.RangeAccessedBy, out); err != nil {
		return nil, err
	}
	slices.Sort(out) // the driver gives no order
	var all []cuda.Location
	for _, n := range out {
		if n != driver.DeviceInvalid {
			all = append(all, ofOrdinal(n))
		}
	}
	return all, nil
}
