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

// DefaultCallTimeout is how long a rank's part of a step may take where nothing
// else is said.
const DefaultCallTimeout = 10 * time.Second

// TeamOptions describe a team. The zero value works.
type TeamOptions struct {
	// CallTimeout is how long a rank's own driver calls of one step may take, and
	// its GPU work when the team ends; 0 is DefaultCallTimeout. It is best less
	// than half of the group's timeout, since Leave may take twice as long, so that
	// a rank whose driver does not come back can still say so.
	CallTimeout time.Duration
	// Granularity is the multicast object's: see Properties.
	Granularity vmm.Granularity
}

// Team is one rank's side of a multicast object that all devices of a group's
// ranks take part in, each with a replica of its own. The caller closes it.
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
	formed               bool // never changes once somebody else has the team

	mu   sync.Mutex
	undo []func() error // the last first
	late *call          // one that has not come back
	left bool           // all ranks' work has ended
	gone bool
	// closer is for Released: mu and gone decide.
	closer life.Closer
}

// replica is a device's own memory at its own address.
type replica struct {
	memory *vmm.Allocation
	at     *vmm.Reservation
}

// NewTeam makes a team of the devices of all ranks of a group, with a replica of
// size bytes on each, rounded up to what all of them need; all ranks ask for the
// same size. Every rank calls it, with one device of its own or several of one
// System. The contents of the replicas are undefined.
//
// Teams of one group are made and left one at a time, in the same order by all
// ranks. Any number of them may be there at once.
//
// Where it fails it fails for every rank that is still there, with a *TeamError
// that names those that are the reason, and what was made is given back. The
// group goes on, unless a rank is gone or missed a step, and so the same ranks
// may try again or go on without multicast. They are in step in that: no rank
// falls back alone. Only where a rank ends in the very moment in which all are
// told of the last step, some may have a team that others have not; Leave tells
// them. When the caller's context ends the group ends with it.
//
// After an error the team is nil, unless something is left: where the driver does
// not come back in time (ErrStuck), or does not take back what was made. Such a
// team can only be closed; its addresses are 0.
func NewTeam(ctx context.Context, g *rendezvous.Group, devices []*cuda.Device, size int, o TeamOptions) (*Team, error) {
	const op = "multicast.NewTeam"
	if g == nil {
		return nil, errs.Invalid(op, "a nil group", "make one with rendezvous.InProcess, Host or Join")
	}
	if o.CallTimeout <= 0 {
		o.CallTimeout = DefaultCallTimeout
	}
	t := &Team{group: g, devices: append([]*cuda.Device(nil), devices...), timeout: o.CallTimeout, options: o}
	t.mu.Lock()
	defer t.mu.Unlock()
	err := t.form(ctx, size)
	if err == nil {
		t.formed = true
		return t, nil
	}
	if t.late == nil {
		undo := t.giveBack(op) // nobody has used it, so nothing is waited for
		if undo == nil {
			return nil, err
		}
		err = fmt.Errorf("%w (and undoing it failed, which Close tries again: %w)", err, undo)
	}
	return t, err
}

// Ptr is the address at which multimem instructions of this rank's devices reach
// all replicas. It is fixed for life.
func (t *Team) Ptr() cuda.Ptr {
	if t.made("multicast.Team.Ptr"); !t.formed {
		return 0
	}
	return t.at.Ptr()
}

// Replica is the address of the replica of this rank's i-th device, where that
// device alone has access. It is ordinary memory.
func (t *Team) Replica(i int) cuda.Ptr {
	if t.made("multicast.Team.Replica"); !t.formed {
		return 0
	}
	return t.replicas[i].at.Ptr()
}

// Devices returns this rank's, in the order in which they were given.
func (t *Team) Devices() []*cuda.Device {
	return append([]*cuda.Device(nil), t.made("multicast.Team.Devices").devices...)
}

// Size of each replica, in bytes.
func (t *Team) Size() int { return t.made("multicast.Team.Size").size }

// Members returns how many devices the team has, of all ranks.
func (t *Team) Members() int { return t.made("multicast.Team.Members").members }

// First returns the number of this rank's first device in the team: devices are
// counted from 0, rank by rank.
func (t *Team) First() int { return t.made("multicast.Team.First").first }

