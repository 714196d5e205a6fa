package publish

import (
	"context"
	"errors"
	"fmt"
	"path/filepath"

	"github.com/cuvmm/cuvmm/cuda"
	"github.com/cuvmm/cuvmm/handles/peer"
	"github.com/cuvmm/cuvmm/internal/peererr"
)

// TakeOver goes on with a publication whose publisher has ended. It waits for the end
// of the publisher's process, not only of its connection, since GPU work can outlive
// that. Then it takes the socket, which the server serves until its Close, and
// publishes what the follower has, under the same name. A process that was faster has
// the socket: that is cuda.ErrInUse, and the follower goes on as before.
//
// The elements of the last generation that is complete are published, as the next
// generation. Followers of the dead publisher that come back (DialOptions.ComeBack)
// keep their memory and their addresses. The follower's array is the caller's from then
// on: it has the same address, grows with memory of this process, and is closed after
// the publication is withdrawn. The follower itself is closed. The server's other
// publications are offered at the socket, too; it can take over any number that one
// publisher had.
//
// The follower needs FollowOptions.KeepDescriptors, and neither ReadOnly nor an access
// of the publisher's policy below WriteAccess, and its client must be made by Dial.
func TakeOver[T any](ctx context.Context, s *Server, f *Follower[T]) (*Publication, error) {
	const op = "publish.TakeOver"
	if s == nil || f == nil {
		return nil, peererr.Invalid(op, "a nil server or follower", "make them with NewServer and Follow")
	}
	return s.takeOver(ctx, op, f.f)
}

func (s *Server) takeOver(ctx context.Context, op string, f *follower) (*Publication, error) {
	switch {
	case f.client == nil || f.client.path == "":
		return nil, peererr.New(op, cuda.ErrNotSupported, "a follower whose socket is not known", "make its client with publish.Dial")
	case !f.options.KeepDescriptors:
		return nil, peererr.New(op, cuda.ErrNotSupported, fmt.Sprintf("publication %q, whose descriptors were not kept", f.name), "follow it with FollowOptions.KeepDescriptors")
	case f.options.ReadOnly:
		return nil, peererr.New(op, cuda.ErrNotPermitted, fmt.Sprintf("publication %q, which is followed for reading", f.name), "follow it without FollowOptions.ReadOnly")
	}
	if !s.closer.Acquire() {
		return nil, peererr.Closed(op, "server")
	}
	defer s.closer.Release()
	if err := f.client.awaitProcess(ctx, op); err != nil {
		return nil, err
	}
	l, mine, err := s.takeSocket(op, f.client)
	if err != nil {
		return nil, err
	}
	p, err := s.succeed(ctx, op, f)
	switch {
	case err == nil && mine:
		s.serveTaken(l)
	case err != nil && mine:
		err = errors.Join(err, s.giveSocket(f.client.path))
	}
	return p, err
}

// awaitProcess waits until the process that served the client has ended.
func (k *Client) awaitProcess(ctx context.Context, op string) error {
	k.mu.Lock()
	process := k.process
	if process != nil {
		process, _ = process.Dup()
	}
	k.mu.Unlock()
	if process == nil {
		return peererr.New(op, cuda.ErrNotSupported, "the end of the publisher's process", "run both in one pid namespace, on Linux 5.3 or later")
	}
	defer func() { _ = process.Close() }()
	if err := process.Wait(ctx); err != nil {
		if ctx.Err() != nil {
			return peererr.Wait(ctx, op, "the publisher's process has not ended", "end it, or wait longer")
		}
		return peererr.System(op, "the publisher's process", err)
	}
	return nil
}

// takeSocket listens in the place of a publisher that has ended, unless the server does
// so already.
func (s *Server) takeSocket(op string, k *Client) (l *peer.Listener, mine bool, err error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if l = s.taken[k.path]; l != nil {
		return l, false, nil
	}
	if s.closing {
		return nil, false, peererr.Closed(op, "server")
	}
	dir, name := filepath.Split(k.path)
	if dir == "" {
		dir = "."
	}
	if l, err = peer.Listen(dir, name, k.options.Options); err != nil {
		return nil, false, fmt.Errorf("%s: %w", op, err)
	}
	if s.taken == nil {
		s.taken = map[string]*peer.Listener{}
	}
	s.taken[k.path] = l
	return l, true, nil
}

func (s *Server) giveSocket(path string) error {
	s.mu.Lock()
	l := s.taken[path]
	delete(s.taken, path)
	s.mu.Unlock()
	return l.Close()
}

func (s *Server) serveTaken(l *peer.Listener) {
	if !s.closer.Acquire() {
		return // Close closes the listener
	}
	go func() {
		defer s.closer.Release()
		_ = s.Serve(s.ctx, l) // ends with the server
	}()
}

// succeed publishes what a follower has, whose publisher has ended.
func (s *Server) succeed(ctx context.Context, op string, f *follower) (*Publication, error) {
	if !f.closer.Acquire() {
		return nil, peererr.Closed(op, "follower")
	}
	p, err := s.inherit(ctx, op, f)
	f.closer.Release()
	if err != nil {
		return nil, err
	}
	return p, f.close()
}

func (s *Server) inherit(ctx context.Context, op string, f *follower) (*Publication, error) {
	if s.find(f.name) != nil { // asked before anything changes
		return nil, peererr.New(op, cuda.ErrInUse, fmt.Sprintf("a publication of the name %q", f.name), "take over with another server, or withdraw that one")
	}
	f.take() // it does not come back any more
	_ = f.k.close()
	select {
	case <-f.over:
	case <-ctx.Done():
		return nil, peererr.Wait(ctx, op, "memory is still being mapped", "try again")
	}
	f.awaitEnd()
	f.mu.Lock()
	last := shown{}
	for _, c := range f.came {
		if c.ordered <= max(f.floor, f.completed) {
			last = c
		}
	}
	hold := f.hold
	f.mu.Unlock()
	f.lengths <- struct{}{}
	defer f.lengths.Give()
	if err := f.memory.SetLen(op, uint64(last.length)*f.tracker.unit); err != nil {
		return nil, err
	}
	if err := f.memory.Own(op); err != nil {
		return nil, err
	}
	p, err := s.publish(op, f.name, f.memory, f.about, f.tracker.unit, &heritage{f.identity, f.tracker.generation, last, f.tracker.chunks})
	if err != nil {
		return nil, err
	}
	hold.Release()
	f.mu.Lock()
	f.buffer, f.gone, f.state = nil, peererr.Closed(op, "follower"), Ended
	f.changeLocked()
	f.mu.Unlock()
	return p, nil
}

// heritage is what a publication goes on with.
type heritage struct {
	identity   identity
	generation uint64
	last       shown
	chunks     []chunk
}

// inherits shows what was shown last, as the next generation. Nothing else knows the
// publication yet.
func (p *Publication) inherits(op string, h *heritage) error {
	bytes := uint64(h.last.length) * p.unit
	if err := p.hold.Cover(op, bytes); err != nil {
		return err
	}
	mem, err := p.memory.View(op, bytes)
	if err != nil {
		return err
	}
	p.identity, p.used = h.identity, h.generation+1
	p.mem = mem
	p.view = view{generation: p.used, ordered: p.used, length: uint64(h.last.length), chunks: h.chunks[:len(mem.Chunks):len(mem.Chunks)]}
	return nil
}
