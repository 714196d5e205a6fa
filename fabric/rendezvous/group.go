package rendezvous

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"time"

	"github.com/cuvmm/cuvmm/cuda"
	"github.com/cuvmm/cuvmm/handles"
)

// DefaultTimeout is how long a step may take where nothing else is said.
const DefaultTimeout = 30 * time.Second

// farewell is how long a rank that gives up tries to tell the others.
const farewell = time.Second

// moment is how long word of another rank's end may come after its effects.
const moment = 250 * time.Millisecond

// Options describe a group. The zero value works.
type Options struct {
	// Timeout is how long each step may take, all ranks together; 0 is
	// DefaultTimeout. A context may end a step earlier.
	Timeout time.Duration
}

func (o Options) withDefaults() Options {
	if o.Timeout <= 0 {
		o.Timeout = DefaultTimeout
	}
	return o
}

// over is a context that has ended.
var over = func() context.Context {
	ctx, cancel := context.WithCancel(context.Background())
	cancel()
	return ctx
}()

// Group is one rank's side of a group. One step runs at a time; all methods are
// safe for use by any goroutine. The caller closes it.
type Group struct {
	board   Board
	timeout time.Duration

	// mu is held for the whole of a step.
	mu      sync.Mutex
	step    Step
	arrived []map[uint64]arrival // by rank, those that are still needed
	gone    map[int]Event
	ended   *Event
	broken  error

	closing sync.Once
	closed  chan struct{}
}

type arrival struct {
	name   string
	parcel Parcel
}

// New makes a group of a board, which it takes over.
func New(b Board, o Options) *Group {
	g := &Group{board: b, timeout: o.withDefaults().Timeout, gone: map[int]Event{}, closed: make(chan struct{}),
		arrived: make([]map[uint64]arrival, b.Size())}
	for r := range g.arrived {
		g.arrived[r] = map[uint64]arrival{}
	}
	return g
}

// Rank is this side's rank, from 0 on.
func (g *Group) Rank() int { return g.board.Rank() }

// Size is how many ranks the group has.
func (g *Group) Size() int { return g.board.Size() }

// CarriesFiles reports whether Exchange takes files: not between hosts.
func (g *Group) CarriesFiles() bool { return g.board.CarriesFiles() }

// Barrier waits until all ranks have arrived.
func (g *Group) Barrier(ctx context.Context, name string) error {
	_, err := g.AllGather(ctx, name, nil)
	return err
}

