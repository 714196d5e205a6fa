package rendezvous

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"time"
	"unicode/utf8"

	"github.com/cuvmm/cuvmm/cuda"
	"github.com/cuvmm/cuvmm/handles/peer"
	"github.com/cuvmm/cuvmm/internal/wire"
)

// DefaultTimeout is the default of Options.Timeout.
const DefaultTimeout = 30 * time.Second

// farewell bounds how long a rank that gives up waits for the outcome of the step.
const farewell = time.Second

// defaultLag is the default of Group.lag.
const defaultLag = time.Second

// Options configure a group. The zero value works.
type Options struct {
	// Timeout bounds each step, for all ranks together; 0 is
	// DefaultTimeout. A context may end a step earlier.
	Timeout time.Duration
}

// Check returns an error for options that no group can have. Functions that make a group
// call it.
func (o Options) Check() error {
	if o.Timeout < 0 {
		return fmt.Errorf("%w: a timeout of %v: use 0 for %v, or more", cuda.ErrInvalidArgument, o.Timeout, DefaultTimeout)
	}
	return nil
}

func (o Options) withDefaults() Options {
	if o.Timeout == 0 {
		o.Timeout = DefaultTimeout
	}
	return o
}

// Group is one rank's side of a group. One step runs at a time; all methods are
// safe for concurrent use. The caller closes it.
type Group struct {
	transport Transport
	timeout   time.Duration
	lag       time.Duration // how long the event of another rank's end may lag behind its effects

	// mu is held throughout a step.
	mu      sync.Mutex
	state   *state
	asked   string         // the step that this rank called last
	arrived []Contribution // by rank, to the open step
	broken  error

	closing sync.Once
	closed  chan struct{}
}

// New makes a group over a transport and takes ownership of it.
func New(t Transport, o Options) *Group {
	return &Group{transport: t, timeout: o.withDefaults().Timeout, lag: defaultLag, state: newState(t.Size()), closed: make(chan struct{}),
		arrived: make([]Contribution, t.Size())}
}

// Rank returns this side's rank, counted from 0.
func (g *Group) Rank() int { return g.transport.Rank() }

// Size returns how many ranks the group has.
func (g *Group) Size() int { return g.transport.Size() }

// CarriesFiles reports whether Exchange takes files, which do not travel between hosts.
func (g *Group) CarriesFiles() bool { return g.transport.CarriesFiles() }

// Barrier waits until all ranks have arrived.
func (g *Group) Barrier(ctx context.Context, name string) error {
	_, err := g.AllGather(ctx, name, nil)
	return err
}

// AllGather waits until all ranks have arrived and returns their contributions, by
// rank: at most MaxBody bytes each.
func (g *Group) AllGather(ctx context.Context, name string, mine []byte) ([][]byte, error) {
	all, err := g.Exchange(ctx, name, Contribution{Body: mine})
	if err != nil {
		return nil, err
	}
	bodies := make([][]byte, len(all))
	for r := range all {
		bodies[r] = all[r].Body
		all[r].Close()
	}
	return bodies, nil
}

// Exchange is AllGather with files, at most MaxFiles from each rank. This rank's
// contribution stays the caller's and is returned as a copy. The caller owns the
// returned files (Contribution.Close).
//
// The name must be the same for all ranks. A step has one outcome: either all
// ranks get all contributions, or all get an [Error] of the same kind, ranks and
// reason. A rank that has not received the outcome a second after its limit, because the
// host hangs, returns an error alone. After any error the group
// is over, and every later step returns the same error.
func (g *Group) Exchange(ctx context.Context, name string, mine Contribution) ([]Contribution, error) {
	g.mu.Lock()
	defer g.mu.Unlock()
	if g.broken != nil {
		return nil, g.broken
	}
	g.asked = name
	s := Step{Number: g.state.step, Name: name}
	began := time.Now()
	ctx, cancel := context.WithTimeout(ctx, g.timeout)
	defer cancel()
	own, err := g.copyOf(s, mine)
	if err == nil {
		g.arrived[g.Rank()] = own
		err = g.transport.Post(ctx, s, mine)
		if err != nil {
			err = g.unposted(ctx, s, began, err)
		}
	}
	if err != nil {
		err = g.withdraw(Event{Kind: Failed, Rank: g.Rank(), Step: s, Reason: reasonOf(err)}, err)
	} else if err = g.follow(ctx, s.Number); err != nil {
		err = g.interrupted(ctx, s, began, err)
	}
	if err != nil {
		return nil, err
	}
	all := g.arrived
	g.arrived = make([]Contribution, g.Size())
	return all, nil
}

