package publish

import (
	"context"
	"errors"
	"fmt"
	"path/filepath"

	"github.com/cuvmm/cuvmm/cuda"
	"github.com/cuvmm/cuvmm/handles/peer"
	"github.com/cuvmm/cuvmm/internal/errs"
	"github.com/cuvmm/cuvmm/internal/host"
)

// TakeOver continues a publication whose publisher has ended. It waits for the end of
// the process that served the client last, not only of its connection, because GPU work can outlive the
// connection. A publisher that closed its server and lives while another process served the socket
// is not waited for, so it must not write any more. Then TakeOver binds the socket, which the server serves until
// its Close, and publishes what the follower has under the same name.
//
// The last complete generation is published, as a generation that is later than all before, and so much
// greater. Followers of the
// dead publisher that come back (DialOptions.ComeBack) keep their memory and their
// addresses. The server's other publications are offered at the socket, too, and it can
// take over any number that one publisher had.
//
// The follower is closed, and its array then belongs to the caller: it has the same
// address, grows with memory of this process, and is closed after the publication is
// withdrawn. If closing the follower fails that is logged, and its Close may be called
// again.
//
// The follower needs FollowOptions.KeepDescriptors, and its client must be made by Dial. One that
// only reads (FollowOptions.ReadOnly) must be named by the publisher (ServerOptions.Heir): it hands on what is
// there, and can neither rewrite it nor make it longer. TakeOver returns cuda.ErrInUse if another process has bound the
// socket: the cause is a [peer.ServedError], which names that process, and the follower
// is unchanged. A process that took the publication over and gave the socket back is
// waited for, too, because it still has the memory. If its client has come back to that process, the next TakeOver waits for
// that process's end. After any other error the follower may no longer come back, and
// TakeOver may be called again.
//
// A publication whose memory a broker keeps (PublishOptions.Page) is not taken over (cuda.ErrNotPermitted): the
// broker gives the memory to the next publisher (Client.Keep in package broker).
//
// If the publisher ended while it rewrote the elements (Publication.Rewrite), or had gone
// on without this follower, or nothing that this follower received was complete, it returns [ErrIncomplete]: the elements
// may hold a mixture of generations. Another follower may have a complete one and take that over. See
// TakeOverOptions.Incomplete. If it ended while the memory was suspended
// (vmm.Suspend) there is nothing to take over: it returns cuda.ErrSuspended, and the follower may
// still come back to another publisher.
func TakeOver[T any](ctx context.Context, s *Server, f *Follower[T], o TakeOverOptions) (*Publication, error) {
	const op = "publish.TakeOver"
	if s == nil || f.in() == nil {
		return nil, errs.PeerInvalid(op, "a nil server or follower", "make them with NewServer and Follow")
	}
	return s.takeOver(ctx, op, f.in(), o)
}

func (s *Server) takeOver(ctx context.Context, op string, f *follower, o TakeOverOptions) (*Publication, error) {
	switch {
	case s.refused != nil:
		return nil, s.refused
	case f.client == nil || f.client.path == "":
		return nil, errs.Peer(op, cuda.ErrNotSupported, "a follower whose socket is not known", "make its client with publish.Dial")
	case !f.options.KeepDescriptors:
		return nil, errs.Peer(op, cuda.ErrNotSupported, fmt.Sprintf("publication %q, whose descriptors were not kept", f.name), "follow it with FollowOptions.KeepDescriptors")
	case f.isKept():
		return nil, errs.Peer(op, cuda.ErrNotPermitted, fmt.Sprintf("publication %q, whose memory a broker keeps for the next publisher", f.name),
			"ask the broker for the memory and publish that: see Client.Keep in package broker")
	case f.options.ReadOnly && !f.isHeir():
		return nil, errs.Peer(op, cuda.ErrNotPermitted, fmt.Sprintf("publication %q, which is followed for reading by a process that its publisher names no heir", f.name),
			"follow it without FollowOptions.ReadOnly, or name it: ServerOptions.Heir")
	}
	if !s.closer.Acquire() {
		return nil, errs.PeerClosed(op, "server")
	}
	defer s.closer.Release()
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	defer context.AfterFunc(s.ctx, cancel)() // Close waits for this call
	p, err := s.takeOverSocket(ctx, op, f, o)
	if err != nil && s.ctx.Err() != nil {
		return nil, errs.PeerClosed(op, "server")
	}
	return p, err
}

// takeOverSocket waits for the publisher's end, binds its socket, and publishes. Calls
// for one server are serialized from then on: one that finds the socket bound relies on
// it to be served.
func (s *Server) takeOverSocket(ctx context.Context, op string, f *follower, o TakeOverOptions) (*Publication, error) {
	for {
		if err := f.client.awaitProcess(ctx, op); err != nil {
			return nil, err
		}
		at, err := f.client.place(op)
		if err != nil {
			return nil, err
		}
		p, err := s.takeOverAt(ctx, op, f, at, o)
		if p == nil && err == nil {
			err = at.awaitOwner(ctx, op, f.id())
		}
		_ = at.folder.Close()
		if p != nil || err != nil {
			return p, err
		}
	}
}

