package multicast

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"sync"
	"time"

	"github.com/cuvmm/cuvmm/cuda"
	"github.com/cuvmm/cuvmm/fabric/rendezvous"
	"github.com/cuvmm/cuvmm/handles/peer"
	"github.com/cuvmm/cuvmm/internal/core"
	"github.com/cuvmm/cuvmm/internal/driver"
	"github.com/cuvmm/cuvmm/internal/errs"
	"github.com/cuvmm/cuvmm/internal/life"
	"github.com/cuvmm/cuvmm/vmm"
)

// DefaultCallTimeout is how long a rank's part of a step may take by default.
const DefaultCallTimeout = 10 * time.Second

// TeamOptions describe a team. The zero value works.
type TeamOptions struct {
	// CallTimeout is how long a rank's own driver calls of one step may take, and its GPU
	// work when the team ends; 0 is DefaultCallTimeout, and a negative one is refused. Leave
	// may take twice as long, so choose less than half of the group's timeout: then a rank
	// whose driver call does not return can still report it.
	CallTimeout time.Duration
	// Granularity is that of the multicast object: see Properties.
	Granularity vmm.Granularity
}

// Team is one rank's side of a multicast object that all devices of a group's ranks take
// part in, each with a replica of its own. The caller closes it. All methods are safe for
// concurrent use.
type Team struct {
	group   *rendezvous.Group
	devices []*cuda.Device
	timeout time.Duration
	options TeamOptions

	size, members, first int
	word                 *abortWord
	replicas             []replica
	object               *Object
	bindings             []*Binding
	at                   *vmm.Reservation
	formed               bool // constant once NewTeam has returned

	mu   sync.Mutex
	undo *core.Undo
	late *pendingCall // one that has not returned
	left bool         // all ranks' work is done
	gone bool
	// closer provides Released; mu and gone are what operations check.
	closer life.Closer
}

// replica is a device's own memory at its own address.
type replica struct {
	memory *vmm.Allocation
	at     *vmm.Reservation
}

