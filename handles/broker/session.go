package broker

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/cuvmm/cuvmm/cuda"
	"github.com/cuvmm/cuvmm/handles"
	"github.com/cuvmm/cuvmm/handles/broker/keeper"
	"github.com/cuvmm/cuvmm/handles/peer"
	"github.com/cuvmm/cuvmm/handles/publish"
	"github.com/cuvmm/cuvmm/internal/errs"
	"github.com/cuvmm/cuvmm/internal/link"
	"github.com/cuvmm/cuvmm/internal/sock"
	"github.com/cuvmm/cuvmm/internal/wait"
	"github.com/cuvmm/cuvmm/internal/wire"
)

// session is a broker's side of a connection.
type session struct {
	b  *Broker
	c  *peer.Conn
	of Caller
	h  holder

	// copying is taken by the commit whose copy is made: that takes a process, and a context.
	copying wait.Slot
	// replying is taken by one request of awaits that sends its reply, which does not count any more. The others do, or
	// a client that reads nothing would have any number of them wait.
	replying wait.Slot
	waiting  sync.WaitGroup
	mu       sync.Mutex
	// awaits end the requests that go on beside others, by their numbers.
	awaits map[uint32]context.CancelFunc
}

// maxAwaits bounds the requests of a session that go on beside others.
const maxAwaits = 64

// fail tells the client why its connection ends.
func (s *session) fail(err error) error { return link.Of(s.c).Fail(err) }

// run serves the client until it disconnects.
func (s *session) run(ctx context.Context) error {
	ctx, cancel := context.WithCancel(ctx)
	defer s.waiting.Wait()
	defer cancel()
	if err := s.hello(ctx); err != nil {
		return unlessGone(err)
	}
	socket, err := s.identify()
	if err != nil {
		return s.fail(err)
	}
	p := s.b.arrive(s, socket)
	defer s.b.depart(s.h, p, func() { delete(p.sessions, s) })
	for {
		m, err := s.c.Receive(ctx)
		if err != nil {
			return unlessGone(err)
		}
		r, err := parseRequest(m)
		if err != nil {
			_ = m.Close()
			return s.fail(err)
		}
		if err := s.handle(ctx, &r); err != nil {
			return unlessGone(err)
		}
	}
}

// identify notes who the client is, and returns the socket that says so: that of a socketpair names whoever
// made it.
func (s *session) identify() (socket *sock.Conn, err error) {
	if s.of.Credentials, s.of.Known = s.c.Peer(); !s.of.Known {
		return nil, nil
	}
	socket = link.Of(s.c).Socket()
	s.of.Groups, err = socket.Groups()
	return socket, err
}

// unlessGone returns nil for the error of a client that disconnected.
func unlessGone(err error) error {
	if errors.Is(err, peer.ErrGone) {
		return nil
	}
	return err
}

// hello receives the client's number.
func (s *session) hello(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, link.Of(s.c).Limits().Timeout)
	defer cancel()
	m, err := s.c.Receive(ctx)
	if err != nil {
		return err
	}
	if m.Kind != wire.BrokerHello || len(m.Body) != len(s.h) || len(m.FDs) > 0 {
		_ = m.Close()
		return s.fail(errs.Violation("a message of kind %#x, where a client's number belongs", m.Kind))
	}
	if copy(s.h[:], m.Body); s.h == holder(counter) {
		return s.fail(errs.Violation("a number of zeros"))
	}
	return nil
}

// handle does what a request says, and replies. Its error ends the session.
func (s *session) handle(ctx context.Context, r *request) error {
	const op = opServe
	reply := &reply{kind: wire.BrokerDone, number: r.number}
	var err error
	switch r.kind {
	case wire.BrokerCreate, wire.BrokerKeep, wire.BrokerAttach:
		return s.give(ctx, op, r)
	case wire.BrokerList:
		return s.list(ctx, r)
	case wire.BrokerAwait:
		return s.await(ctx, op, r)
	case wire.BrokerAsk:
		reply.kind, reply.health = wire.BrokerStatus, s.b.status()
	case wire.BrokerCancel:
		s.mu.Lock()
		end := s.awaits[r.number]
		s.mu.Unlock()
		if end != nil {
			end()
		}
		return nil
	case wire.BrokerCommit:
		return s.commit(ctx, op, r)
	case wire.BrokerHold:
		s.b.mu.Lock()
		err = s.b.books.hold(op, s.h, r.key)
		s.b.mu.Unlock()
	case wire.BrokerRelease:
		s.b.unpublish(s.h, r.key)
		s.b.change(func() []*object { return s.b.books.release(s.h, r.key) })
	case wire.BrokerRemove:
		if _, err = s.may(op, r.name, publish.WriteAccess); err == nil {
			err = s.b.remove(op, r.name, r.version)
		}
	}
	return s.reply(ctx, reply, err)
}