// takeOverAt returns nil and no error if another process took the publication over, and lives
// although it does not serve the socket.
func (s *Server) takeOverAt(ctx context.Context, op string, f *follower, at place, o TakeOverOptions) (*Publication, error) {
	if !s.takingOver.Take(ctx, nil) {
		return nil, errs.PeerWait(ctx, op, "another publication is being taken over", "try again")
	}
	defer s.takingOver.Give()
	return s.takeOverInTurn(ctx, op, f, at, o)
}

// takeOverInTurn is takeOverAt for a caller that has waited for the publisher's end, and has
// takingOver.
func (s *Server) takeOverInTurn(ctx context.Context, op string, f *follower, at place, o TakeOverOptions) (*Publication, error) {
	l, mine, err := s.bindTaken(op, f.client)
	if err != nil {
		return nil, err
	}
	var p *Publication
	var taken bool
	var undo func()
	// Again, because the client may have come back to another process since.
	if err = f.client.awaitProcess(ctx, op); err == nil {
		taken, undo, err = at.take(ctx, op, f.id())
	}
	if taken {
		if p, err = s.succeed(ctx, op, f, o); err != nil {
			undo()
		}
	}
	switch {
	case p != nil && mine:
		s.serveTaken(l)
	case p == nil && mine:
		err = errors.Join(err, s.unbindTaken(f.client.path))
	}
	return p, err
}

// awaitProcess waits until the process that served the client has ended.
func (k *Client) awaitProcess(ctx context.Context, op string) error {
	if k.closer.Closed() {
		return errs.PeerClosed(op, "follower's client")
	}
	k.mu.Lock()
	process := k.process
	if process != nil {
		process, _ = process.Dup()
	}
	k.mu.Unlock()
	if process == nil {
		return errs.Peer(op, cuda.ErrNotSupported, "the end of the publisher's process", "run both in one pid namespace, on Linux 5.3 or later")
	}
	defer func() { _ = process.Close() }()
	return awaitEnd(ctx, op, process, "the publisher's process has not ended")
}

