package publish

import (
	"context"
	"errors"
	"time"

	"github.com/cuvmm/cuvmm/handles/peer"
	"github.com/cuvmm/cuvmm/internal/driver"
	"github.com/cuvmm/cuvmm/internal/exchange"
	"github.com/cuvmm/cuvmm/internal/phys"
	"github.com/cuvmm/cuvmm/internal/wait"
	"github.com/cuvmm/cuvmm/internal/wire"
)

// subscriber is one follower of a publication, as its publisher has it. A
// goroutine of its own tells it what is new, so that a slow one holds up nobody.
type subscriber struct {
	p     *Publication
	on    *session
	token token
	page  *page
	word  *word // of the page, and the page as the follower gets it
	file  *peer.FD
	since time.Time
	wake  chan struct{} // holds one

	// Guarded by the publication's mu.
	feed *feed
	// ready is what is to be sent next, with its exports where they are open.
	ready  *update
	adds   []*phys.Handle
	fds    []*peer.FD
	ending *ended
	// flight are the descriptors of the update that is out.
	flight *flight
	// running: the goroutine is there, so that what is prepared is sent soon.
	running bool
}

// batchNow is how many chunks an update may bring, so that their descriptors fit
// into what may be open.
func batchNow() int {
	most, _, err := exchange.Exports.Limit("publish")
	if err != nil {
		return 1
	}
	return min(wire.MaxBatch, most)
}

// poke has the goroutine look again.
func (f *subscriber) poke() {
	select {
	case f.wake <- struct{}{}:
	default:
	}
}

// end has the goroutine take the follower out of the publication, say the last
// word, and end. The first word counts.
func (f *subscriber) end(m *ended) {
	f.p.mu.Lock()
	if f.ending == nil {
		f.ending = m
	}
	f.p.mu.Unlock()
	f.poke()
}

// prepareLocked finds out what is to be sent next. With shared the exports that
// are open are taken along, so that all followers that are sent the same memory
// at the same time share them. The caller has the publication's mu.
func (p *Publication) prepareLocked(f *subscriber, shared bool) {
	if f.ready != nil || f.ending != nil || p.withdrawn || !f.running {
		return
	}
	u, add := f.feed.next(p.view, batchNow())
	if u == nil {
		return
	}
	u.token = f.token
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

// run tells the follower what is new, until the connection or the publication
// ends.
func (f *subscriber) run(ctx context.Context) {
	defer f.on.server.telling.Done()
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
			f.on.forget(f)
			if err := f.on.say(ctx, last); err != nil {
				f.on.cut(err)
			}
			return
		}
		if u != nil && !f.send(ctx, u, adds, fds) {
			return
		}
	}
}

// send sends an update. Descriptors are open only for a moment at a time: those
// of one that does not read would be missing for the others.
func (f *subscriber) send(ctx context.Context, u *update, adds []*phys.Handle, fds []*peer.FD) bool {
	const op = "publish: send an update"
	conn := f.on.conn
	defer f.release(adds, nil)
	if len(adds) > 0 {
		l := &f.on.server.flights
		fl := l.try(f.on, len(adds))
		if fl == nil { // nothing is open while it waits
			if fds != nil {
				f.p.exports.Close(adds)
				fds = nil
			}
			if fl = l.take(ctx, f.on, len(adds)); fl == nil {
				return false
			}
		}
		f.p.mu.Lock()
		f.flight = fl
		f.p.mu.Unlock()
	}
	var limit time.Time // for one that does not read
	stuck := false
	for {
		if fds == nil && len(adds) > 0 {
			began := time.Now()
			var err error
			if fds, err = f.export(ctx, op, adds); err != nil {
				if !errors.Is(err, peer.ErrOpenFiles) && ctx.Err() == nil {
					f.on.server.log.Error("cuvmm: memory could not be exported to a follower, which is told so",
						"publication", f.p.name, "follower", f.on.String(), "error", err)
					f.end(&ended{f.token, 0, Ended, statusFailed, err.Error()})
				}
				return ctx.Err() == nil // to say the last word
			}
			limit = limit.Add(time.Since(began)) // which is not its fault
		}
		err := conn.in.SendWithin(ctx, op, pack(u, fds...), patience)
		if fds != nil {
			f.p.exports.Close(adds)
			fds = nil
		}
		switch {
		case err == nil:
			return true
		case errors.Is(err, peer.ErrOpenFiles): // which is not its fault either
			if !wait.Sleep(ctx, patience) {
				return false
			}
			stuck = false
			continue
		}
		if !stuck {
			stuck, limit = true, time.Now().Add(conn.in.Limits().Timeout)
		}
		if !errors.Is(err, peer.ErrTimeout) || !conn.writable(ctx, limit) {
			if ctx.Err() == nil {
				f.on.cut(err) // it may be open still, with a follower that would wait for ever
			}
			return false
		}
	}
}

// patience is how long descriptors stay open for a follower that does not read.
const patience = 10 * time.Millisecond

// export opens descriptors. It waits for the budget as long as the follower is
// there, for those who have it are never long about it; ErrOpenFiles says that
// the follower is on its way out.
func (f *subscriber) export(ctx context.Context, op string, adds []*phys.Handle) ([]*peer.FD, error) {
	for {
		limited, cancel := context.WithTimeout(ctx, f.on.conn.in.Limits().Timeout)
		fds, err := f.p.exports.Open(limited, op, adds)
		cancel()
		if !errors.Is(err, peer.ErrOpenFiles) || ctx.Err() != nil || f.leaving() {
			return fds, err
		}
	}
}

func (f *subscriber) leaving() bool {
	f.p.mu.Lock()
	defer f.p.mu.Unlock()
	return f.ending != nil
}

// discard gives back what was prepared and is not sent any more.
func (f *subscriber) discard() {
	f.p.mu.Lock()
	adds, fds := f.adds, f.fds
	f.adds, f.fds = nil, nil
	f.p.mu.Unlock()
	f.release(adds, fds)
}

func (f *subscriber) release(adds []*phys.Handle, fds []*peer.FD) {
	if fds != nil {
		f.p.exports.Close(adds)
	}
	for _, h := range adds {
		if r := h.Release(); r != driver.Success {
			f.on.server.log.Error("cuvmm: memory that was sent to a follower could not be released", "error", h.ReleaseError("publish", r))
		}
	}
}

// drop takes the follower from its publication, and its page back when the
// streams have passed it. It waits for other changes of the publication, and so
// never runs on a goroutine that serves others.
func (f *subscriber) drop() {
	p := f.p
	p.changes <- struct{}{}
	defer p.changes.Give()
	p.mu.Lock()
	_, there := p.followers[f]
	delete(p.followers, f)
	p.changeLocked()
	p.mu.Unlock()
	if there {
		pool := &p.server.pages
		if err := p.seq.later("publish: a follower left", func() error { pool.put(f.page); return nil }); err != nil {
			// Its streams cannot tell when they have passed: never used again.
			p.server.log.Error("cuvmm: the page of a follower that left stays registered", "error", err)
			pool.retire(f.page)
		}
	}
}
