package publish

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"time"

	"github.com/cuvmm/cuvmm/cuda"
	"github.com/cuvmm/cuvmm/handles/peer"
	"github.com/cuvmm/cuvmm/internal/core"
	"github.com/cuvmm/cuvmm/internal/errs"
	"github.com/cuvmm/cuvmm/internal/host"
	"github.com/cuvmm/cuvmm/internal/lock"
	"github.com/cuvmm/cuvmm/internal/wait"
)

// session is one client of a server. Its goroutine handles one request after the
// other, and waits for no publication: each follower has a goroutine of its own, which
// joins, sends updates, and leaves.
type session struct {
	server *Server
	conn   conn
	client client

	number int // unique among the server's sessions

	mu          lock.Mutex[lock.Leaf]
	followers   map[token]*replicator
	parting     map[token]struct{} // no longer among the followers, and not told of their end yet
	joining     int                // not among the followers yet
	denying     wait.Slot          // one denial at a time is sent, and the others count as joining
	replicating sync.WaitGroup

	paging lock.Mutex[lock.Long]
	pages  map[*cuda.Device]*page // with unused words
}

// client is the process that a session serves, if it is known.
type client struct {
	peer.Credentials
	known bool
}

func clientOf(c *peer.Conn) (of client) {
	of.Credentials, of.known = c.Peer()
	return of
}

// String names the client.
func (ss *session) String() string {
	if ss.client.known {
		return ss.client.String()
	}
	return "an inherited connection"
}

// process returns the client's process. Each inherited connection counts as a process.
func (ss *session) process() peer.Credentials {
	if !ss.client.known {
		return peer.Credentials{PID: -ss.number}
	}
	return ss.client.Credentials
}

