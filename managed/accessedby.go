package managed

import (
	"fmt"
	"slices"

	"github.com/cuvmm/cuvmm/cuda"
	"github.com/cuvmm/cuvmm/internal/driver"
)

// AccessedBy is the set of processors that access a range remotely: the devices, and the
// host, for which the driver keeps a mapping, so that they access the range without a fault
// if they can reach it. The set is stored in the driver; every method queries it anew. It
// has no nodes of the host, only the host as a whole.
type AccessedBy struct{ r Range }

// AccessedBy returns the range's set.
func (r Range) AccessedBy() AccessedBy { return AccessedBy{r} }

// Add adds a device or the host. Adding a member again has no effect.
func (a AccessedBy) Add(l cuda.Location) error {
	return a.change("managed.AccessedBy.Add", driver.AdviseSetAccessedBy, l)
}

// Remove removes a device or the host, even if only a part of the range had it.
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

// All returns the members of the set, for all of the range: the host first, then the
// devices in order.
func (a AccessedBy) All() ([]cuda.Location, error) {
	const op = "managed.AccessedBy.All"
	if err := a.r.acquire(op); err != nil {
		return nil, err
	}
	defer a.r.release()
	return a.r.accessedBy(op)
}

// Assign sets the members. It checks all of them first, and sends only differences to the
// driver. If a call fails it reverts the earlier ones, for all of the range. A member of
// only a part of the range reads as absent: Assign keeps it, unless it is named and
// reverted. Use Remove to remove it, or assign part by part.
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
		return a.r.apply(op, steps)
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

// apply performs all steps or none.
func (r Range) apply(op string, steps []step) error {
	for i, s := range steps {
		err := r.advise(op, s.advice, s.at)
		if err == nil {
			continue
		}
		for _, done := range slices.Backward(steps[:i]) {
			u := done.undo()
			undo := r.advise(op, u.advice, u.at)
			if undo != nil {
				undo = r.advise(op, u.advice, u.at) // once more: there is no later attempt
			}
			if undo != nil {
				err = fmt.Errorf("%w (and the set keeps a change, since undoing it failed: %w)", err, undo)
			}
		}
		return err
	}
	return nil
}

// accessors checks locations for the set.
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