// reply says that a request was done, or why not.
func (s *session) reply(ctx context.Context, r *reply, err error) error {
	if why := s.b.ending(); why != nil {
		return s.fail(why) // what was done may not be kept
	}
	if err != nil {
		r = denial(r.number, err)
	}
	return s.send(ctx, r)
}

// send sends a reply, and counts refusals.
func (s *session) send(ctx context.Context, r *reply) error {
	if r.kind == wire.BrokerDenied {
		s.b.mu.Lock()
		s.b.counted.Refusals++
		s.b.mu.Unlock()
	}
	return s.c.Send(ctx, r.pack())
}

// may returns what the client may do with a name, or refuses what it may not. A name that it may not read
// must look as if it were not there.
func (s *session) may(op, name string, want publish.Access) (Grant, error) {
	switch g := s.b.grant(s.of, name); {
	case g.Access == publish.NoAccess && want == publish.ReadAccess:
		return g, notThere(op, name)
	case g.Access < want:
		return g, errs.Peer(op, cuda.ErrNotPermitted, fmt.Sprintf("%v access to %q, where this client has %v", want, name, g.Access), "have the broker's policy grant it")
	default:
		return g, nil
	}
}

// give gives the client an object to write, one that is sealed, or memory to publish: it says which, and sends the
// memory. The client holds it before the first of that.
func (s *session) give(ctx context.Context, op string, r *request) error {
	find := s.create
	if r.kind == wire.BrokerAttach {
		find = s.attach
	}
	g, err := find(op, r)
	if why := s.b.ending(); why != nil {
		return s.fail(why)
	}
	if err != nil {
		return s.send(ctx, denial(r.number, err))
	}
	defer s.b.unuse(g.files)
	if r.kind == wire.BrokerKeep {
		s.b.o.Log.Info("cuvmm: a client publishes what is kept", "name", g.about.Name, "bytes", g.about.Bytes, "publisher", s.of.String())
	}
	err = s.send(ctx, &reply{kind: wire.BrokerObject, number: r.number, key: g.key, objects: []Listing{g.about}, beside: g.beside})
	if err == nil {
		// A broker that ends gives no reason, which the client would take for its answer: the connection
		// ends, and it asks the next one.
		stop := context.AfterFunc(ctx, func() { _ = s.c.Close() })
		err = handles.SendFDs(context.WithoutCancel(ctx), s.c, g.memory, g.files.chunks)
		stop()
	}
	// The client says itself that it has let go of what it could not map: it may have mapped it, and
	// only the confirmation failed.
	if err != nil && !over(s.c) {
		return nil
	}
	return err
}

// grant is what a client gets of an object, whose files are open until they are let go.
type grant struct {
	key    keeper.Key
	about  Listing
	memory handles.Descriptor
	beside *peer.FD
	files  *files
}

// grantLocked makes a client a holder of an object whose memory is there.
func (s *session) grantLocked(o *object) *grant {
	o.holders[s.h] = false
	o.files.users++
	return &grant{o.key, s.b.listingLocked(o), o.memory, o.files.beside, o.files}
}

func over(c *peer.Conn) bool {
	select {
	case <-link.Of(c).Over():
		return true
	default:
		return false
	}
}

// attach finds a sealed object, of which the client becomes a holder.
func (s *session) attach(op string, r *request) (*grant, error) {
	if _, err := s.may(op, r.name, publish.ReadAccess); err != nil {
		return nil, err
	}
	s.b.mu.Lock()
	defer s.b.mu.Unlock()
	o, err := s.b.books.find(op, r.name, r.version)
	if err != nil {
		return nil, err
	}
	s.b.counted.Attaches++
	return s.grantLocked(o), nil
}

// create makes an object that the client writes, or memory that it publishes, unless there is some of that name. If
// there is no room for it, holders of objects that end with them are asked for theirs.
func (s *session) create(op string, r *request) (*grant, error) {
	g, err := s.createOnce(op, r)
	if !lacksRoom(err) {
		return g, err
	}
	q := s.b.grant(s.of, r.name).Quota
	if !s.canFit(r, q) {
		return nil, err
	}
	if s.b.relieve(int(r.bytes), s.counts(r, q, err)) {
		g, err = s.createOnce(op, r)
	}
	if lacksRoom(err) {
		err = s.saysWhoHas(err, r, q)
	}
	return g, err
}

