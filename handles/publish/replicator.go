package publish

import (
	"context"
	"errors"
	"time"

	"github.com/cuvmm/cuvmm/handles/peer"
	"github.com/cuvmm/cuvmm/internal/exchange"
	"github.com/cuvmm/cuvmm/internal/phys"
	"github.com/cuvmm/cuvmm/internal/wait"
	"github.com/cuvmm/cuvmm/internal/wire"
)

// replicator sends a publication's updates to one follower, on a goroutine of its own,
// so that a slow follower delays no other.
type replicator struct {
	p     *Publication
	on    *session
	token token
	page  *page
	slot  *pageSlot // of the page
	file  *peer.FD  // the page's, for the follower
	since time.Time
	wake  chan struct{} // holds one

	// Guarded by the publication's mu.
	progress *progress
	before   uint64    // see halves
	asked    time.Time // when the last update was prepared
	// ready is the next update to send, with its exports if they are open.
	ready  *update
	adds   []*phys.Handle
	fds    []*peer.FD
	ending *ended
	// flight are the descriptors of the update in flight.
	flight *flight
	// running is set while the goroutine runs: only then is a prepared update sent soon.
	running bool
}

// batchNow returns how many chunks an update may bring, so that their descriptors fit
// into the budget of open ones.
func batchNow() int {
	most, _, err := exchange.Exports.Limit("publish")
	if err != nil {
		return 1
	}
	return min(wire.MaxBatch, most)
}

// poke makes the goroutine look again.
func (f *replicator) poke() {
	select {
	case f.wake <- struct{}{}:
	default:
	}
}

// end makes the goroutine remove the follower from the publication, send the last
// view, and end. Of several last views the first counts.
func (f *replicator) end(m *ended) {
	f.p.mu.Lock()
	if f.ending == nil {
		f.ending = m
		if _, there := f.p.followers[f]; there {
			f.slot.word(cutWord).Store(cutLeft) // from now on it is not waited for
		}
	}
	f.p.mu.Unlock()
	f.poke()
}

// prepareLocked prepares the next update. With shared it takes a share of the exports
// that are open, so that all followers that receive the same memory at the same time
// share them. The caller holds the publication's mu.
func (p *Publication) prepareLocked(f *replicator, shared bool) {
	if f.ready != nil || f.ending != nil || p.withdrawn || !f.running {
		return
	}
	u, add := f.progress.next(p.view, batchNow())
	if u == nil {
		return
	}
	u.token, f.asked = f.token, time.Now()
	f.ready, f.adds, f.fds = u, nil, nil
	at := int(u.keep)
	for i := range add {
		h := p.mem.Chunks[at+i].Handle
		h.Retain()
		f.adds = append(f.adds, h)
	}
	if shared {
		f.fds = p.exports.Share(f.adds)
	}
}

// run sends updates until the connection or the publication ends.
func (f *replicator) run(ctx context.Context) {
	defer f.finished()
	defer f.discard()
	f.p.mu.Lock()
	f.running = true
	f.p.mu.Unlock()
	for {
		select {
		case <-f.wake:
		case <-ctx.Done():
			return
		}
		f.p.mu.Lock()
		last := f.ending
		if last == nil {
			f.p.prepareLocked(f, false)
		}
		u, adds, fds := f.ready, f.adds, f.fds
		f.ready, f.adds, f.fds = nil, nil, nil
		f.p.mu.Unlock()
		if last != nil {
			f.release(adds, fds)
			f.drop()
			if err := f.on.part(ctx, f, last); err != nil {
				f.on.cut(err)
			}
			return
		}
		if u != nil && !f.send(ctx, u, adds, fds) {
			return
		}
	}
}

// finished is called when the goroutine ends, or never begins.
func (f *replicator) finished() {
	f.p.drop()
	f.on.server.replicating.Done()
}