// Released returns the completion of the team's closing on this rank, by Leave or
// Close.
func (t *Team) Released() cuda.Completion {
	return t.made("multicast.Team.Released").closer.Completion()
}

// check refuses a Team that no function made.
func (t *Team) check(op string) error {
	if t == nil || t.group == nil {
		return errs.Invalid(op, "a nil team", "make one with NewTeam")
	}
	return nil
}

// made is check for methods that return no error: they panic with one.
func (t *Team) made(op string) *Team {
	if err := t.check(op); err != nil {
		panic(err)
	}
	return t
}

// String writes "team of 4 devices, 2 MiB each".
func (t *Team) String() string {
	if t.check("") != nil {
		return "no team"
	}
	return fmt.Sprintf("team of %s, %s each", errs.Count(t.members, "device"), errs.Bytes(t.size))
}

// Leave waits for the work on this rank's devices, tells the other ranks, waits
// until all of them leave too, and closes the team. So no rank's kernels find a
// replica gone.
//
// Work that has not ended within TeamOptions.CallTimeout is told to (Abort), and
// gets as much time again. Where it ended then, or the program has called Abort,
// the error is ErrAborted on every rank, and the team is closed all the same; so
// it is with ErrDeviceLost where a rank has lost a context. Where it did not
// (ErrStuck), or a rank is gone, nothing is given back on any rank: all may call
// Leave again if the group goes on, or each of them Close, which asks nobody.
func (t *Team) Leave(ctx context.Context) error {
	const op, step = "multicast.Team.Leave", "leave"
	if err := t.check(op); err != nil {
		return err
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	if !t.formed || t.left { // there is nobody to ask
		if err := t.stuck(op); err != nil {
			return err
		}
	}
	switch {
	case !t.formed || t.gone:
		return closedTeam(op)
	case t.left: // and giving back failed, or was late
		return t.giveBack(op)
	}
	var unwhole error
	a, err := t.step(ctx, step, func() (offering, error) {
		err := t.stuck(op) // which the others are told, too
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
			said[rank] = reportOf(fmt.Errorf("%w: it sent what no rank sends: %w", peer.ErrProtocol, err))
		}
		whole = whole && said[rank].Error == ""
	}
	err = t.giveBack(op)
	if !whole {
		err = errors.Join(failed(step, said, unwhole), err)
	}
	return err
}

// doubt is why what this rank's work made is not whole, although it has ended.
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

// Close gives this rank's side back: unmaps, unbinds, and releases. It waits for
// the work on this rank's devices, and knows nothing of the other ranks': their
// work on the team must be over (see Leave).
//
// Work that has not ended within TeamOptions.CallTimeout, since it waits for a
// rank that has ended, say, is told to (Abort). Where it then ends the team is
// closed, and the error is ErrAborted. Otherwise, or while another call that was
// late has not come back, the team is stuck: Close answers ErrStuck, at once from
// then on, and leaves everything as it is. It may be called again.
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

// passed waits for the work on this rank's devices. What outlasts the limit is
// told to stop waiting for other ranks, and gets as much time again.
func (t *Team) passed(op string) error {
	c := begin("waiting for the GPU's work", func() error {
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

// giveBack tears down within the limit. It goes forward, and may be called again.
func (t *Team) giveBack(op string) error {
	err := t.closer.Close(func() error {
		return t.bounded(op, "giving the team back", func() error { return t.undoTo(0) })
	})
	t.gone = err == nil
	return err
}

// own has Close give something back. It waits for no work.
func (t *Team) own(closing func() error) { t.undo = append(t.undo, closing) }

// undoTo gives back all but the first n things.
func (t *Team) undoTo(n int) error {
	for len(t.undo) > n {
		if err := t.undo[len(t.undo)-1](); err != nil {
			return err
		}
		t.undo = t.undo[:len(t.undo)-1]
	}
	return nil
}

// whole gives back what was made where not all of it could be, so that another
// try finds nothing of it.
func (t *Team) whole(build func() error) error {
	before := len(t.undo)
	err := build()
	if err == nil {
		return nil
	}
	if undo := t.undoTo(before); undo != nil {
		return fmt.Errorf("%w (and undoing it failed, which Close tries again: %w)", err, undo)
	}
	return err
}