// follow takes events until the step is complete, and then returns nil, or until the group
// has ended, and then returns its error. Any other error is the transport's.
func (g *Group) follow(ctx context.Context, step uint64) error {
	for g.state.step == step && g.state.end == nil {
		if err := g.receive(ctx); err != nil {
			return err
		}
	}
	if g.state.step > step {
		return nil
	}
	return g.finish(g.verdict(nil))
}

// receive applies the next event of the transport.
func (g *Group) receive(ctx context.Context) error {
	e, err := g.transport.Next(ctx)
	if err != nil {
		return err
	}
	if counts := g.state.apply(&e); !counts || e.Kind != Posted || e.Rank == g.Rank() {
		e.Contribution.Close()
	} else {
		g.arrived[e.Rank] = e.Contribution
	}
	return nil
}

// verdict returns the error that all ranks return, with this rank's own cause if
// it is the reason.
func (g *Group) verdict(cause error) error {
	e := *g.state.end
	if g.state.cause.Rank == g.Rank() {
		e.cause = cause
	}
	return &e
}

// finish ends this side of the group with an error.
func (g *Group) finish(err error) error {
	g.broken = err
	g.drop()
	return err
}

// interrupted handles a wait that the transport did not end with an outcome.
func (g *Group) interrupted(ctx context.Context, s Step, began time.Time, err error) error {
	switch {
	case g.broken != nil:
		return err
	case g.isClosed():
		return g.finish(&Error{Step: s, kind: cuda.ErrClosed, Reason: "the group was closed"})
	case ctx.Err() == nil:
		e := &Error{Step: s, Ranks: []int{g.Rank()}, kind: ErrFailed, Reason: "the group's connection failed: " + err.Error(), cause: err}
		return g.withdraw(Event{Kind: Failed, Rank: g.Rank(), Step: s, Reason: e.Reason}, e)
	}
	mine := late(ctx, s, g.state.absent(g.Rank()), time.Since(began))
	e := Event{Kind: Late, Rank: g.Rank(), Step: s, Reason: mine.Reason}
	if !errors.Is(mine, peer.ErrTimeout) {
		e.Kind, e.Reason = Failed, fmt.Sprintf("its caller's context ended before the arrival of %s: %v", ranks(mine.Ranks), context.Cause(ctx))
	}
	return g.withdraw(e, mine)
}

// withdraw gives up a step for this rank, and returns the outcome that all ranks
// agree on: nil if the step was complete before that. If the outcome
// stays unknown, it returns this rank's own error.
func (g *Group) withdraw(e Event, mine error) error {
	ctx, cancel := context.WithTimeout(context.Background(), farewell)
	defer cancel()
	e.Reason = wire.Clip(e.Reason, MaxReason) // as it travels: all ranks return the same
	if g.transport.Fail(ctx, e) != nil {
		ctx = ended // earlier events are still queued, and may explain the failure
	}
	switch err := g.follow(ctx, e.Step.Number); {
	case err == nil:
		return nil
	case g.broken == nil:
		return g.finish(mine)
	}
	var known *Error
	if g.state.cause.Kind == Ended && errors.As(mine, &known) && slices.Equal(known.Ranks, g.state.end.Ranks) {
		return g.finish(mine) // mine says how the transport failed
	}
	return g.finish(g.verdict(causeOf(mine)))
}

// unposted returns the error of a rank that could not arrive.
func (g *Group) unposted(ctx context.Context, s Step, began time.Time, err error) error {
	var known *Error
	switch {
	case g.isClosed():
		return &Error{Step: s, kind: cuda.ErrClosed, Reason: "the group was closed"}
	case errors.As(err, &known):
		return err
	case ctx.Err() == nil:
		return &Error{Step: s, Ranks: []int{g.Rank()}, kind: ErrFailed, Reason: "it could not announce its arrival: " + err.Error(), cause: err}
	}
	e := late(ctx, s, []int{g.Rank()}, time.Since(began))
	if errors.Is(e, peer.ErrTimeout) {
		e.Reason = fmt.Sprintf("could not announce its arrival within %v", time.Since(began).Round(time.Millisecond))
		e.Hint = "check whether the group's transport responds to this rank"
	}
	return e
}