// send sends an update, and returns false if the goroutine must end. It keeps
// descriptors open only briefly, because the other followers lack what one of them does
// not read.
func (f *replicator) send(ctx context.Context, u *update, adds []*phys.Handle, fds []*peer.FD) bool {
	const op = "publish: send an update"
	conn := f.on.conn
	defer f.release(adds, nil)
	fds, ok := f.board(ctx, adds, fds)
	if !ok {
		return false
	}
	var limit time.Time // by which a follower that does not read must do so; zero while it reads
	for {
		if fds == nil && len(adds) > 0 {
			began := time.Now()
			var err error
			if fds, err = f.export(ctx, op, adds); err != nil {
				f.exportFailed(ctx, err)
				return ctx.Err() == nil // to send the last view
			}
			if !limit.IsZero() { // the follower is not to blame for the export
				limit = limit.Add(time.Since(began))
			}
		}
		err := conn.in.SendWithin(ctx, op, pack(u, fds...), unreadTimeout)
		if fds != nil {
			f.p.exports.Close(fds)
			fds = nil
		}
		switch {
		case err == nil:
			return true
		case errors.Is(err, peer.ErrOpenFiles): // nor for a lack of descriptors
			if limit = (time.Time{}); !wait.Sleep(ctx, unreadTimeout) {
				return false
			}
			continue
		case limit.IsZero():
			limit = time.Now().Add(conn.in.Limits().Timeout)
		}
		if !errors.Is(err, peer.ErrTimeout) || !conn.writable(ctx, limit) {
			if ctx.Err() == nil {
				f.on.cut(err) // or a follower would wait for ever on a connection that is still open
			}
			return false
		}
	}
}

// unreadTimeout is how long descriptors stay open for a follower that does not read.
const unreadTimeout = 10 * time.Millisecond

// board counts the descriptors of an update as in flight, waiting for that if it must.
// It closes the exports before it waits, and returns the open ones, or false if the
// context ended.
func (f *replicator) board(ctx context.Context, adds []*phys.Handle, fds []*peer.FD) ([]*peer.FD, bool) {
	if len(adds) == 0 {
		return fds, true
	}
	l := &f.on.server.flights
	flight := l.try(f.on, len(adds))
	if flight == nil {
		if fds != nil {
			f.p.exports.Close(fds)
			fds = nil
		}
		if flight = l.acquire(ctx, f.on, len(adds)); flight == nil {
			return nil, false
		}
	}
	f.p.mu.Lock()
	f.flight = flight
	f.p.mu.Unlock()
	return fds, true
}

// exportFailed ends a follower whose memory could not be exported, unless it is leaving
// already.
func (f *replicator) exportFailed(ctx context.Context, err error) {
	if errors.Is(err, peer.ErrOpenFiles) || ctx.Err() != nil {
		return
	}
	f.on.server.log.Error("cuvmm: memory could not be exported to a follower, which is told so",
		"publication", f.p.name, "follower", f.on.String(), "error", err)
	f.end(&ended{f.token, 0, Ended, statusFailed, err.Error()})
}

// export opens descriptors. It waits for the budget for as long as the follower stays,
// because no holder keeps descriptors for long; it returns ErrOpenFiles if the follower
// is leaving.
func (f *replicator) export(ctx context.Context, op string, adds []*phys.Handle) ([]*peer.FD, error) {
	for {
		limited, cancel := context.WithTimeout(ctx, f.on.conn.in.Limits().Timeout)
		fds, err := f.p.exports.Open(limited, op, adds)
		cancel()
		if !errors.Is(err, peer.ErrOpenFiles) || ctx.Err() != nil || f.leaving() {
			return fds, err
		}
	}
}

func (f *replicator) leaving() bool {
	f.p.mu.Lock()
	defer f.p.mu.Unlock()
	return f.ending != nil
}

// discard releases an update that was prepared and will not be sent, and lets no other
// be prepared.
func (f *replicator) discard() {
	f.p.mu.Lock()
	f.running = false
	adds, fds := f.adds, f.fds
	f.adds, f.fds = nil, nil
	f.p.mu.Unlock()
	f.release(adds, fds)
}

func (f *replicator) release(adds []*phys.Handle, fds []*peer.FD) {
	if fds != nil {
		f.p.exports.Close(fds)
	}
	if err := phys.ReleaseAll("publish: release memory that was sent", adds...); err != nil {
		f.on.server.log.Error("cuvmm: memory that was sent to a follower could not be released", "error", err)
	}
}

// drop removes the follower from its publication, and recycles its word when the
// publication's stream has passed. It waits for other changes of the publication, so it
// never runs on a goroutine that serves other followers.
func (f *replicator) drop() {
	p := f.p
	p.changes <- struct{}{}
	defer p.changes.Give()
	p.mu.Lock()
	_, there := p.followers[f]
	delete(p.followers, f)
	if there {
		f.slot.word(cutWord).Store(cutLeft)
	}
	p.changeLocked()
	p.mu.Unlock()
	if there {
		pool := &p.server.pages
		if err := p.timeline.later("publish: a follower left", func() error { pool.put(f.page); return nil }); err != nil {
			// The stream cannot tell when it has passed, so the page is never used again.
			p.server.log.Error("cuvmm: the page of a follower that left stays registered", "error", err)
			pool.retire(f.page)
		}
	}
}
