package publish

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"time"

	"github.com/cuvmm/cuvmm/cuda"
	"github.com/cuvmm/cuvmm/handles/peer"
	"github.com/cuvmm/cuvmm/internal/peererr"
	"github.com/cuvmm/cuvmm/internal/wait"
)

// session is one client of a server. Its goroutine takes one request after the
// other, and waits for no publication: followers have goroutines of their own,
// which join, tell what is published, and leave.
type session struct {
	server *Server
	conn   conn
	who    client

	number int // of the server's sessions

	mu        sync.Mutex
	followers map[token]*subscriber
	joining   int // that are not among them yet
	feeding   sync.WaitGroup

	paging sync.Mutex
	pages  map[*cuda.Device]*page // those with further words
}

// client is the process that a session serves, as far as that is known.
type client struct {
	peer.Credentials
	known bool
}

func clientOf(c *peer.Conn) (who client) {
	who.Credentials, who.known = c.Peer()
	return who
}

// String names the client.
func (ss *session) String() string {
	if ss.who.known {
		return ss.who.String()
	}
	return "an inherited connection"
}

// process is the client's. Inherited connections count as one process each.
func (ss *session) process() peer.Credentials {
	if !ss.who.known {
		return peer.Credentials{PID: -ss.number}
	}
	return ss.who.Credentials
}

// run serves the client until it is gone.
func (ss *session) run(ctx context.Context) error {
	ctx, cancel := context.WithCancel(ctx)
	err := ss.answer(ctx)
	cancel()
	closing := ss.conn.Close()
	ss.feeding.Wait() // nobody joins any more
	ss.mu.Lock()
	followers := ss.followers
	ss.followers = map[token]*subscriber{}
	ss.mu.Unlock()
	for _, f := range followers {
		f.drop()
		f.discard() // an announcement may have prepared more before the drop
	}
	ss.server.flights.ended(ss)
	for _, g := range ss.pages {
		ss.server.pages.finish(g)
	}
	if errors.Is(err, peer.ErrGone) || errors.Is(err, cuda.ErrClosed) || ctx.Err() != nil && errors.Is(err, context.Canceled) {
		err = nil
	}
	return errors.Join(err, closing)
}

func (ss *session) answer(ctx context.Context) error {
	for {
		m, err := ss.receive(ctx)
		if err != nil {
			return err
		}
		asked, err := toServer(m.Kind, m.Body, len(m.FDs))
		_ = m.Close()
		if err == nil {
			err = ss.handle(ctx, asked)
		}
		if err != nil {
			return ss.conn.in.Fail(err)
		}
	}
}

// receive waits for the next request: without followers not for ever.
func (ss *session) receive(ctx context.Context) (peer.Message, error) {
	for {
		limited, cancel := context.WithTimeout(ctx, ss.server.o.Idle)
		m, err := ss.conn.Receive(limited)
		over := limited.Err() != nil && ctx.Err() == nil
		cancel()
		if err == nil || !over || !errors.Is(err, peer.ErrTimeout) {
			return m, err
		}
		ss.mu.Lock()
		idle := len(ss.followers)+ss.joining == 0
		ss.mu.Unlock()
		if idle {
			return m, ss.conn.in.Fail(peererr.New(peererr.OpReceive, peer.ErrTimeout, fmt.Sprintf("the client followed nothing and asked nothing for %v", ss.server.o.Idle),
				"connect again when there is something to ask, or raise ServerOptions.Idle"))
		}
	}
}

// handle answers one request. What it must not be is an error reply; an error
// ends the session.
func (ss *session) handle(ctx context.Context, asked message) error {
	switch m := asked.(type) {
	case *list:
		return ss.conn.Send(ctx, pack(&listing{m.number, ss.entries()}))
	case *follow:
		if pause := ss.server.rates.take(ss.process(), time.Now()); pause > 0 && !wait.Sleep(ctx, pause) {
			return ctx.Err()
		}
		ss.mu.Lock()
		n := len(ss.followers) + ss.joining
		full := n >= ss.server.o.MaxFollowers
		if !full {
			ss.joining++
		}
		ss.mu.Unlock()
		if full {
			return ss.say(ctx, &denied{m.number, statusLimit, fmt.Sprintf("%d followers of one client, where %d is the most", n+1, n)})
		}
		ss.feeding.Go(func() { ss.follow(ctx, m) })
	case *done:
		f := ss.find(m.token)
		if f == nil {
			return ss.say(ctx, &ended{m.token, 0, Ended, statusUnknown, "no follower of that token"})
		}
		return f.took(m)
	case *leave:
		f := ss.find(m.token)
		if f == nil {
			return ss.say(ctx, &ended{m.token, 0, Ended, statusUnknown, "no follower of that token"})
		}
		f.end(&ended{m.token, 0, Ended, statusLeft, ""})
	}
	return nil
}

// entries are what is published that the client may follow.
func (ss *session) entries() []entry {
	var all []entry
	for _, p := range ss.server.all() {
		access := ss.access(p.name)
		if access == NoAccess {
			continue
		}
		p.mu.Lock()
		all = append(all, entry{p.name, p.about.Kind, access, p.about.Element, p.about.ElementSize, p.view.length, sizeOf(p.view.chunks), p.view.generation, p.identity})
		p.mu.Unlock()
	}
	return all
}

// access asks the policy.
func (ss *session) access(name string) Access {
	return ss.server.o.Authorize(ss.who.Credentials, ss.who.known, name)
}