// copyOf checks and copies this rank's contribution.
func (g *Group) copyOf(s Step, c Contribution) (Contribution, error) {
	invalid := func(format string, args ...any) (Contribution, error) {
		return Contribution{}, &Error{Step: s, Ranks: []int{g.Rank()}, kind: cuda.ErrInvalidArgument, Reason: fmt.Sprintf(format, args...)}
	}
	switch {
	case len(s.Name) > MaxName:
		return invalid("a name of %d bytes, of %d at most", len(s.Name), MaxName)
	case !utf8.ValidString(s.Name):
		return invalid("a name that is not UTF-8: %q", s.Name)
	case len(c.Body) > MaxBody:
		return invalid("%d bytes, of %d at most: share the memory itself, in fewer and larger chunks", len(c.Body), MaxBody)
	case len(c.Files) > MaxFiles:
		return invalid("%d files, of %d at most: share memory in fewer, larger chunks", len(c.Files), MaxFiles)
	case len(c.Files) > 0 && !g.CarriesFiles():
		return Contribution{}, &Error{Step: s, Ranks: []int{g.Rank()}, kind: cuda.ErrNotSupported,
			Reason: "files do not travel between hosts", Hint: "share by fabric handles"}
	case slices.Contains(c.Files, nil):
		return invalid("file %d is nil: pass open ones", slices.Index(c.Files, nil))
	}
	own, err := c.dup()
	if err != nil {
		return own, &Error{Step: s, Ranks: []int{g.Rank()}, kind: ErrFailed, Reason: err.Error(), cause: err}
	}
	return own, nil
}

// Fail ends the group for all ranks because this one cannot go on: their steps
// return ErrFailed with its rank and the reason, unless the group ended before.
// Fail waits for a running step of this rank.
func (g *Group) Fail(reason error) {
	g.mu.Lock()
	defer g.mu.Unlock()
	if reason == nil {
		reason = errors.New("it gave no reason")
	}
	if g.broken == nil {
		_ = g.giveUp("", reason) // the step's name at the other ranks is unknown here
	}
}

// giveUp ends the group at the open step, at which this rank has not arrived. The
// caller holds mu.
func (g *Group) giveUp(name string, reason error) error {
	s := Step{Number: g.state.step, Name: name}
	mine := &Error{Step: s, Ranks: []int{g.Rank()}, kind: ErrFailed, Reason: reason.Error(), cause: reason}
	return g.withdraw(Event{Kind: Failed, Rank: g.Rank(), Step: s, Reason: mine.Reason}, mine)
}

// failAt is Fail at a named step, and returns the outcome. This rank's error may be the
// effect of another rank's end, whose event comes a moment later: then that end is the
// outcome.
func (g *Group) failAt(name string, met error) error {
	g.mu.Lock()
	defer g.mu.Unlock()
	if g.broken != nil {
		return g.broken
	}
	g.asked = name
	ctx, cancel := context.WithTimeout(context.Background(), min(g.lag, g.timeout))
	defer cancel()
	for g.state.end == nil && len(g.state.lost()) == 0 && g.receive(ctx) == nil {
		continue
	}
	err := g.giveUp(name, met)
	if !errors.Is(err, met) {
		err = fmt.Errorf("%w (and here: %w)", err, met)
	}
	return err
}

// Close leaves the group. Ranks that still need this one get peer.ErrGone. It ends a
// running step. Idempotent.
func (g *Group) Close() (err error) {
	g.closing.Do(func() {
		close(g.closed)
		err = g.transport.Close(g.decided())
		g.mu.Lock()
		defer g.mu.Unlock()
		if g.broken == nil {
			g.broken = &Error{Step: Step{g.state.step, g.asked}, kind: cuda.ErrClosed, Reason: "the group was closed"}
		}
		g.drop()
	})
	return err
}

// decided returns the event that ended the group, if it is known and no step runs.
func (g *Group) decided() *Event {
	if !g.mu.TryLock() {
		return nil
	}
	defer g.mu.Unlock()
	if g.state.end == nil {
		return nil
	}
	e := g.state.cause.echo()
	if e.Kind == Posted {
		e.Kind, e.Reason = Failed, g.state.end.Reason
	}
	return &e
}

func (g *Group) isClosed() bool {
	select {
	case <-g.closed:
		return true
	default:
		return false
	}
}

// drop closes the contributions to a step that will never be complete.
func (g *Group) drop() {
	for r := range g.arrived {
		g.arrived[r].Close()
	}
}