// AllGather waits until all ranks have arrived, and answers what they brought,
// by rank: at most MaxBody bytes each.
func (g *Group) AllGather(ctx context.Context, name string, mine []byte) ([][]byte, error) {
	all, err := g.Exchange(ctx, name, Parcel{Body: mine})
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
// parcel stays the caller's, and comes back as a copy; the files of the answer
// are the caller's, who closes them (Parcel.Close).
//
// The name must be the same for all ranks. After any error the group is over:
// the others are told, and every later step answers the same error.
func (g *Group) Exchange(ctx context.Context, name string, mine Parcel) ([]Parcel, error) {
	g.mu.Lock()
	defer g.mu.Unlock()
	if g.broken != nil {
		return nil, g.broken
	}
	s := Step{Number: g.step.Number, Name: name}
	g.step = s
	if err := g.check(s, mine); err != nil {
		return nil, g.give(s, err)
	}
	began := time.Now()
	ctx, cancel := context.WithTimeout(ctx, g.timeout)
	defer cancel()
	if err := g.board.Post(ctx, s, mine); err != nil {
		return nil, g.give(s, g.before(over, s, g.unposted(ctx, s, began, err)))
	}
	for {
		missing, err := g.missing(s)
		if err != nil {
			return nil, g.give(s, err)
		}
		wait := ctx
		if len(missing) == 0 {
			wait = over // all are here: only see whether one of them gave up since
		}
		e, err := g.board.Next(wait)
		if err != nil && len(missing) == 0 {
			break
		}
		if err != nil {
			return nil, g.give(s, g.explain(ctx, s, missing, began, err))
		}
		if err := g.apply(s, e); err != nil {
			return nil, g.give(s, err)
		}
	}
	own, err := mine.dup()
	if err != nil {
		return nil, g.give(s, &Error{Step: s, kind: ErrFailed, Ranks: []int{g.Rank()}, cause: err})
	}
	all := make([]Parcel, g.Size())
	for r := range all {
		all[r] = g.arrived[r][s.Number].parcel
		delete(g.arrived[r], s.Number)
	}
	all[g.Rank()] = own
	g.step.Number++
	return all, nil
}

// check refuses what could not travel, before the others hear of it.
func (g *Group) check(s Step, p Parcel) error {
	invalid := func(format string, args ...any) error {
		return &Error{Step: s, Ranks: []int{g.Rank()}, kind: cuda.ErrInvalidArgument, Reason: fmt.Sprintf(format, args...)}
	}
	switch {
	case len(s.Name) > MaxName:
		return invalid("a name of %d bytes, of %d at most", len(s.Name), MaxName)
	case len(p.Body) > MaxBody:
		return invalid("%d bytes, of %d at most: share the memory itself instead, in fewer and larger chunks", len(p.Body), MaxBody)
	case len(p.Files) > MaxFiles:
		return invalid("%d files, of %d at most: share memory in fewer, larger chunks", len(p.Files), MaxFiles)
	case len(p.Files) > 0 && !g.CarriesFiles():
		return &Error{Step: s, Ranks: []int{g.Rank()}, kind: cuda.ErrNotSupported,
			Reason: "files do not travel between hosts", Hint: "share by fabric handles"}
	case slices.Contains(p.Files, nil):
		return invalid("file %d is nil: pass open ones", slices.Index(p.Files, nil))
	}
	return nil
}

// missing are the ranks that have yet to arrive at a step; those that will not
// any more are an error.
func (g *Group) missing(s Step) (all []int, err error) {
	var never []int
	var last Event
	for r := range g.arrived {
		if _, ok := g.arrived[r][s.Number]; ok || r == g.Rank() {
			continue
		}
		if e, ok := g.gone[r]; ok {
			never, last = append(never, r), e
		}
		all = append(all, r)
	}
	switch {
	case len(all) == 0:
		return nil, nil
	case g.ended != nil:
		return nil, &Error{Step: s, Ranks: []int{g.ended.Rank}, kind: handles.ErrGone, Reason: g.ended.Reason}
	case len(never) == 0:
		return all, nil
	}
	e := &Error{Step: s, Ranks: never, kind: handles.ErrGone, Reason: last.Reason}
	if last.Kind == Left {
		e.Reason = "left the group before this step"
	}
	return nil, e
}

// apply takes in what another rank did.
func (g *Group) apply(s Step, e Event) error {
	if e.Rank < 0 || e.Rank >= g.Size() || e.Rank == g.Rank() && e.Kind != Ended {
		e.Parcel.Close()
		return &Error{Step: s, kind: handles.ErrProtocol, Reason: fmt.Sprintf("an event of rank %d in a group of %d", e.Rank, g.Size())}
	}
	switch e.Kind {
	case Posted:
		// All others wait for this rank, so none is more than a step ahead.
		_, twice := g.arrived[e.Rank][e.Step.Number]
		if twice || e.Step.Number < s.Number || e.Step.Number > s.Number+1 {
			e.Parcel.Close()
			return &Error{Step: s, Ranks: []int{e.Rank}, kind: handles.ErrProtocol, Reason: fmt.Sprintf("arrived at step %d", e.Step.Number)}
		}
		g.arrived[e.Rank][e.Step.Number] = arrival{e.Step.Name, e.Parcel}
		if e.Step.Number == s.Number && e.Step.Name != s.Name {
			return &Error{Step: s, Ranks: []int{e.Rank}, kind: ErrDisagree,
				Reason: fmt.Sprintf("is at %q", e.Step.Name), Hint: "all ranks call the same steps in the same order"}
		}
	case Failed:
		return &Error{Step: s, Ranks: []int{e.Rank}, kind: ErrFailed, Reason: e.Reason}
	case Left, Lost:
		if _, known := g.gone[e.Rank]; !known {
			g.gone[e.Rank] = e
		}
	case Ended:
		g.ended = &e
	}
	return nil
}

// before is what others did that explains why this rank could not arrive, or
// that what carries the group ended, where the error blames this rank alone;
// where nothing is heard until the context ends, it is the error itself.
func (g *Group) before(ctx context.Context, s Step, err error) error {
	var mine *Error
	alone := errors.As(err, &mine) && slices.Equal(mine.Ranks, []int{g.Rank()})
	for g.ended == nil || !alone {
		e, none := g.board.Next(ctx)
		if none != nil {
			break
		}
		if why := g.apply(s, e); why != nil {
			return why
		}
	}
	var lost []int
	var last Event
	for r, e := range g.gone {
		if e.Kind == Lost {
			lost, last = append(lost, r), e
		}
	}
	switch {
	case len(lost) == 0 && g.ended != nil && alone:
		return &Error{Step: s, Ranks: []int{g.ended.Rank}, kind: handles.ErrGone, Reason: g.ended.Reason}
	case len(lost) == 0:
		return err
	}
	slices.Sort(lost)
	return &Error{Step: s, Ranks: lost, kind: handles.ErrGone, Reason: last.Reason}
}

// unposted says why this rank could not arrive.
func (g *Group) unposted(ctx context.Context, s Step, began time.Time, err error) error {
	err = g.explain(ctx, s, []int{g.Rank()}, began, err)
	var e *Error
	if errors.As(err, &e) && errors.Is(e, handles.ErrTimeout) && slices.Equal(e.Ranks, []int{g.Rank()}) {
		e.Reason = fmt.Sprintf("could not tell the others of its arrival within %v", time.Since(began).Round(time.Millisecond))
		e.Hint = "see whether what carries the group answers this rank"
	}
	return err
}

// explain says why a call of the board failed, where these ranks are the reason
// if nothing else is.
func (g *Group) explain(ctx context.Context, s Step, ranks []int, began time.Time, err error) error {
	select {
	case <-g.closed:
		return &Error{Step: s, kind: cuda.ErrClosed, Reason: "the group was closed"}
	default:
	}
	var known *Error
	if errors.As(err, &known) {
		return err
	}
	if ctx.Err() != nil {
		return late(ctx, s, ranks, time.Since(began))
	}
	return &Error{Step: s, Ranks: ranks, kind: ErrFailed, Reason: "the group's connection failed", cause: err}
}

// give ends the group with an error, and tells the others.
func (g *Group) give(s Step, err error) error {
	g.broken = err
	ctx, cancel := context.WithTimeout(context.Background(), farewell)
	defer cancel()
	_ = g.board.Fail(ctx, s, err.Error()) // those that do not hear of it see their own limit
	g.drop()
	return err
}

// Fail ends the group for all ranks, since this one cannot go on. Their steps
// answer ErrFailed with its rank and the reason. A step of this rank that runs
// comes to its end before.
func (g *Group) Fail(reason error) {
	g.mu.Lock()
	defer g.mu.Unlock()
	if g.broken == nil {
		_ = g.give(g.step, &Error{Step: g.step, Ranks: []int{g.Rank()}, kind: ErrFailed, cause: reason})
	}
}

// giveUp is Fail at a step that this rank has yet to arrive at. What it met may
// come of another rank's end, of which it is told a moment later: then that is
// the error.
func (g *Group) giveUp(name string, met error) error {
	g.mu.Lock()
	defer g.mu.Unlock()
	if g.broken != nil {
		return g.broken
	}
	g.step.Name = name
	ctx, cancel := context.WithTimeout(context.Background(), min(moment, g.timeout))
	defer cancel()
	mine := &Error{Step: g.step, Ranks: []int{g.Rank()}, kind: ErrFailed, cause: met}
	err := g.before(ctx, g.step, mine)
	if !errors.Is(err, mine) {
		err = fmt.Errorf("%w (and here: %w)", err, met)
	}
	return g.give(g.step, err)
}

// Close leaves the group. Ranks that still need this one are told so. It ends a
// step that runs.
func (g *Group) Close() (err error) {
	g.closing.Do(func() {
		close(g.closed)
		err = g.board.Close()
		g.mu.Lock()
		defer g.mu.Unlock()
		if g.broken == nil {
			g.broken = &Error{Step: g.step, kind: cuda.ErrClosed, Reason: "the group was closed"}
		}
		g.drop()
	})
	return err
}

// drop closes what arrived and nobody will ask for.
func (g *Group) drop() {
	for r := range g.arrived {
		for n, a := range g.arrived[r] {
			a.parcel.Close()
			delete(g.arrived[r], n)
		}
	}
}
