package handles

import (
	"context"
	"fmt"
	"sync"
	"time"
)

// flights are the descriptors that a server has sent and that a client may not
// have read yet. The kernel counts those for the sender's user, within its limit
// of open files, and lets nobody send any where that is reached: a client that
// reads nothing would starve all others.
//
// So at most as many are on their way as may be open, each process has at most a
// quarter of those, and the last quarter is for processes that have none yet.
type flights struct {
	mu      sync.Mutex
	all     map[*flight]struct{}
	changed chan struct{} // closed, and made anew, when some have arrived
}

// flight is one message's.
type flight struct {
	ss    *session
	n     int
	since time.Time
}

// flightShare is the part of all that one process may have on their way, and the
// part that is for those that have none: one in so many.
const flightShare = 4

// take counts n descriptors as sent as soon as they may be. It waits for that
// until the context ends; then it returns nil. Clients that have read nothing for
// Options.Timeout are cut off where others wait for what they hold.
func (l *flights) take(ctx context.Context, ss *session, n int) *flight {
	for moment := time.Millisecond; ; moment = min(2*moment, 50*time.Millisecond) {
		most, _, err := exports.share("handles")
		if err != nil {
			most = batchChunks
		}
		l.mu.Lock()
		if !l.fits(ss, n, most) {
			l.sweep()
		}
		if l.fits(ss, n, most) {
			f := &flight{ss, n, time.Now()}
			if l.all == nil {
				l.all = map[*flight]struct{}{}
			}
			l.all[f] = struct{}{}
			l.mu.Unlock()
			return f
		}
		if l.changed == nil {
			l.changed = make(chan struct{})
		}
		changed := l.changed
		if l.fits(ss, n, 1<<30) {
			l.cutOverdue() // what others hold is in the way
		}
		l.mu.Unlock()
		t := time.NewTimer(moment)
		select {
		case <-changed:
		case <-t.C:
		case <-ctx.Done():
		}
		t.Stop()
		if ctx.Err() != nil {
			return nil
		}
	}
}

// fits reports whether n more may be on their way. The caller has the lock.
func (l *flights) fits(ss *session, n, most int) bool {
	total, own, who := 0, 0, ss.process()
	for f := range l.all {
		total += f.n
		if f.ss.process() == who {
			own += f.n
		}
	}
	if own == 0 {
		return total+n <= max(most, n)
	}
	return own+n <= most/flightShare && total+n <= most-most/flightShare
}

// sweep forgets what was read. The caller has the lock.
func (l *flights) sweep() {
	for f := range l.all {
		if f.ss.conn.sock.Unread() == 0 {
			delete(l.all, f)
		}
	}
}

// cutOverdue ends the sessions of those that do not read. The caller has the lock.
func (l *flights) cutOverdue() {
	for f := range l.all {
		if limit := f.ss.conn.limits.Timeout; time.Since(f.since) > limit {
			delete(l.all, f)
			f.ss.cutLater(failure("handles.Server", ErrTimeout, fmt.Sprintf("%d file descriptors were not read for %v, and others wait for them", f.n, limit),
				"read what the server sends"))
		}
	}
}

// arrived says that a message was read, or was not sent after all.
func (l *flights) arrived(f *flight) {
	if f == nil {
		return
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	delete(l.all, f)
	if l.changed != nil {
		close(l.changed)
		l.changed = nil
	}
}

// ended forgets what a session had, which is over.
func (l *flights) ended(ss *session) {
	l.mu.Lock()
	defer l.mu.Unlock()
	for f := range l.all {
		if f.ss == ss {
			delete(l.all, f)
		}
	}
}