func (ss *session) find(t token) *subscriber {
	ss.mu.Lock()
	defer ss.mu.Unlock()
	return ss.followers[t]
}

func (ss *session) forget(f *subscriber) {
	ss.mu.Lock()
	defer ss.mu.Unlock()
	delete(ss.followers, f.token)
}

// say sends what the client need not have asked for.
func (ss *session) say(ctx context.Context, m message) error { return ss.conn.Send(ctx, pack(m)) }

// cut ends the session for a reason that the client is told.
func (ss *session) cut(reason error) { _ = ss.conn.in.Fail(reason) }

// follow takes a follower in and tells it what is new.
func (ss *session) follow(ctx context.Context, m *follow) {
	f, err := ss.takeIn(ctx, m)
	ss.mu.Lock()
	ss.joining--
	ss.mu.Unlock()
	switch {
	case f != nil:
		f.run(ctx)
	case err != nil && ctx.Err() == nil:
		ss.cut(err)
	}
}

// takeIn takes a follower in, or says why not: then it answers nil.
func (ss *session) takeIn(ctx context.Context, m *follow) (*subscriber, error) {
	deny := func(s status, reason string) error { return ss.say(ctx, &denied{m.number, s, reason}) }
	p, may := ss.server.find(m.name), ss.access(m.name)
	switch {
	case p == nil || may == NoAccess: // which look alike to the client
		return nil, deny(statusUnknown, fmt.Sprintf("no publication of the name %q", m.name))
	case m.access > may:
		return nil, deny(statusForbidden, fmt.Sprintf("publication %q may be read alone", m.name))
	}
	f, err := p.join(ctx, ss, m.room, m.has)
	switch {
	case ctx.Err() != nil && f == nil:
		return nil, err
	case errors.Is(err, cuda.ErrClosed):
		return nil, deny(statusUnknown, fmt.Sprintf("publication %q was withdrawn", m.name))
	case errors.Is(err, peer.ErrTooLarge):
		return nil, deny(statusLimit, err.Error())
	case err != nil:
		ss.server.log.Error("cuvmm: a follower could not be taken in, and is told so", "publication", m.name, "client", ss.String(), "error", err)
		return nil, deny(statusFailed, err.Error())
	}
	defer func() { _ = f.file.Close() }()
	// The follower hears of nothing before this.
	if err := ss.conn.Send(ctx, pack(&accepted{m.number, f.token, p.identity, f.feed.room, uint32(f.word.slot), p.about}, f.file)); err != nil {
		ss.server.telling.Done()
		return nil, err
	}
	return f, nil
}

// join makes a follower, which is told nothing yet: its word reads the
// generation that is shown when that is complete.
func (p *Publication) join(ctx context.Context, ss *session, room uint64, has possession) (*subscriber, error) {
	const op = "publish: take a follower in"
	if !p.changes.Take(ctx, nil) {
		return nil, peererr.Wait(ctx, op, "another change is under way", "try again")
	}
	defer p.changes.Give()
	if p.over() {
		return nil, peererr.Closed(op, "publication")
	}
	if err := p.pass(op, has.generation); err != nil {
		return nil, err
	}
	about := p.memory.About()
	g, w, file, err := p.server.pages.get(op, about.Device, ss)
	if err != nil {
		return nil, err
	}
	if err := p.seq.write(op, w, p.view.generation); err != nil {
		p.server.pages.retire(g) // something may write it still
		return nil, errors.Join(err, file.Close())
	}
	if room == 0 || room > about.Reserved {
		room = about.Reserved
	}
	f := &subscriber{p: p, on: ss, token: newToken(), page: g, word: w, file: file, since: time.Now(),
		wake: make(chan struct{}, 1), feed: newFeed(p.unit, room)}
	ss.mu.Lock()
	ss.followers[f.token] = f
	ss.mu.Unlock()
	p.mu.Lock()
	defer p.mu.Unlock()
	f.feed.returns(has, p.view)
	p.followers[f] = struct{}{}
	p.server.telling.Add(1)
	p.changeLocked()
	f.poke()
	return f, nil
}

// pass makes the publication's generation later than that of a follower that comes
// back, for which generations never go back. The caller holds changes.
func (p *Publication) pass(op string, generation uint64) error {
	if generation == 0 || generation < p.view.generation {
		return nil
	}
	if generation > p.used && generation-p.used > mostAhead {
		return peererr.New(op, peer.ErrTooLarge, fmt.Sprintf("a follower at generation %d, where %d is the last", generation, p.used), "close the follower, and follow anew")
	}
	p.used = max(p.used, generation)
	if p.view.generation == 0 {
		return nil
	}
	p.used++
	v := p.view
	v.generation = p.used
	p.show(v, p.mem)
	return nil
}

// mostAhead is how many generations a follower that comes back may be ahead: what it
// was told by a publisher that died before others heard of it, and no more, so that no
// client uses the generations up.
const mostAhead = 1 << 20

// took hears a follower's answer.
func (f *subscriber) took(m *done) error {
	p := f.p
	p.mu.Lock()
	defer p.mu.Unlock()
	if _, there := p.followers[f]; !there {
		return nil // it is on its way out
	}
	if err := f.feed.took(m); err != nil {
		return err
	}
	f.on.server.flights.arrived(f.flight)
	f.flight = nil
	p.changeLocked()
	f.poke()
	return nil
}

// cutLater is cut on a goroutine that the server waits for.
func (ss *session) cutLater(reason error) {
	if ss.server.closer.Acquire() {
		go func() {
			defer ss.server.closer.Release()
			ss.cut(reason)
		}()
	}
}
