package publish

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"runtime"
	"slices"

	"github.com/cuvmm/cuvmm/cuda"
	"github.com/cuvmm/cuvmm/handles/peer"
	"github.com/cuvmm/cuvmm/internal/errs"
	"github.com/cuvmm/cuvmm/internal/life"
	"github.com/cuvmm/cuvmm/internal/lock"
	"github.com/cuvmm/cuvmm/internal/wire"
)

// line is one connection of a client. It sends requests, and dispatches what the server
// sends.
type line struct {
	conn   conn
	ctx    context.Context // ends with close
	cancel context.CancelFunc
	read   chan struct{} // closed when reading has ended
	closer life.Closer

	mu     lock.Mutex[lock.Leaf]
	number uint32
	// requests are those without a reply; the value is nil for one that was given up.
	requests map[uint32]chan reply
	// followers are the ones that the server knows, by token; the value is nil for one
	// that left, until the server confirms it.
	followers map[token]*mailbox
	err       error // why reading has ended
	retired   bool  // another connection replaces this one
}

// reply is the server's to a request. Its receiver owns the page and the description's file, each
// of which is nil if its descriptor did not fit into this process; without a description there is none.
type reply struct {
	message message
	page    *peer.FD
	text    *peer.FD
	mailbox *mailbox
}

// close closes the files.
func (r *reply) close() { _ = peer.CloseAll([]*peer.FD{r.page, r.text}) }

// complete reports whether all files fitted into this process.
func (r *reply) complete(s *accepted) bool {
	return r.page != nil && (r.text != nil || s.form == noDescription)
}

// mailbox receives a follower's updates, one at a time, and their end.
type mailbox struct {
	updates chan arrival
	// over is closed after the last update; why is the reason.
	over chan struct{}
	why  error
}

// arrival is an update with the descriptors of its chunks.
type arrival struct {
	*update
	fds []*peer.FD
}

// lost reports whether descriptors did not fit into this process.
func (a *arrival) lost() bool { return slices.Contains(a.fds, nil) }

func newMailbox() *mailbox {
	return &mailbox{updates: make(chan arrival, 1), over: make(chan struct{})}
}

// end marks the end of the updates. Only the goroutine that reads calls it.
func (b *mailbox) end(why error) {
	b.why = why
	close(b.over)
}

// arrived returns the update that has arrived, if there is one. An update that arrived
// before the end counts.
func (b *mailbox) arrived() (a arrival, ok bool) {
	select {
	case a = <-b.updates:
		return a, true
	default:
		return a, false
	}
}

// newLine takes ownership of a connection, and reads from it until close.
func newLine(c *peer.Conn) *line {
	k := &line{read: make(chan struct{}), requests: map[uint32]chan reply{}, followers: map[token]*mailbox{}}
	k.ctx, k.cancel = context.WithCancel(context.Background())
	if c == nil {
		k.err = errs.PeerInvalid("publish.NewClient", "a nil connection", "make one with Dial or Inherit")
		close(k.read)
		return k
	}
	k.conn = connOf(c)
	limits := k.conn.in.Limits()
	limits.Warned = true
	limits.MaxFDs = wire.MaxBatch // a view brings as many, whatever Options.MaxFDs says
	limits.MayLose = func(kind uint16) bool { return kind == wire.Accepted || kind == wire.View }
	go k.listen()
	return k
}

// close ends the connection.
func (k *line) close() error {
	return k.closer.Close(func() error {
		k.cancel()
		if k.conn.Conn == nil {
			return nil
		}
		err := k.conn.Close()
		<-k.read
		return err
	})
}

// retire closes a connection whose reading has ended. Requests on it go on returning why
// it ended, because the client is not closed.
func (k *line) retire() {
	k.mu.Lock()
	k.retired = true
	k.mu.Unlock()
	_ = k.close()
}

// ended reports whether reading has ended, also before read is closed.
func (k *line) ended() bool {
	k.mu.Lock()
	defer k.mu.Unlock()
	return k.err != nil
}

// listen reads and dispatches messages until the connection ends.
func (k *line) listen() {
	var err error
	for err == nil {
		var m peer.Message
		if m, err = k.conn.Receive(k.ctx); err != nil {
			break
		}
		if err = k.receive(m); err != nil {
			_ = m.Close()
			err = k.conn.in.Fail(err)
		}
		runtime.Gosched() // to the goroutine that receives the message
	}
	k.mu.Lock()
	k.err = err
	requests, followers := k.requests, k.followers
	k.requests, k.followers = nil, nil
	why := k.goneLocked(opFollower)
	k.mu.Unlock()
	for _, to := range requests {
		if to != nil {
			close(to)
		}
	}
	for _, b := range followers {
		if b != nil {
			b.end(why)
		}
	}
	close(k.read)
}

