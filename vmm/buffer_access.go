package vmm

import (
	"github.com/cuvmm/cuvmm/internal/driver"
)

// SetAccess changes the access of places to the buffer's memory, in one driver call, and
// to the memory of later growth; places that are not named keep what they have. If it
// takes access away it first waits for the devices concerned.
func (b *Buffer) SetAccess(access ...Access) error {
	return b.inner().setAccess("vmm.Buffer.SetAccess", access)
}

func (b *buffer) setAccess(op string, access []Access) error {
	before, after, err := b.enterAccess(op, access)
	if err != nil {
		return err
	}
	defer b.leave()
	if end := b.mappedLocked(); end > 0 {
		err = b.res.setAccess(op, 0, end, access)
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	switch {
	case err == nil:
		b.access = after
	case !b.res.unsure():
		b.access = before
	}
	return err
}

// enterAccess starts a change of access. Access that is taken is refused to the library's
// own operations first; access that is granted is allowed to them last. If a Host
// function uses memory that the host is to lose, it waits without holding changes.
func (b *buffer) enterAccess(op string, access []Access) (before, after accessList, err error) {
	for {
		if err := b.enter(op); err != nil {
			return nil, nil, err
		}
		changes, err := b.mayAccess(op, access)
		if err != nil {
			b.leave()
			return nil, nil, err
		}
		b.mu.Lock()
		before, after = b.access, b.access.with(changes)
		var v *view
		if home := b.prop.Location; home.Type != driver.LocationDevice && after.mode(home) < before.mode(home) {
			v = b.res.views.over(0, rest)
		}
		if v == nil {
			b.access = before.lower(after)
		}
		b.mu.Unlock()
		if v == nil {
			return before, after, nil
		}
		b.leave()
		if err := v.wait(op); err != nil {
			return nil, nil, err
		}
	}
}

func (b *buffer) mayAccess(op string, access []Access) (accessList, error) {
	changes, err := checkAccess(op, b.dev.System(), b.prop.Location, access)
	if err == nil {
		err = b.imported.mayAccess(op, changes)
	}
	return changes, err
}