// NewTeam makes a team of the devices of all ranks of a group, with a replica of size bytes
// on each, rounded up to the granularity of all of them; all ranks pass the same size. Every
// rank calls it, with one or more devices of its own, all of one System. The contents of
// the replicas are undefined.
//
// All ranks make and leave the teams of one group one at a time and in the same order. Any
// number of teams can exist at once.
//
// If it fails it fails on every live rank, with a *TeamError that names the ranks that
// caused it, and all resources are released. The group remains usable, unless a rank died or
// missed a step, so the same ranks may try again or go on without multicast. All ranks
// decide alike: none falls back alone. There is one exception: if a rank dies at the very
// moment in which the result of the last step is announced, some ranks may have a team and
// others not; Leave reports that. If the caller's context ends the group ends too.
//
// After an error the team is nil, unless a driver call did not return in time (ErrStuck).
// Such a team can only be closed; its addresses are 0.
func NewTeam(ctx context.Context, g *rendezvous.Group, devices []*cuda.Device, size int, o TeamOptions) (*Team, error) {
	const op = "multicast.NewTeam"
	if g == nil {
		return nil, errs.Invalid(op, "a nil group", "make one with rendezvous.InProcess, Host or Join")
	}
	t := &Team{group: g, devices: append([]*cuda.Device(nil), devices...), timeout: o.CallTimeout, options: o}
	if t.timeout <= 0 { // the first step refuses a negative one, on every rank
		t.timeout = DefaultCallTimeout
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	err := t.form(ctx, size)
	if err == nil {
		t.formed = true
		return t, nil
	}
	if t.late == nil && t.undo != nil { // without waiting, since no work has used it
		cause := err
		if late := t.bounded(op, "giving the team back", func() error { err = t.undo.After(cause); return nil }); late != nil {
			return t, errors.Join(cause, late)
		}
	}
	if t.late != nil {
		return t, err
	}
	return nil, err
}

// Ptr returns the address at which multimem instructions of this rank's devices access all
// replicas. It is fixed for life.
func (t *Team) Ptr() cuda.Ptr {
	if !t.formed {
		return 0
	}
	return t.at.Ptr()
}

// Replica returns the address of the replica of this rank's i-th device, to which only that
// device has access. It is ordinary memory.
func (t *Team) Replica(i int) cuda.Ptr {
	if !t.formed {
		return 0
	}
	return t.replicas[i].at.Ptr()
}

// Devices returns this rank's devices, in the order in which NewTeam got them.
func (t *Team) Devices() []*cuda.Device {
	return append([]*cuda.Device(nil), t.devices...)
}

// Size of each replica, in bytes.
func (t *Team) Size() int { return t.size }

// Members returns the number of devices of all ranks.
func (t *Team) Members() int { return t.members }

// First returns the number of this rank's first device in the team: devices are
// counted from 0, rank by rank.
func (t *Team) First() int { return t.first }

// Released returns the completion of the team's closing on this rank, by Leave or
// Close.
func (t *Team) Released() cuda.Completion {
	return t.closer.Completion()
}

// check refuses a Team that no function made.
func (t *Team) check(op string) error {
	if t == nil || t.group == nil {
		return errs.Invalid(op, "a nil team", "make one with NewTeam")
	}
	return nil
}

// String writes "team of 4 devices, 2 MiB each".
func (t *Team) String() string {
	if t.check("") != nil {
		return "no team"
	}
	return fmt.Sprintf("team of %s, %s each", errs.Count(t.members, "device"), errs.Bytes(t.size))
}

// Leave waits for the work on this rank's devices, tells the other ranks, waits until all of
// them leave too, and closes the team. So no replica is freed while a rank's kernels use it.
//
// Work that takes longer than TeamOptions.CallTimeout is told to stop (Abort), and gets as
// much time again. If it stops then, or the program has called Abort, the error is
// ErrAborted on every rank, and the team is closed nevertheless; likewise with ErrDeviceLost
// if a rank has lost a context. If it does not stop (ErrStuck), or a rank has died, no rank
// releases anything: all may call Leave again if the group is still usable, or each may call
// Close, which does not consult the other ranks.
func (t *Team) Leave(ctx context.Context) error {
	const op, step = "multicast.Team.Leave", "leave"
	if err := t.check(op); err != nil {
		return err
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	if !t.formed || t.left { // without asking the other ranks
		if err := t.stuck(op); err != nil {
			return err
		}
	}
	switch {
	case !t.formed || t.gone:
		return closedTeam(op)
	case t.left: // and releasing failed, or was late
		return t.giveBack(op)
	}
	var unwhole error
	a, err := t.step(ctx, step, func() (offering, error) {
		err := t.stuck(op) // which the other ranks learn too
		if err == nil {
			err = t.passed(op)
		}
		if err == nil || errors.Is(err, ErrAborted) {
			unwhole, err = cmp.Or(err, t.doubt(op)), nil
		}
		return offering{body: reportOf(unwhole)}, err
	})
	if err != nil {
		return err
	}
	defer a.close()
	t.left = true
	said := make([]report, len(a.reports))
	whole := true
	for rank, r := range a.reports {
		if err := json.Unmarshal(r.Body, &said[rank]); err != nil {
			said[rank] = reportOf(fmt.Errorf("%w: it sent an invalid message: %w", peer.ErrProtocol, err))
		}
		whole = whole && said[rank].Error == ""
	}
	err = t.giveBack(op)
	if !whole {
		err = errors.Join(failed(step, said, unwhole), err)
	}
	return err
}

// doubt returns why the results of this rank's work are incomplete, although it is done.
func (t *Team) doubt(op string) error {
	if t.word.isSet() {
		return fmt.Errorf("%s: %w, by Abort or as the team was left before; see which rank they waited for", op, ErrAborted)
	}
	if r := core.SystemOf(t.devices[0]).DeviceLost(t.ordinals()...); r != driver.Success {
		return errs.New(errs.Failure{Op: op, Kind: errs.DeviceLost, Result: r, Asked: "the work on this rank's devices",
			Hint: "take nothing from the replicas, and restart the process of this rank"})
	}
	return nil
}

func (t *Team) ordinals() (all []driver.Device) {
	for _, d := range t.devices {
		all = append(all, driver.Device(d.Ordinal()))
	}
	return all
}

// Close releases this rank's side: it unmaps, unbinds, and releases. It waits for the work on
// this rank's devices, but not for the other ranks: their work on the team must be done (see
// Leave).
//
// Work that takes longer than TeamOptions.CallTimeout, for example because it waits for a
// rank that has died, is told to stop (Abort). If it stops then the team is closed and the
// error is ErrAborted. Otherwise, or while an earlier call has not returned, the team is
// stuck: Close returns ErrStuck, at once from then on, and releases nothing. It may be called
// again, and is idempotent.
func (t *Team) Close() error {
	const op = "multicast.Team.Close"
	if err := t.check(op); err != nil {
		return err
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	if err := t.stuck(op); err != nil {
		return err
	}
	if t.gone {
		return nil
	}
	var aborted error
	if t.formed {
		if aborted = t.passed(op); aborted != nil && !errors.Is(aborted, ErrAborted) {
			return aborted
		}
	}
	return errors.Join(aborted, t.giveBack(op))
}

// passed waits for the work on this rank's devices. Work that exceeds the limit is told to
// stop waiting for other ranks, and gets as much time again.
func (t *Team) passed(op string) error {
	c := startCall("waiting for the GPU's work", func() error {
		return core.SystemOf(t.devices[0]).WaitDevices(op, t.ordinals())
	})
	if c.within(t.timeout) {
		return c.err
	}
	t.Abort()
	if !c.within(t.timeout) {
		t.late = c
		return stuckError(op, c)
	}
	if c.err != nil {
		return c.err
	}
	return abortedError(op, t.timeout)
}

// giveBack tears down within the limit. It goes forward, and may be called again after an
// error.
func (t *Team) giveBack(op string) error {
	err := t.closer.Close(func() error {
		return t.bounded(op, "giving the team back", t.back)
	})
	t.gone = err == nil
	return err
}

// own registers the teardown of something of a kind for Close. The teardown waits for no
// work.
func (t *Team) own(what string, closing func() error) {
	if t.undo == nil {
		t.undo = t.newUndo()
	}
	t.undo.Own(what, 0, closing)
}

func (t *Team) newUndo() *core.Undo { return core.SystemOf(t.devices[0]).NewUndo(core.NoDevice) }

// back runs the teardown. It may be called again after an error.
func (t *Team) back() error {
	if t.undo == nil {
		return nil
	}
	return t.undo.Back()
}

// whole runs build and, if it fails, undoes the part that was built, so that another try
// starts from the beginning.
func (t *Team) whole(build func() error) error {
	outer, inner := t.undo, t.newUndo()
	if outer == nil {
		outer = t.newUndo()
	}
	t.undo = inner
	err := build()
	t.undo = outer
	if err == nil {
		outer.Take(inner)
	}
	return inner.After(err)
}