// receive takes ownership of a message unless it fails.
func (k *line) receive(m peer.Message) error {
	said, err := toClient(m.Kind, m.Body, len(m.FDs))
	if err != nil {
		return err
	}
	k.mu.Lock()
	unwanted, err := k.dispatchLocked(said, m)
	k.mu.Unlock()
	if !unwanted || err != nil {
		return err
	}
	if s, ok := said.(*accepted); ok && k.closer.Acquire() {
		go func() { // because this goroutine reads, and must not wait for a send
			defer k.closer.Release()
			_ = k.conn.Send(k.ctx, pack(&leave{s.token}))
		}()
	}
	return m.Close()
}

// dispatchLocked passes a message to the goroutine that waits for it. unwanted reports
// that none waits any more. The caller holds mu.
func (k *line) dispatchLocked(said message, m peer.Message) (unwanted bool, err error) {
	switch s := said.(type) {
	case *listing:
		return k.replyLocked(s.number, reply{message: s})
	case *denied:
		return k.replyLocked(s.number, reply{message: s})
	case *accepted:
		if _, there := k.followers[s.token]; there {
			return false, errs.Violation("two followers of one token")
		}
		r := reply{message: s, page: m.FDs[0], mailbox: newMailbox()}
		if s.form != noDescription {
			r.text = m.FDs[1]
		}
		unwanted, err := k.replyLocked(s.number, r)
		switch {
		case err != nil:
			return false, err
		case unwanted:
			k.followers[s.token] = nil // until the server confirms that it left
		default:
			k.followers[s.token] = r.mailbox
		}
		return unwanted, nil
	case *update:
		b, there := k.followers[s.token]
		switch {
		case !there:
			return false, errs.Violation("an update for an unknown token")
		case b == nil: // it left, and the server did not know yet
			return true, nil
		}
		select {
		case b.updates <- arrival{s, m.FDs}:
		default:
			return false, errs.Violation("an update before the previous one was acknowledged")
		}
	case *ended:
		if b := k.followers[s.token]; b != nil {
			b.end(reasonOfEnd(s))
		}
		delete(k.followers, s.token)
	}
	return false, nil
}

// replyLocked passes a reply to the caller of ask. unwanted reports that the request
// was given up. The caller holds mu.
func (k *line) replyLocked(number uint32, r reply) (unwanted bool, err error) {
	to, there := k.requests[number]
	if !there {
		return false, errs.Violation("a reply to request %d, which was not made", number)
	}
	delete(k.requests, number)
	if to == nil {
		return true, nil
	}
	to <- r // has room for one
	return false, nil
}

// errMoved is the cause of an end after which another publisher may continue.
var errMoved = errors.New("moved")

// The operations in errors: of a request to follow, and of a follower from then on.
const (
	opFollow   = "publish.Follow"
	opFollower = "publish.Follower"
)

func reasonOfEnd(m *ended) error {
	switch {
	case m.state == Moved:
		return errs.PeerCause(errMoved, opFollower, ErrWithdrawn, errs.Words(m.reason), "follow it again: it is published anew at the same socket, or will be")
	case m.status == statusWithdrawn:
		return errs.Peer(opFollower, ErrWithdrawn, "", "close the follower when its work is done")
	case m.status == statusLeft:
		return errs.PeerClosed(opFollower, "follower")
	case m.status == statusExcluded:
		return errs.Peer(opFollower, ErrExcluded, errs.Words(m.reason), "discard what was not read before, close the follower and follow anew; Release what was read sooner")
	}
	return errs.Peer(opFollower, peer.ErrRefused, errs.Words(m.reason), "the reason is the publisher's own words")
}

// ask sends a request and waits for its reply.
func (k *line) ask(ctx context.Context, op string, request func(number uint32) message) (reply, error) {
	if !k.closer.Acquire() {
		k.mu.Lock()
		defer k.mu.Unlock()
		return reply{}, k.goneLocked(op)
	}
	defer k.closer.Release()
	to := make(chan reply, 1)
	k.mu.Lock()
	if k.err != nil {
		err := k.goneLocked(op)
		k.mu.Unlock()
		return reply{}, err
	}
	k.number++
	number := k.number
	k.requests[number] = to
	k.mu.Unlock()
	if err := k.conn.Send(ctx, pack(request(number))); err != nil {
		k.mu.Lock()
		delete(k.requests, number) // a request that was not sent has no reply
		k.mu.Unlock()
		if errors.Is(err, peer.ErrGone) || errors.Is(err, peer.ErrRefused) {
			err = k.whyGone(ctx, op, err) // reading ends too, or has ended
		}
		return reply{}, err
	}
	limited, cancel := context.WithTimeout(ctx, k.conn.in.Limits().Timeout)
	defer cancel()
	select {
	case r, ok := <-to:
		if !ok {
			k.mu.Lock()
			defer k.mu.Unlock()
			return reply{}, k.goneLocked(op)
		}
		return r, nil
	case <-limited.Done():
		k.abandon(number, to)
		return reply{}, errs.PeerWait(ctx, op, "the server has not replied", "find out what the server waits for, or raise Options.Timeout")
	}
}

