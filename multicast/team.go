package multicast

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"time"

	"github.com/cuvmm/cuvmm/cuda"
	"github.com/cuvmm/cuvmm/fabric/rendezvous"
	"github.com/cuvmm/cuvmm/internal/core"
	"github.com/cuvmm/cuvmm/internal/driver"
	"github.com/cuvmm/cuvmm/vmm"
)

// DefaultCallTimeout is how long a rank's part of a step may take where nothing
// else is said.
const DefaultCallTimeout = 10 * time.Second

// TeamOptions describe a team. The zero value works.
type TeamOptions struct {
	// CallTimeout is how long a rank's own driver calls of one step may take; 0
	// is DefaultCallTimeout. It is best shorter than the group's timeout, so that
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
	replicas             []replica
	object               *Object
	bindings             []*Binding
	mapping              *vmm.Mapping

	mu   sync.Mutex
	undo []func() error // the last first
	late *call          // one that has not come back
	gone bool
}

// replica is a device's own memory at its own address.
type replica struct {
	memory *vmm.Allocation
	at     *vmm.Mapping
}

// NewTeam makes a team of the devices of all ranks of a group, with a replica of
// size bytes on each, rounded up to what all of them need; all ranks ask for the
// same size. Every rank calls it, with one device of its own or several of one
// System. The contents of the replicas are undefined.
//
// Where it fails it fails for every rank that is still there, with a *TeamError
// that names those that are the reason, and what was made is given back. The
// group goes on, unless a rank is gone or missed a step, and so the same ranks
// may try again or go on without multicast. They are in step in that: no rank
// falls back alone.
//
// A rank whose driver does not come back in time gets ErrStuck, and a team that
// can only be closed; see Close. In all other cases the team is nil after an
// error.
func NewTeam(ctx context.Context, g *rendezvous.Group, devices []*cuda.Device, size int, o TeamOptions) (*Team, error) {
	const op = "multicast.NewTeam"
	if g == nil {
		return nil, core.Invalid(op, "a nil group", "make one with rendezvous.InProcess, Host or Join")
	}
	if o.CallTimeout <= 0 {
		o.CallTimeout = DefaultCallTimeout
	}
	t := &Team{group: g, devices: append([]*cuda.Device(nil), devices...), timeout: o.CallTimeout, options: o}
	t.mu.Lock()
	defer t.mu.Unlock()
	err := t.form(ctx, size)
	if err == nil {
		return t, nil
	}
	if t.late == nil {
		undo := t.giveBack(op)
		if undo == nil {
			return nil, err
		}
		err = fmt.Errorf("%w (and undoing it failed, which Close tries again: %w)", err, undo)
	}
	return t, err
}

// Ptr is the address at which multimem instructions of this rank's devices reach
// all replicas. It is fixed for life.
func (t *Team) Ptr() cuda.Ptr { return t.mapping.Ptr() }

// Replica is the address of the replica of this rank's i-th device, where that
// device alone has access. It is ordinary memory.
func (t *Team) Replica(i int) cuda.Ptr { return t.replicas[i].at.Ptr() }

// Devices are this rank's, in the order in which they were given.
func (t *Team) Devices() []*cuda.Device { return append([]*cuda.Device(nil), t.devices...) }

// Size of each replica, in bytes.
func (t *Team) Size() int { return t.size }

// Members is how many devices the team has, of all ranks.
func (t *Team) Members() int { return t.members }

// First is the number of this rank's first device in the team: devices are
// counted from 0, rank by rank.
func (t *Team) First() int { return t.first }

// String writes "team of 4 devices, 2 MiB each".
func (t *Team) String() string {
	return fmt.Sprintf("team of %s, %s each", core.Count(t.members, "device"), core.Bytes(t.size))
}

// Leave waits for the work on this rank's devices, tells the other ranks, waits
// until all of them leave too, and closes the team, also where that fails. So no
// rank's kernels find a replica gone. The work must end within
// TeamOptions.CallTimeout.
func (t *Team) Leave(ctx context.Context) error {
	const op = "multicast.Team.Leave"
	t.mu.Lock()
	defer t.mu.Unlock()
	if err := t.stuck(op); err != nil {
		return err
	}
	if t.gone {
		return closedTeam(op)
	}
	_, err := t.step(ctx, "leave", func() (offering, error) {
		var on []driver.Device
		for _, d := range t.devices {
			on = append(on, driver.Device(d.Ordinal()))
		}
		return offering{}, core.SystemOf(t.devices[0]).WaitDevices(op, on)
	})
	if t.late != nil {
		return err
	}
	return errors.Join(err, t.giveBack(op))
}

// Close gives this rank's side back: unmaps, unbinds, and releases. It waits for
// the work of this System, and knows nothing of the other ranks': their work on
// the team must be over (see Leave).
//
// While a call that was late has not come back the team is stuck: Close answers
// ErrStuck at once and leaves everything as it is. It may be called again. Work
// that does not end in time makes the team stuck too.
func (t *Team) Close() error {
	const op = "multicast.Team.Close"
	t.mu.Lock()
	defer t.mu.Unlock()
	if err := t.stuck(op); err != nil {
		return err
	}
	return t.giveBack(op)
}

// giveBack tears down within the limit. It goes forward, and may be called again.
func (t *Team) giveBack(op string) error {
	if t.gone {
		return nil
	}
	err := t.bounded(op, "giving the team back", func() error {
		for len(t.undo) > 0 {
			if err := t.undo[len(t.undo)-1](); err != nil {
				return err
			}
			t.undo = t.undo[:len(t.undo)-1]
		}
		return nil
	})
	if err == nil {
		t.gone = true
	}
	return err
}