func (s *session) createOnce(op string, r *request) (*grant, error) {
	may, err := s.may(op, r.name, publish.WriteAccess)
	if err != nil {
		return nil, err
	}
	switch keeps := r.kind == wire.BrokerKeep; {
	case may.EphemeralOnly && keeps:
		return nil, errs.Peer(op, cuda.ErrNotPermitted, fmt.Sprintf("memory of publication %q, where this client may write ephemeral objects only", r.name), "have the broker's policy grant more")
	case may.EphemeralOnly && !r.ephemeral:
		return nil, errs.Peer(op, cuda.ErrNotPermitted, fmt.Sprintf("object %q that is not ephemeral", r.name), "make it ephemeral, or have the broker's policy grant more")
	case may.Copy && !keeps && s.b.o.Copy == nil:
		return nil, errs.Peer(op, cuda.ErrNotSupported, fmt.Sprintf("object %q, which is to be copied", r.name), "have the broker's policy grant the name without copies, or a broker serve that makes them")
	case may.Copy && r.ephemeral: // its copy would have no holder
		return nil, errs.Peer(op, cuda.ErrNotPermitted, fmt.Sprintf("ephemeral object %q, where objects are copied", r.name), "make it one that is not ephemeral")
	}
	d, err := deviceOf(op, s.b.sys, r.device)
	if err != nil {
		return nil, err
	}
	sizes, _, err := layout(op, d, int(r.bytes))
	if err != nil {
		return nil, err
	}
	b := s.b
	if err := b.remember(s); err != nil {
		return nil, err
	}
	o, of, g, err := s.enter(op, r, sizes, may.Quota)
	for errors.Is(err, errMaking) {
		if !b.await(b.ctx, func() bool { return !o.making }) {
			return nil, b.ending()
		}
		o, of, g, err = s.enter(op, r, sizes, may.Quota)
	}
	if err != nil || g != nil {
		return g, err
	}
	err = s.make(op, d, o, of, int(r.bytes))
	if of.State == kept {
		b.publishing.Lock()
		defer b.publishing.Unlock()
		if err == nil && o.Free && o.State == kept { // its client gave it back meanwhile
			err = b.keep(o.key, o.record)
		}
	}
	b.change(func() (gone []*object) {
		o.making = false
		if err == nil && o.State == ended {
			err = errs.Peer(op, ErrLost, fmt.Sprintf("object %q, which was removed, or whose client has gone", r.name), "ask again")
		}
		switch {
		case err != nil:
			return b.books.discard(o)
		case o.Free: // another may publish the memory
			err = errs.Peer(op, ErrLost, fmt.Sprintf("memory of publication %q, whose client has gone", r.name), "ask again")
			return nil
		}
		g = s.grantLocked(o)
		return nil
	})
	return g, err
}

// errMaking: another session of the client, whose connection was lost, makes the memory.
var errMaking = errors.New("an object that is being made")

// enter enters an object that the client writes, or memory that it publishes, into the books. Its memory is to be
// made, with the record, or there is a grant: of what another client published, or this one that asks again.
func (s *session) enter(op string, r *request, sizes []int, q Quota) (o *object, of record, g *grant, err error) {
	b := s.b
	if r.kind == wire.BrokerKeep {
		b.publishing.Lock()
		defer b.publishing.Unlock()
	}
	b.mu.Lock()
	of = record{Name: strings.Clone(r.name), Ephemeral: r.ephemeral, Writer: s.h, PID: s.of.PID, UID: s.of.UID, Watched: b.present[s.h].process != nil, Since: time.Now()}
	switch {
	case b.present[holder(r.key)] != nil:
		err = errs.Violation("a key that is the number of a client")
	case r.kind == wire.BrokerKeep:
		o, err = b.books.keep(op, r, of, sizes, q)
	default:
		o, err = b.books.create(op, r.key, of, sizes, r.alone, q)
	}
	switch {
	case err != nil:
	case o.making:
		err = errMaking
	case o.files != nil: // the client did not learn that it has it, or takes it over
		g = s.grantLocked(o)
	default:
		o.making = true
	}
	if err == nil {
		of = o.record
	}
	b.mu.Unlock()
	if g != nil && of.State == kept { // another process publishes it now
		if err = b.keep(o.key, of); err != nil {
			b.unuse(g.files)
			return nil, of, nil, err
		}
	}
	return o, of, g, err
}

