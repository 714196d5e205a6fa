package core

import (
	"errors"
	"fmt"

	"github.com/cuvmm/cuvmm/internal/driver"
	"github.com/cuvmm/cuvmm/internal/life"
)

// NoDevice stands for no device.
const NoDevice driver.Device = -1

// Undo is the one way to take back what was built so far. An operation that builds something
// owns a teardown for each part that it has made, and ends with After if it fails and with
// Keep if it succeeds:
//
//	u := sys.NewUndo(device)
//	defer func() { err = u.After(err) }() // does nothing after Keep, and runs at a panic, too
//	h, err := make()
//	…
//	u.Own("memory", size, func() error { return release(h) })
//	…
//	u.Keep()
//
// The teardowns run the last first, up to one that fails: those before it may depend on it.
// What remains goes to the System's list of leftovers, which goes on where it stopped, so
// a teardown is called again after an error and never after a success. A teardown that takes
// several steps goes forward: it remembers the steps that succeeded.
//
// A teardown runs on any goroutine, and after the first time under the lock of the
// reclaimer's poll, so it takes no lock that is held over an Own or an After, and waits for
// nothing: not for the GPU, and not for an operation. If it would have to it returns
// life.ErrAgain, and is called again soon. Work that may be in flight on what was made is a
// fence, which After hands to the reclaimer (Behind). A count that the builder held goes with
// the last teardown that needs it, as does what is accounted where memory is released. What
// belongs to a context is released by Context.TeardownUnlessGone, because the context may be
// gone before.
//
// One goroutine at a time uses an Undo.
type Undo struct {
	sys   *System
	on    driver.Device
	fence *Fence
	parts []part
}

// part is a resource, and how to release it.
type part struct {
	what  string
	bytes int
	back  func() error
}

// NewUndo begins a transaction. The device is the one that its memory is on, or NoDevice.
func (s *System) NewUndo(on driver.Device) *Undo { return &Undo{sys: s, on: on} }

// Own adds a part and its teardown. what names its kind in a word or two, for snapshots and
// errors; bytes is the memory that stays allocated until the teardown succeeds, 0 for
// anything but memory.
func (u *Undo) Own(what string, bytes int, back func() error) {
	u.parts = append(u.parts, part{what, bytes, back})
}

// Behind says that GPU work may be in flight on what is owned: After leaves all teardowns to
// the reclaimer, which runs them once the fence has passed, and waits for nothing.
func (u *Undo) Behind(f *Fence) {
	if u.fence == nil {
		u.fence = f
		return
	}
	u.fence.join(f)
}

// Keep ends the transaction: what was built stays.
func (u *Undo) Keep() { u.parts, u.fence = nil, nil }

// Back runs the teardowns, the last first, and stops at one that fails; the next Back goes
// on there. It is for an owner that a user closes and can close again. It does not wait for a
// fence.
func (u *Undo) Back() error {
	for n := len(u.parts); n > 0; n-- {
		if err := u.parts[n-1].back(); err != nil {
			return err
		}
		u.parts = u.parts[:n-1]
	}
	return nil
}

// Take adds the parts of another transaction, which ends.
func (u *Undo) Take(from *Undo) {
	u.parts = append(u.parts, from.parts...)
	if from.fence != nil {
		u.Behind(from.fence)
	}
	from.Keep()
}

// After releases what is owned, after an operation that failed with cause, and returns cause.
// What the driver refuses goes to the System's list, and the error says so.
func (u *Undo) After(cause error) error {
	if len(u.parts) == 0 {
		return cause
	}
	l, f := &leftover{on: u.on, parts: u.parts}, u.fence
	u.Keep()
	if f != nil {
		u.sys.giveBackBehind(f, l)
		return cause
	}
	switch err := u.sys.giveBack(l); {
	case err == nil:
		return cause
	case errors.Is(err, life.ErrAgain):
		u.sys.giveBackBehind(new(Fence), l)
		return cause
	default:
		return UndoError(cause, err)
	}
}

// UndoError returns the error of an operation that failed with cause, and left something
// (System.Left) because the driver refused it with err.
func UndoError(cause, err error) error {
	if cause == nil {
		return fmt.Errorf("undoing failed, which System.Drain tries again: %w", err)
	}
	return fmt.Errorf("%w (and undoing it failed, which System.Drain tries again: %w)", cause, err)
}
