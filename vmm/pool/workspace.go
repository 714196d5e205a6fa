package pool

import (
	"errors"
	"fmt"
	"time"

	"github.com/cuvmm/cuvmm/cuda"
	"github.com/cuvmm/cuvmm/internal/errs"
	"github.com/cuvmm/cuvmm/internal/life"
	"github.com/cuvmm/cuvmm/internal/lock"
)

// Workspace describes a block that Prepare allocates before a capture.
type Workspace struct {
	// Name is the key of Get, unique in a plan.
	Name string
	// Bytes and Align are as in Request.
	Bytes, Align int
	Tag          Tag
}

// Workspaces are blocks by name, which Prepare allocated. The caller closes them. All
// methods are safe for concurrent use.
type Workspaces struct {
	pool *Pool

	mu     lock.Mutex[lock.Long]
	blocks map[string]Block
	graphs int // that were captured with them, and live
	closed bool
	ending life.Ending
}

const prepareOp = "pool.Prepare"

// Prepare allocates the workspaces of a plan for a stream. A capture that uses no other
// memory requests nothing of the pool: its CaptureStats are zero. Workspaces that cannot
// be allocated are missing in the result and named by the error, which joins one for
// each; the caller closes the others. After an error in the plan itself there are none,
// and closing the result does nothing.
func (p *Pool) Prepare(s *cuda.Stream, plan ...Workspace) (*Workspaces, error) {
	if err := p.made(prepareOp); err != nil {
		return nil, err
	}
	w := &Workspaces{pool: p, blocks: map[string]Block{}}
	for _, one := range plan {
		if _, twice := w.blocks[one.Name]; twice {
			return &Workspaces{pool: p}, errs.Invalid(prepareOp, fmt.Sprintf("two workspaces named %q", one.Name), "give each a name of its own")
		}
		w.blocks[one.Name] = Block{}
	}
	clear(w.blocks)
	var missing []error
	for _, one := range plan {
		b, err := p.Alloc(Request{Bytes: one.Bytes, Align: one.Align, Stream: s, Tag: one.Tag})
		if err != nil {
			missing = append(missing, fmt.Errorf("%s: workspace %q of %s: %w", prepareOp, one.Name, errs.Bytes(max(0, one.Bytes)), err))
			continue
		}
		w.blocks[one.Name] = b
	}
	return w, errors.Join(missing...)
}

// Get returns the workspace of a name, if there is one.
func (w *Workspaces) Get(name string) (Block, bool) {
	w.mu.Lock()
	defer w.mu.Unlock()
	b, ok := w.blocks[name]
	return b, ok
}

// Close frees the workspaces in the order of their stream and of the streams named, as
// Pool.Free does. While a graph lives that was captured with them
// (CaptureOptions.Workspaces) it is cuda.ErrInUse. Close is idempotent.
func (w *Workspaces) Close(streams ...*cuda.Stream) error {
	if err := w.made("pool.Workspaces.Close"); err != nil {
		return err
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	err := w.closeLocked(streams)
	w.ending.End(err)
	return err
}

// Released returns the end of the workspaces' closing: their memory is the pool's again,
// for later work of their stream and, when the work before is done, for other streams. It
// can be obtained at any time.
func (w *Workspaces) Released() cuda.Completion {
	return w.ending.Completion()
}

// made refuses workspaces that Prepare did not make.
func (w *Workspaces) made(op string) error {
	if w == nil || w.pool == nil {
		return errs.Invalid(op, "a nil or zero set of workspaces", "make them with Pool.Prepare")
	}
	return nil
}

func (w *Workspaces) closeLocked(streams []*cuda.Stream) error {
	if w.graphs > 0 {
		return errs.New(errs.Failure{Op: "pool.Workspaces.Close", Kind: errs.InUse, Asked: "the workspaces, by " + errs.Count(w.graphs, "graph"),
			Hint: "close the graphs first, and after CloseAfter wait for their Released"})
	}
	w.closed = true
	var errs []error
	for name, b := range w.blocks {
		if err := w.pool.Free(b, streams...); err != nil {
			errs = append(errs, fmt.Errorf("pool.Workspaces.Close: workspace %q: %w", name, err))
			continue
		}
		delete(w.blocks, name)
	}
	return errors.Join(errs...)
}

// hold keeps the workspaces for a capture, and its graph. None are held for nil.
func (w *Workspaces) hold(op string, p *Pool) error {
	if w == nil {
		return nil
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	switch {
	case w.pool == nil:
		return w.made(op)
	case w.pool != p:
		return otherPool(op, "the workspaces are")
	case w.closed:
		return errs.ClosedError(op, "workspaces")
	}
	w.graphs++
	return nil
}

func (w *Workspaces) drop() {
	if w == nil {
		return
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	w.graphs--
}

// captureLimit is how long a capture takes before it is reported, where the
// options do not say.
const captureLimit = time.Minute

// watchdog reports a capture that outlives Options.CaptureLimit through the
// System's logger, and again whenever it has taken twice as long. It reports and
// ends nothing: a capture that is forgotten holds up its streams and whatever
// was freed on them, and only the program knows whether it still goes on.
//
// Its lock comes before the leaves of captures; stop is called with no lock
// held.
type watchdog struct {
	pool    *Pool
	what    string
	pending func() []any
	since   time.Time

	mu    lock.Mutex[lock.Long]
	timer *time.Timer // nil once it was stopped
	next  time.Duration
}

// watchOver reports a capture while it lasts. pending are attributes for the
// log that say what waits for its end; it runs on a goroutine of its own.
func (p *Pool) watchOver(what string, pending func() []any) *watchdog {
	w := &watchdog{pool: p, what: what, pending: pending, since: time.Now(), next: p.o.CaptureLimit}
	switch {
	case w.next < 0:
		return w
	case w.next == 0:
		w.next = captureLimit
	}
	w.mu.Lock() // a short limit may be over at once
	defer w.mu.Unlock()
	w.timer = time.AfterFunc(w.next, w.report)
	return w
}

func (w *watchdog) report() {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.timer == nil {
		return
	}
	attributes := append([]any{"capture", w.what, "for", time.Since(w.since).Round(time.Millisecond), "device", w.pool.dev.String()}, w.pending()...)
	w.pool.sys.Config.Log.Warn("cuvmm: a capture takes long: end it, or raise pool.Options.CaptureLimit", attributes...)
	w.timer.Reset(w.next)
	w.next *= 2
}

// stop ends the watch: nothing is reported after it.
func (w *watchdog) stop() {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.timer != nil {
		w.timer.Stop()
		w.timer = nil
	}
}
