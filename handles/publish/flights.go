package publish

import (
	"context"
	"fmt"
	"time"

	"github.com/cuvmm/cuvmm/handles/peer"
	"github.com/cuvmm/cuvmm/internal/errs"
	"github.com/cuvmm/cuvmm/internal/fd"
	"github.com/cuvmm/cuvmm/internal/lock"
	"github.com/cuvmm/cuvmm/internal/wait"
	"github.com/cuvmm/cuvmm/internal/wire"
)

// flights counts the descriptors in flight: sent by the server, and possibly not read
// by the client yet. The kernel charges them to the sender's user, up to its limit of
// open files, and then refuses that user any more: a client that reads nothing would
// starve all others.
//
// So at most half of that limit is in flight. A client with unread descriptors gets
// more only while its process has less than a quarter of that half; a client without,
// while a quarter is left; a process without, as long as any are left.
type flights struct {
	mu      lock.Mutex[lock.Leaf]
	all     map[*flight]struct{}
	changed chan struct{} // closed and replaced when a message arrives
}

// flight are the descriptors of one message.
type flight struct {
	ss    *session
	n     int
	since time.Time
}

// flightShare divides the descriptors in flight: one process gets at most one part in
// so many, and one part is reserved for clients that have none.
const flightShare = 4

// acquire counts n descriptors as in flight, and waits until they may be. It returns nil
// if the context ends first. It cuts off clients that have read nothing for
// Options.Timeout while another client waits.
func (l *flights) acquire(ctx context.Context, ss *session, n int) *flight {
	var backoff wait.Backoff
	for {
		if f := l.try(ss, n); f != nil {
			return f
		}
		l.mu.Lock()
		if l.changed == nil {
			l.changed = make(chan struct{})
		}
		changed := l.changed
		l.cutOverdue(ss)
		l.mu.Unlock()
		t := time.NewTimer(backoff.Next())
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

// try is take without waiting: it returns nil instead.
func (l *flights) try(ss *session, n int) *flight {
	most := wire.MaxBatch
	if limit, err := fd.Limit(); err == nil {
		most = int(min(limit, 1<<20)) / 2
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	if !l.fits(ss, n, most) {
		l.sweep()
	}
	if !l.fits(ss, n, most) {
		return nil
	}
	f := &flight{ss, n, time.Now()}
	if l.all == nil {
		l.all = map[*flight]struct{}{}
	}
	l.all[f] = struct{}{}
	return f
}

// fits reports whether n more may be in flight. The caller holds the lock.
func (l *flights) fits(ss *session, n, most int) bool {
	total, ofProcess, ofSession, process := 0, 0, 0, ss.process()
	for f := range l.all {
		total += f.n
		if f.ss.process() == process {
			ofProcess += f.n
		}
		if f.ss == ss {
			ofSession += f.n
		}
	}
	left := most - total - n
	switch {
	case ofProcess == 0:
		return left >= 0 || total == 0
	case ofSession == 0:
		return left >= most/flightShare
	}
	return left >= most/flightShare && ofProcess+n <= most/flightShare
}

// sweep forgets messages that were read. The caller holds the lock.
func (l *flights) sweep() {
	for f := range l.all {
		if f.ss.conn.in.Socket().Unread() == 0 {
			delete(l.all, f)
		}
	}
}

// cutOverdue ends the sessions of clients that do not read while another waits. The
// caller holds the lock.
func (l *flights) cutOverdue(waiting *session) {
	for f := range l.all {
		if limit := f.ss.conn.in.Limits().Timeout; f.ss != waiting && time.Since(f.since) > limit {
			delete(l.all, f)
			f.ss.cutLater(errs.Peer("publish.Server", peer.ErrTimeout, fmt.Sprintf("%d file descriptors were not read for %v, and others wait for them", f.n, limit),
				"read what the server sends"))
		}
	}
}

// arrived notes that a message was read, or was not sent after all.
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

// ended forgets the messages of a session that has ended.
func (l *flights) ended(ss *session) {
	l.mu.Lock()
	defer l.mu.Unlock()
	for f := range l.all {
		if f.ss == ss {
			delete(l.all, f)
		}
	}
}