// make makes the memory of an object with a record, and has the keeper keep it.
func (s *session) make(op string, d *cuda.Device, o *object, r record, bytes int) error {
	about, fds, err := makeMemory(op, d, bytes)
	made := &files{chunks: fds}
	if err == nil && r.State == kept {
		made.beside, err = publish.NewPageFile()
	}
	var text []byte
	if err == nil {
		text, err = about.MarshalBinary()
	}
	if err == nil {
		r.Memory = text
		err = s.b.keep(o.key, r, made.all()...)
	}
	if err != nil {
		made.close()
		return err
	}
	s.b.mu.Lock()
	defer s.b.mu.Unlock()
	o.memory, o.Memory, o.files = about, text, made
	return nil
}

// list sends what there is of what the client may read.
func (s *session) list(ctx context.Context, r *request) error {
	s.b.mu.Lock()
	all := make([]Listing, 0, len(s.b.books.objects))
	for _, o := range s.b.books.objects {
		if o.State != ended && !o.isDraft() {
			all = append(all, s.b.listingLocked(o))
		}
	}
	s.b.mu.Unlock()
	may := map[string]bool{}
	all = slices.DeleteFunc(all, func(l Listing) bool {
		seen, asked := may[l.Name]
		if !asked {
			seen = s.b.grant(s.of, l.Name).Access >= publish.ReadAccess
			may[l.Name] = seen
		}
		return !seen
	})
	slices.SortFunc(all, func(a, b Listing) int {
		if c := strings.Compare(a.Name, b.Name); c != 0 {
			return c
		}
		return a.Since.Compare(b.Since)
	})
	for {
		n := min(len(all), maxListing)
		if err := s.send(ctx, &reply{kind: wire.BrokerListing, number: r.number, objects: all[:n], last: n == len(all)}); err != nil {
			return err
		}
		if all = all[n:]; len(all) == 0 {
			return nil
		}
	}
}

// await replies once a name is sealed, or nobody writes it.
func (s *session) await(ctx context.Context, op string, r *request) error {
	if _, err := s.may(op, r.name, publish.ReadAccess); err != nil {
		return s.send(ctx, denial(r.number, err))
	}
	b := s.b
	return s.later(ctx, r.number, func(within context.Context) (send func() error) {
		b.await(within, func() bool { return len(b.books.versions(r.name)) > 0 || b.books.writers(r.name) == 0 })
		return func() error { return s.send(ctx, &reply{kind: wire.BrokerDone, number: r.number}) }
	})
}

// later has a request go on beside the client's others, until it is cancelled or the session ends, and then replies. It
// does not count by then: a client that has its reply may send another.
func (s *session) later(ctx context.Context, number uint32, f func(context.Context) (send func() error)) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if len(s.awaits) >= maxAwaits || s.awaits[number] != nil {
		return s.fail(errs.Violation("%d requests that wait, where %d are the most", len(s.awaits)+1, maxAwaits))
	}
	within, cancel := context.WithCancel(ctx)
	s.awaits[number] = cancel
	s.waiting.Go(func() {
		defer cancel()
		send := f(within)
		if !s.replying.Take(ctx, nil) {
			return
		}
		defer s.replying.Give()
		s.mu.Lock()
		delete(s.awaits, number)
		s.mu.Unlock()
		_ = send() // what cannot be sent ends Receive, too
	})
	return nil
}

// await waits until something holds of the books, and reports whether it does.
func (b *Broker) await(ctx context.Context, holds func() bool) bool {
	for {
		b.mu.Lock()
		is, changed := holds(), b.changed
		b.mu.Unlock()
		if is {
			return true
		}
		select {
		case <-changed:
		case <-ctx.Done():
			return false
		}
	}
}

// listingLocked describes an object.
func (b *Broker) listingLocked(o *object) Listing {
	l := Listing{Name: o.Name, Version: o.Version, Device: o.memory.Device, Bytes: o.bytes, Holders: len(o.holders),
		Ephemeral: o.Ephemeral, Publication: o.State == kept, PID: o.PID, UID: o.UID, Since: o.Since}
	for h := range o.holders {
		if p := b.present[h]; p != nil && len(l.HeldBy) < maxHeldBy {
			l.HeldBy = append(l.HeldBy, p.of)
		}
	}
	slices.SortFunc(l.HeldBy, func(x, y peer.Credentials) int { return cmp.Compare(x.PID, y.PID) })
	return l
}
