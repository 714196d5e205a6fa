package handles

import (
	"context"
	"time"

	"github.com/cuvmm/cuvmm/internal/driver"
	"github.com/cuvmm/cuvmm/internal/phys"
)

// subscriber is one follower of a publication, as its publisher has it. A
// goroutine of its own tells it what is new, so that a slow one holds up nobody.
type subscriber struct {
	p     *Publication
	on    *session
	token token
	page  *page
	since time.Time
	wake  chan struct{} // holds one

	// Guarded by the publication's mu.
	feed *feed
	// ready is what is to be sent next, with its exports where they are open.
	ready  *update
	adds   []*phys.Handle
	fds    []*FD
	ending *ended
}

// poke has the goroutine look again.
func (f *subscriber) poke() {
	select {
	case f.wake <- struct{}{}:
	default:
	}
}

// end has the goroutine say the last word, and end.
func (f *subscriber) end(m *ended) {
	f.p.mu.Lock()
	f.ending = m
	f.p.mu.Unlock()
	f.poke()
}

// prepareLocked finds out what is to be sent next. With shared the exports that
// are open are taken along, so that all followers that are sent the same memory
// at the same time share them. The caller has the publication's mu.
func (p *Publication) prepareLocked(f *subscriber, shared bool) {
	if f.ready != nil || p.withdrawn {
		return
	}
	u, add := f.feed.next(p.view)
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
		f.fds = p.exports.share(f.adds)
	}
}

// run tells the follower what is new, until the connection or the publication
// ends.
func (f *subscriber) run(ctx context.Context) {
	defer f.on.server.telling.Done()
	defer f.discard()
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

func (f *subscriber) send(ctx context.Context, u *update, adds []*phys.Handle, fds []*FD) bool {
	const op = "handles: send an update"
	if fds == nil && len(adds) > 0 {
		var err error
		limited, cancel := context.WithTimeout(ctx, f.on.conn.limits.Timeout)
		fds, err = f.p.exports.open(limited, op, adds)
		cancel()
		if err != nil {
			f.release(adds, nil)
			f.on.server.log.Error("cuvmm: memory could not be exported to a follower, which is told so",
				"publication", f.p.name, "follower", f.on.String(), "error", err)
			f.drop(&ended{f.token, statusFailed, err.Error()})
			return true // to say so
		}
	}
	defer f.release(adds, fds)
	err := f.on.conn.Send(ctx, pack(u, fds...))
	if err != nil {
		f.on.cut(err) // it may be open still, with a follower that would wait for ever
	}
	return err == nil
}

// discard gives back what was prepared and is not sent any more.
func (f *subscriber) discard() {
	f.p.mu.Lock()
	adds, fds := f.adds, f.fds
	f.adds, f.fds = nil, nil
	f.p.mu.Unlock()
	f.release(adds, fds)
}

func (f *subscriber) release(adds []*phys.Handle, fds []*FD) {
	if fds != nil {
		f.p.exports.close(adds)
	}
	for _, h := range adds {
		if r := h.Release(); r != driver.Success {
			f.on.server.log.Error("cuvmm: memory that was sent to a follower could not be released", "error", h.ReleaseError("handles", r))
		}
	}
}

// drop takes the follower from its publication, and its page back when the
// streams have passed it. With a last word it is told.
func (f *subscriber) drop(last *ended) {
	p := f.p
	p.changes <- struct{}{}
	defer p.changes.give()
	p.mu.Lock()
	_, there := p.followers[f]
	delete(p.followers, f)
	p.changeLocked()
	p.mu.Unlock()
	if there {
		pool := &p.server.pages
		if err := p.seq.later("handles: a follower left", func() error { pool.put(f.page); return nil }); err != nil {
			// Its streams cannot tell when they have passed: never used again.
			p.server.log.Error("cuvmm: the page of a follower that left stays registered", "error", err)
			pool.retire(f.page)
		}
	}
	if last != nil {
		f.end(last)
	}
}
