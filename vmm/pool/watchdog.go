package pool

import (
	"sync"
	"time"
)

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

	mu    sync.Mutex
	timer *time.Timer // nil once it was stopped
	next  time.Duration
}

// watchOver reports a capture while it lasts. pending are attributes for the
// log that say what waits for its end; it is asked on a goroutine of its own.
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