// bindTaken listens at the socket of a publisher that has ended, unless the server does
// so already. mine reports that this call bound it. The caller holds takingOver.
func (s *Server) bindTaken(op string, k *Client) (l *peer.Listener, mine bool, err error) {
	s.mu.Lock()
	l = s.taken[k.path]
	s.mu.Unlock()
	if l != nil {
		return l, false, nil
	}
	if l, err = peer.Listen(filepath.Dir(k.path), filepath.Base(k.path), k.options.Options); err != nil {
		return nil, false, fmt.Errorf("%s: %w", op, err)
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.closing {
		return nil, false, errors.Join(errs.PeerClosed(op, "server"), l.Close())
	}
	if s.taken == nil {
		s.taken = map[string]*peer.Listener{}
	}
	s.taken[k.path] = l
	return l, true, nil
}

func (s *Server) unbindTaken(path string) error {
	s.mu.Lock()
	l := s.taken[path]
	delete(s.taken, path)
	s.mu.Unlock()
	if l == nil {
		return nil // Close closed it
	}
	return l.Close()
}

func (s *Server) serveTaken(l *peer.Listener) {
	if !s.closer.Acquire() {
		return // Close closes the listener
	}
	go func() {
		defer s.closer.Release()
		_ = s.Serve(s.ctx, l) // until the server is closed
	}()
}

// succeed publishes what a follower has whose publisher has ended, and closes the
// follower.
func (s *Server) succeed(ctx context.Context, op string, f *follower, o TakeOverOptions) (*Publication, error) {
	if !f.closer.Acquire() {
		return nil, errs.PeerClosed(op, "follower")
	}
	p, err := s.inherit(ctx, op, f, o)
	f.closer.Release()
	if err != nil {
		return nil, err
	}
	if err := f.close(); err != nil {
		s.log.Error("cuvmm: a follower that took its publication over could not be closed", "publication", f.name, "error", err)
	}
	return p, nil
}

func (s *Server) inherit(ctx context.Context, op string, f *follower, o TakeOverOptions) (*Publication, error) {
	if s.find(f.name) != nil { // before anything changes
		return nil, errs.Peer(op, cuda.ErrInUse, fmt.Sprintf("a publication of the name %q", f.name), "take over with another server, or withdraw that one")
	}
	if err := f.notAway(op); err != nil { // and may still come back
		return nil, err
	}
	f.inherit()
	_ = f.current().close()
	select {
	case <-f.over:
	case <-ctx.Done():
		return nil, errs.PeerWait(ctx, op, "memory is still being mapped", "try again")
	}
	if !f.lengths.Take(ctx, nil) {
		return nil, errs.PeerWait(ctx, op, "the follower's length is being changed", "try again")
	}
	defer f.lengths.Give()
	f.mu.Lock()
	from, may := f.sub.heritage(f.slot.seen())
	hold := f.hold
	f.mu.Unlock()
	switch {
	case !may:
		return nil, errs.PeerClosed(op, "follower")
	case from.away: // it arrived since
		return nil, f.notAway(op)
	case from.torn && (!o.Incomplete || f.options.ReadOnly): // which could not write it anew
		return nil, errs.Peer(op, ErrIncomplete, fmt.Sprintf("publication %q, whose publisher ended before what this follower has was complete, or while it rewrote that, or had gone on without it", f.name),
			"take over what another follower has, or load the elements anew; TakeOverOptions.Incomplete takes the memory over to rewrite it")
	}
	from.identity, from.generation, from.chunks, from.readOnly = f.identity, f.replica.generation, f.replica.chunks, f.options.ReadOnly
	if err := f.memory.SetLen(op, uint64(from.last.length)*f.replica.unit); err != nil {
		return nil, err
	}
	if err := f.memory.Own(op); err != nil {
		return nil, err
	}
	p, err := s.publish(op, f.name, f.memory, f.about, f.replica.unit, f.description(), &from)
	if err != nil {
		return nil, err
	}
	hold.Release()
	f.mu.Lock()
	f.buffer = nil
	f.mu.Unlock()
	f.tell((*subscription).adopt)
	return p, nil
}

// notAway refuses memory that its publisher had suspended.
func (f *follower) notAway(op string) error {
	f.mu.Lock()
	defer f.mu.Unlock()
	if !f.sub.away {
		return nil
	}
	return errs.Peer(op, cuda.ErrSuspended, fmt.Sprintf("publication %q, whose publisher ended while the memory was suspended", f.name),
		"load the elements anew and publish them: followers that come back follow that")
}

// inherit ends the follower's coming back. One that is with a publisher ends with the
// connection.
func (f *follower) inherit() {
	f.tell((*subscription).inherit)
	f.take()
}

// isHeir reports whether the last publisher named the follower, which only reads, an heir.
func (f *follower) isHeir() bool {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.heir
}

// isKept reports whether a broker keeps the memory.
func (f *follower) isKept() bool {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.kept
}

// id returns the identity of the followed publication.
func (f *follower) id() identity {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.identity
}

// current returns the follower's connection.
func (f *follower) current() *line {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.k
}

// TakeOverOptions configure [TakeOver].
type TakeOverOptions struct {
	// Incomplete takes memory over even if it may hold a mixture of generations. It is open for
	// rewriting then (Stats.Rewriting): followers that come back keep it, and show nothing until
	// the caller has written all elements and called Announce. Memory that is whole is taken
	// over as without it: call Rewrite before writing.
	Incomplete bool
}

// legacy is what a publication continues.
type legacy struct {
	identity   identity
	generation uint64
	last       version
	torn       bool // the elements of last may be a mixture
	away       bool // there is no memory
	flux, cut  uint64
	chunks     []chunk
	readOnly   bool // for this process
	kept       *kept
}

// inherits shows what was shown last, as a later generation. Nothing else refers to the
// publication yet.
func (p *Publication) inherits(op string, from *legacy) error {
	p.kept = from.kept
	if from.last.generation == 0 {
		p.goesOn(from, nil)
		return nil // nothing was complete: there is nothing to show before the first announcement
	}
	bytes := uint64(from.last.length) * p.unit
	if err := p.hold.Cover(op, bytes); err != nil {
		return err
	}
	mem, err := p.memory.View(op, bytes)
	if err != nil {
		return err
	}
	if err := sharing.add(op, p, mem.Chunks); err != nil {
		return errors.Join(err, mem.Release())
	}
	chunks := from.chunks
	if p.kept != nil {
		chunks = p.chunksOf(mem)
	}
	p.mem = mem
	p.goesOn(from, chunks[:len(mem.Chunks):len(mem.Chunks)])
	if from.torn {
		err = sharing.begin(op, p, nil)
	}
	if p.kept != nil {
		p.tell(p.kept.page.slot) // before it is complete: what is open must never look whole
		p.kept.page.slot.word(completeWord).Store(p.used)
	}
	return err
}

// goesOn shows what was shown last, in chunks. Its generations are later than all of its
// predecessors, of which other followers may have received some that this one did not: what it rewrites
// from now on is told by later numbers than all that they read. A generation takes longer than a
// nanosecond, so no predecessor's can be beyond the time that the machine runs.
func (p *Publication) goesOn(from *legacy, chunks []chunk) {
	p.identity, p.flux, p.cut, p.readOnly = from.identity, from.flux, from.cut, from.readOnly
	p.used = max(from.generation, host.Uptime())
	if from.last.generation == 0 {
		return
	}
	p.spendLike(from.last.generation)
	p.view = view{generation: p.used, ordered: p.used, length: uint64(from.last.length), chunks: chunks}
	if from.torn {
		p.rewriting, p.flux = open, p.used
	}
}