// run serves the client until the connection ends.
func (ss *session) run(ctx context.Context) error {
	ctx, cancel := context.WithCancel(ctx)
	err := ss.serve(ctx)
	cancel()
	closing := ss.conn.Close()
	ss.replicating.Wait() // no follower joins any more
	ss.mu.Lock()
	followers := ss.followers
	ss.followers = map[token]*replicator{}
	ss.mu.Unlock()
	for _, f := range followers {
		f.drop()
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

func (ss *session) serve(ctx context.Context) error {
	for {
		m, err := ss.receive(ctx)
		if err != nil {
			return err
		}
		request, err := toServer(m.Kind, m.Body, len(m.FDs))
		_ = m.Close()
		if err == nil {
			err = ss.handle(ctx, request)
		}
		if err != nil {
			return ss.conn.in.Fail(err)
		}
	}
}

// receive waits for the next request. A client without followers has a limit.
func (ss *session) receive(ctx context.Context) (peer.Message, error) {
	for {
		limited, cancel := context.WithTimeout(ctx, ss.server.most.idle)
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
			return m, ss.conn.in.Fail(errs.Peer(errs.OpReceive, peer.ErrTimeout, fmt.Sprintf("the client followed nothing and sent no request for %v", ss.server.most.idle),
				"connect again for the next request"))
		}
	}
}

// handle carries out one request. A refusal is a reply; an error ends the session.
func (ss *session) handle(ctx context.Context, request message) error {
	switch m := request.(type) {
	case *list:
		return ss.conn.Send(ctx, pack(&listing{m.number, ss.entries()}))
	case *follow:
		if pause := ss.server.rates.acquire(ss.process(), time.Now()); pause > 0 && !wait.Sleep(ctx, pause) {
			return ctx.Err()
		}
		ss.mu.Lock()
		n := len(ss.followers) + ss.joining
		full := n >= ss.server.most.followers
		if !full {
			ss.joining++
		}
		ss.mu.Unlock()
		if full {
			return ss.send(ctx, &denied{m.number, statusLimit, fmt.Sprintf("%d followers of one client, where %d is the most", n+1, n)})
		}
		ss.replicating.Go(func() { ss.follow(ctx, m) })
	case *done:
		f, err := ss.find(ctx, m.token)
		if f == nil {
			return err
		}
		return f.acknowledged(m)
	case *leave:
		f, err := ss.find(ctx, m.token)
		if f == nil {
			return err
		}
		f.end(&ended{m.token, 0, Ended, statusLeft, ""})
	}
	return nil
}

// entries lists the publications that the client may follow.
func (ss *session) entries() []entry {
	var all []entry
	for _, p := range ss.server.all() {
		access := ss.access(p.name)
		if access == NoAccess {
			continue
		}
		v := p.viewNow()
		all = append(all, entry{p.name, p.about.Kind, access, p.about.Element, uint32(p.about.ElementSize), v.length, sizeOf(v.chunks), v.generation, p.identity, p.told.tag, p.told.digest})
	}
	return all
}

// access applies the server's policy. What is no access, or a panic, grants nothing.
func (ss *session) access(name string) (granted Access) {
	const what = "publish.ServerOptions.Authorize"
	o := &ss.server.o
	core.Hook(o.Log, what, func() { granted = o.Authorize(ss.client.Credentials, ss.client.known, name) })
	if granted > WriteAccess {
		o.Log.Error("cuvmm: a function of the user returned what is no access", "function", what, "returned", granted, "publication", name)
		return NoAccess
	}
	return granted
}

// heir applies the server's policy for heirs, in which a panic names none.
func (ss *session) heir(name string) (named bool) {
	o := &ss.server.o
	if o.Heir != nil {
		core.Hook(o.Log, "publish.ServerOptions.Heir", func() { named = o.Heir(ss.client.Credentials, ss.client.known, name) })
	}
	return named
}

// find returns the follower of a token, or nil after telling the client that there is none.
// It does not tell a client that is being told of that follower's end, or that end's reason
// would be lost.
func (ss *session) find(ctx context.Context, t token) (*replicator, error) {
	ss.mu.Lock()
	f := ss.followers[t]
	_, parting := ss.parting[t]
	ss.mu.Unlock()
	if f != nil || parting {
		return f, nil
	}
	return nil, ss.send(ctx, &ended{t, 0, Ended, statusUnknown, "no follower of that token"})
}

// part makes room for another follower, and tells the client of this one's end.
func (ss *session) part(ctx context.Context, f *replicator, last *ended) error {
	ss.mu.Lock()
	delete(ss.followers, f.token)
	ss.parting[f.token] = struct{}{}
	ss.mu.Unlock()
	defer func() {
		ss.mu.Lock()
		defer ss.mu.Unlock()
		delete(ss.parting, f.token)
	}()
	return ss.send(ctx, last)
}

func (ss *session) send(ctx context.Context, m message) error { return ss.conn.Send(ctx, pack(m)) }

// cut ends the session, and tells the client the reason.
func (ss *session) cut(reason error) { _ = ss.conn.in.Fail(reason) }

// follow accepts a follower and serves it until it ends.
func (ss *session) follow(ctx context.Context, m *follow) {
	joined := sync.OnceFunc(func() {
		ss.mu.Lock()
		defer ss.mu.Unlock()
		ss.joining--
	})
	f, err := ss.accept(ctx, m, joined)
	joined()
	switch {
	case f != nil:
		f.run(ctx)
	case err != nil && ctx.Err() == nil:
		ss.cut(err)
	}
}

// accept accepts a follower, or sends the client the reason and returns nil. It calls
// joined before it sends either: a client that knows the outcome may follow again. But
// denials have a turn first, or a client that reads none would have any number of them wait.
func (ss *session) accept(ctx context.Context, m *follow, joined func()) (*replicator, error) {
	deny := func(s status, reason string) error {
		if !ss.denying.Take(ctx, nil) {
			return ctx.Err()
		}
		defer ss.denying.Give()
		joined()
		return ss.send(ctx, &denied{m.number, s, reason})
	}
	p, may := ss.server.find(m.name), ss.access(m.name)
	switch {
	case p == nil || may == NoAccess: // the client must not tell them apart
		return nil, deny(statusUnknown, fmt.Sprintf("no publication of the name %q", m.name))
	case m.access > may:
		return nil, deny(statusForbidden, fmt.Sprintf("publication %q may only be read", m.name))
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
		ss.server.log.Error("cuvmm: a follower could not be accepted, and is told so", "publication", m.name, "client", ss.String(), "error", err)
		return nil, deny(statusFailed, err.Error())
	}
	defer func() { _ = f.file.Close() }()
	joined()
	// The follower receives nothing before this.
	files := []*peer.FD{f.file}
	if p.text != nil {
		files = append(files, p.text)
	}
	said := &accepted{number: m.number, token: f.token, identity: p.identity, reserved: f.progress.room, slot: uint32(f.slot.index), about: p.about,
		tag: p.told.tag, described: p.told.described, kept: p.kept != nil}
	said.heir = m.access == ReadAccess && !said.kept && ss.heir(m.name)
	if err := ss.conn.Send(ctx, pack(said, files...)); err != nil {
		f.finished()
		return nil, err
	}
	return f, nil
}

// join adds a follower, to which nothing is sent yet. Its word will read the generation
// that is shown when that is complete.
func (p *Publication) join(ctx context.Context, ss *session, room uint64, has possession) (*replicator, error) {
	const op = "publish: accept a follower"
	if !p.changes.Take(ctx, nil) {
		return nil, errs.PeerWait(ctx, op, fmt.Sprintf("publication %q, of which another change is under way", p.name), "try again")
	}
	defer p.changes.Give()
	if p.over() {
		return nil, p.closed(op)
	}
	if err := p.overtake(op, has.generation); err != nil {
		return nil, err
	}
	about := p.memory.About()
	g, w, file, err := p.server.pages.get(op, about.Device, ss)
	if err != nil {
		return nil, err
	}
	if err := p.greet(op, w); err != nil {
		p.server.pages.retire(g) // the stream may still write it
		return nil, errors.Join(err, file.Close())
	}
	if room == 0 || room > about.Reserved {
		room = about.Reserved
	}
	f := &replicator{p: p, on: ss, token: newToken(), page: g, slot: w, file: file, since: time.Now(),
		wake: make(chan struct{}, 1), progress: newProgress(p.unit, room)}
	ss.mu.Lock()
	ss.followers[f.token] = f
	ss.mu.Unlock()
	p.mu.Lock()
	defer p.mu.Unlock()
	f.progress.resume(has, p.view)
	p.followers[f] = struct{}{}
	p.server.replicating.Add(1)
	p.users.Add(1)
	p.changeLocked()
	f.poke()
	return f, nil
}

// greet writes the words of a follower that joins. The caller holds changes.
func (p *Publication) greet(op string, w *pageSlot) error {
	p.tell(w)
	w.word(cutWord).Store(p.cut)
	return p.timeline.write(op, w, completeWord, p.view.generation)
}

// overtake makes the publication's generation later than that of a follower that comes
// back, because a follower's generations never decrease. The caller holds changes.
func (p *Publication) overtake(op string, generation uint64) error {
	if generation == 0 || generation < p.view.generation {
		return nil
	}
	if most := max(p.used, host.Uptime()) + mostAhead; generation > most {
		return errs.Peer(op, peer.ErrTooLarge, fmt.Sprintf("a follower at generation %d, where %d is the most", generation, most), "close the follower, and follow anew")
	}
	p.used = max(p.used, generation)
	p.renumber()
	return nil
}

// mostAhead bounds how many generations ahead a follower that comes back may be, of this publisher or
// of an heir that began now (goesOn). A publisher that died may have sent it some that no other follower
// received; the bound keeps a client from using the generations up.
const mostAhead = 1 << 20

// acknowledged takes a follower's acknowledgement.
func (f *replicator) acknowledged(m *done) error {
	p := f.p
	p.mu.Lock()
	defer p.mu.Unlock()
	if _, there := p.followers[f]; !there {
		return nil // it is leaving
	}
	if err := f.progress.acknowledged(m); err != nil {
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