// goneLocked is the error of a request after reading has ended. The caller holds mu.
func (k *line) goneLocked(op string) error {
	if k.closer.Closed() && !k.retired {
		return errs.PeerClosed(op, "client")
	}
	return fmt.Errorf("%s: %w", op, k.err)
}

// whyGone returns the reason that the server gave before it closed the connection.
func (k *line) whyGone(ctx context.Context, op string, err error) error {
	select {
	case <-k.read:
		k.mu.Lock()
		defer k.mu.Unlock()
		return k.goneLocked(op)
	case <-ctx.Done():
		return err
	}
}

// abandon gives up a request that was sent. If the reply comes later and makes a
// follower, that follower leaves again.
func (k *line) abandon(number uint32, to chan reply) {
	k.mu.Lock()
	_, open := k.requests[number]
	if open {
		k.requests[number] = nil
	}
	k.mu.Unlock()
	if open {
		return
	}
	if r, ok := <-to; ok {
		k.discard(r)
	}
}

// discard gives up what a reply brought.
func (k *line) discard(r reply) {
	if s, ok := r.message.(*accepted); ok {
		r.close()
		k.leave(s.token, r.mailbox)
	}
}

// leave tells the server that a follower leaves, and drops an update that is in flight
// to it. Idempotent.
func (k *line) leave(t token, b *mailbox) {
	k.mu.Lock()
	there := k.followers[t] != nil
	if there {
		k.followers[t] = nil
	}
	k.mu.Unlock()
	if there {
		_ = k.conn.Send(k.ctx, pack(&leave{t})) // a connection that has ended needs none
	}
	if a, ok := b.arrived(); ok {
		_ = peer.CloseAll(a.fds)
	}
}

// list is Client.List.
func (k *line) list(ctx context.Context, op string) ([]Listing, error) {
	r, err := k.ask(ctx, op, func(n uint32) message { return &list{n} })
	if err != nil {
		return nil, err
	}
	said, ok := r.message.(*listing)
	if !ok {
		return nil, k.unexpected(op, r)
	}
	all := make([]Listing, len(said.entries))
	for i, e := range said.entries {
		all[i] = Listing{e.name, e.kind, e.access, e.element, int(e.size), int(e.length), int(e.bytes), e.generation, e.identity, e.tag, e.digest}
	}
	slices.SortFunc(all, func(a, b Listing) int { return cmp.Compare(a.Name, b.Name) })
	return all, nil
}

// unexpected is the error of a reply that denies the request or belongs to another.
func (k *line) unexpected(op string, r reply) error {
	if d, ok := r.message.(*denied); ok {
		return deniedError(op, d)
	}
	k.discard(r)
	return k.conn.in.Fail(errs.Violation("a reply of kind %#x to another request", r.message.kind()))
}

func deniedError(op string, d *denied) error {
	kind := map[status]error{statusUnknown: ErrUnknown, statusLimit: peer.ErrTooLarge, statusForbidden: cuda.ErrNotPermitted}[d.status]
	if kind == nil {
		kind = peer.ErrRefused
	}
	hint := "the reason is the publisher's own words"
	switch d.status {
	case statusForbidden:
		hint = "set ReadOnly, or ask the publisher for more"
	case statusLimit:
		hint = "close followers that are not needed, or follow with another client"
	case statusUnknown:
		hint = "List returns what is published"
	}
	return errs.Peer(op, kind, errs.Words(d.reason), hint)
}

// subscribe asks the server to take a follower in.
func (k *line) subscribe(ctx context.Context, op, name string, room uint64, readOnly bool, has possession) (*accepted, reply, error) {
	if err := checkPublished(op, name); err != nil {
		return nil, reply{}, err
	}
	access := WriteAccess
	if readOnly {
		access = ReadAccess
	}
	r, err := k.ask(ctx, op, func(n uint32) message { return &follow{number: n, access: access, room: room, name: name, has: has} })
	if err != nil {
		return nil, r, err
	}
	s, ok := r.message.(*accepted)
	switch {
	case !ok:
		return nil, r, k.unexpected(op, r)
	case !r.complete(s):
		k.discard(r)
		return nil, r, errs.FilesLost("the page of the fence word, or the description, was dropped")
	}
	return s, r, nil
}
