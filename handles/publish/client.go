package publish

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"runtime"
	"slices"
	"sync"

	"github.com/cuvmm/cuvmm/cuda"
	"github.com/cuvmm/cuvmm/handles"
	"github.com/cuvmm/cuvmm/handles/peer"
	"github.com/cuvmm/cuvmm/internal/life"
	"github.com/cuvmm/cuvmm/internal/peererr"
	"github.com/cuvmm/cuvmm/internal/wire"
)

// line is one connection of a client: it asks, and sorts what the server says.
type line struct {
	conn   conn
	ctx    context.Context // ends with close
	cancel context.CancelFunc
	read   chan struct{} // closed when nothing is read any more
	closer life.Closer

	mu     sync.Mutex
	number uint32
	// asked are the requests without an answer; nil stands for one that was given
	// up.
	asked map[uint32]chan answer
	// followers are those that the server knows, by its tokens; nil stands for
	// one that left, until the server says so.
	followers map[token]*inlet
	err       error // why nothing is read any more
}

// answer is one to a request. The page belongs to whoever takes it, and is nil if
// it did not fit into this process.
type answer struct {
	message message
	page    *peer.FD
	inlet   *inlet
}

// inlet is where what a follower is told arrives: one update at a time, and the
// end.
type inlet struct {
	updates chan arrival
	// over is closed when nothing more comes; why says the reason.
	over chan struct{}
	why  error
}

// arrival is an update with its chunks.
type arrival struct {
	*update
	fds []*peer.FD
}

// lost reports whether the descriptors did not fit into this process.
func (a *arrival) lost() bool { return slices.Contains(a.fds, nil) }

func newInlet() *inlet { return &inlet{updates: make(chan arrival, 1), over: make(chan struct{})} }

// end says that nothing more comes. Only the goroutine that reads calls it.
func (i *inlet) end(why error) {
	i.why = why
	close(i.over)
}

// newLine takes a connection over, for nothing else, and reads from it until close.
func newLine(c *peer.Conn) *line {
	k := &line{read: make(chan struct{}), asked: map[uint32]chan answer{}, followers: map[token]*inlet{}}
	k.ctx, k.cancel = context.WithCancel(context.Background())
	if c == nil {
		k.err = peererr.Invalid("publish.NewClient", "a nil connection", "make one with Dial or Inherit")
		close(k.read)
		return k
	}
	k.conn = connOf(c)
	limits := k.conn.in.Limits()
	limits.Warned = true
	limits.MaxFDs = wire.MaxBatch // what a view brings, whatever Options.MaxFDs says
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

// listen sorts what the server says.
func (k *line) listen() {
	var err error
	for err == nil {
		var m peer.Message
		if m, err = k.conn.Receive(k.ctx); err != nil {
			break
		}
		if err = k.take(m); err != nil {
			_ = m.Close()
			err = k.conn.in.Fail(err)
		}
		runtime.Gosched() // to whom it is for
	}
	k.mu.Lock()
	k.err = err
	asked, followers := k.asked, k.followers
	k.asked, k.followers = nil, nil
	why := k.gone(opFollow)
	k.mu.Unlock()
	for _, a := range asked {
		if a != nil {
			close(a)
		}
	}
	for _, i := range followers {
		if i != nil {
			i.end(why)
		}
	}
	close(k.read)
}

// take takes a message over, unless it fails.
func (k *line) take(m peer.Message) error {
	said, err := toClient(m.Kind, m.Body, len(m.FDs))
	if err != nil {
		return err
	}
	k.mu.Lock()
	unwanted, err := k.sortLocked(said, m)
	k.mu.Unlock()
	if !unwanted || err != nil {
		return err
	}
	if s, ok := said.(*accepted); ok && k.closer.Acquire() {
		go func() { // this goroutine reads, and must not wait until something is sent
			defer k.closer.Release()
			_ = k.conn.Send(k.ctx, pack(&leave{s.token}))
		}()
	}
	return m.Close()
}

// sortLocked gives what the server said to whoever waits for it. unwanted says
// that nobody does any more. The caller has mu.
func (k *line) sortLocked(said message, m peer.Message) (unwanted bool, err error) {
	switch s := said.(type) {
	case *listing:
		return k.answerLocked(s.number, answer{message: s})
	case *denied:
		return k.answerLocked(s.number, answer{message: s})
	case *accepted:
		if _, there := k.followers[s.token]; there {
			return false, peererr.Violation("two followers of one token")
		}
		a := answer{message: s, page: m.FDs[0], inlet: newInlet()} // nil if it was lost
		unwanted, err := k.answerLocked(s.number, a)
		switch {
		case err != nil:
			return false, err
		case unwanted:
			k.followers[s.token] = nil // until the server has heard that it leaves
		default:
			k.followers[s.token] = a.inlet
		}
		return unwanted, nil
	case *update:
		i, there := k.followers[s.token]
		switch {
		case !there:
			return false, peererr.Violation("an update for an unknown token")
		case i == nil: // it left, and the server did not know yet
			return true, nil
		}
		select {
		case i.updates <- arrival{s, m.FDs}:
		default:
			return false, peererr.Violation("an update before the one before was answered")
		}
	case *ended:
		if i := k.followers[s.token]; i != nil {
			i.end(reasonOfEnd(s))
		}
		delete(k.followers, s.token)
	}
	return false, nil
}

// answerLocked gives an answer to whoever asked, unless the request was given up.
// The caller has mu.
func (k *line) answerLocked(number uint32, a answer) (unwanted bool, err error) {
	to, asked := k.asked[number]
	if !asked {
		return false, peererr.Violation("an answer to request %d, which was not made", number)
	}
	delete(k.asked, number)
	if to == nil {
		return true, nil
	}
	to <- a // has room for one
	return false, nil
}

// errMoved is the cause of an end that another publisher may go on from.
var errMoved = errors.New("moved")

const opFollow = "publish.Follow"

func reasonOfEnd(m *ended) error {
	switch {
	case m.state == Moved:
		return peererr.Wrap(errMoved, opFollow, ErrWithdrawn, fmt.Sprintf("%q", m.reason), "follow it again: it is published anew at the same socket, or will be")
	case m.status == statusWithdrawn:
		return peererr.New(opFollow, ErrWithdrawn, "", "close the follower when its work is done")
	case m.status == statusLeft:
		return peererr.Closed(opFollow, "follower")
	}
	return peererr.New(opFollow, peer.ErrRefused, fmt.Sprintf("%q", m.reason), "the reason is the publisher's own words")
}

// ask sends a request and waits for its answer.
func (k *line) ask(ctx context.Context, op string, request func(number uint32) message) (answer, error) {
	if !k.closer.Acquire() {
		return answer{}, peererr.Closed(op, "client")
	}
	defer k.closer.Release()
	to := make(chan answer, 1)
	k.mu.Lock()
	if k.err != nil {
		err := k.gone(op)
		k.mu.Unlock()
		return answer{}, err
	}
	k.number++
	number := k.number
	k.asked[number] = to
	k.mu.Unlock()
	if err := k.conn.Send(ctx, pack(request(number))); err != nil {
		k.mu.Lock()
		delete(k.asked, number) // what was not sent has no answer
		k.mu.Unlock()
		if errors.Is(err, peer.ErrGone) {
			err = k.whyGone(ctx, op, err)
		}
		return answer{}, err
	}
	limited, cancel := context.WithTimeout(ctx, k.conn.in.Limits().Timeout)
	defer cancel()
	select {
	case a, ok := <-to:
		if !ok {
			k.mu.Lock()
			defer k.mu.Unlock()
			return answer{}, k.gone(op)
		}
		return a, nil
	case <-limited.Done():
		k.abandon(number, to)
		return answer{}, peererr.Wait(ctx, op, "the server has not answered", "see what it waits for, or raise Options.Timeout")
	}
}

// gone is the answer where nothing is read any more. The caller has mu.
func (k *line) gone(op string) error {
	if k.closer.Closed() {
		return peererr.Closed(op, "client")
	}
	return fmt.Errorf("%s: %w", op, k.err)
}

// whyGone waits for what the server said before it went, which is read.
func (k *line) whyGone(ctx context.Context, op string, err error) error {
	select {
	case <-k.read:
		k.mu.Lock()
		defer k.mu.Unlock()
		return k.gone(op)
	case <-ctx.Done():
		return err
	}
}

// abandon gives up a request that was sent. If the answer comes later, and makes
// a follower, that leaves again.
func (k *line) abandon(number uint32, to chan answer) {
	k.mu.Lock()
	_, open := k.asked[number]
	if open {
		k.asked[number] = nil
	}
	k.mu.Unlock()
	if open {
		return
	}
	if a, ok := <-to; ok {
		k.refuse(a)
	}
}

// refuse gives up what an answer brought.
func (k *line) refuse(a answer) {
	if s, ok := a.message.(*accepted); ok {
		_ = a.page.Close()
		k.leave(s.token, a.inlet)
	}
}

// leave tells the server that a follower wants no more, and drops what is under
// way to it. Twice is once.
func (k *line) leave(t token, i *inlet) {
	k.mu.Lock()
	there := k.followers[t] != nil
	if there {
		k.followers[t] = nil
	}
	k.mu.Unlock()
	if there {
		_ = k.conn.Send(k.ctx, pack(&leave{t})) // a connection that is over needs no leave
	}
	select {
	case a := <-i.updates:
		_ = peer.CloseAll(a.fds)
	default:
	}
}

// Listing is what a server says of a publication.
type Listing struct {
	Name string
	Kind handles.Kind
	// Access is what this client may do with it.
	Access Access
	// Element and ElementSize, in bytes, are set for arrays alone.
	Element     handles.ElementType
	ElementSize int
	// Length elements of an array, or bytes of a buffer, are shown, in so many
	// Bytes of memory.
	Length, Bytes int
	// Generation is 0 where nothing was announced yet.
	Generation uint64
	// Identity is the publication's own: it stays when another process takes the
	// publication over, and is another where a publication of that name is made anew.
	Identity [16]byte
}

// list is Client.List.
func (k *line) list(ctx context.Context) ([]Listing, error) {
	const op = "publish.Client.List"
	a, err := k.ask(ctx, op, func(n uint32) message { return &list{n} })
	if err != nil {
		return nil, err
	}
	said, ok := a.message.(*listing)
	if !ok {
		return nil, k.surprise(op, a)
	}
	all := make([]Listing, len(said.entries))
	for i, e := range said.entries {
		all[i] = Listing{e.name, e.kind, e.access, e.element, int(e.size), int(e.length), int(e.bytes), e.generation, e.identity}
	}
	slices.SortFunc(all, func(a, b Listing) int { return cmp.Compare(a.Name, b.Name) })
	return all, nil
}

// surprise is an answer to another question than was asked.
func (k *line) surprise(op string, a answer) error {
	if d, ok := a.message.(*denied); ok {
		return deniedError(op, d)
	}
	k.refuse(a)
	return k.conn.in.Fail(peererr.Violation("an answer of kind %#x to another request", a.message.kind()))
}

func deniedError(op string, d *denied) error {
	kind := map[status]error{statusUnknown: ErrUnknown, statusLimit: peer.ErrTooLarge, statusForbidden: cuda.ErrNotPermitted}[d.status]
	if kind == nil {
		kind = peer.ErrRefused
	}
	if d.status == statusForbidden {
		return peererr.New(op, kind, fmt.Sprintf("%q", d.reason), "set ReadOnly, or ask the publisher for more")
	}
	return peererr.New(op, kind, fmt.Sprintf("%q", d.reason), "List tells what is published; the reason is the publisher's own words")
}

// subscribe asks for a publication.
func (k *line) subscribe(ctx context.Context, op, name string, room uint64, readOnly bool, has possession) (*accepted, answer, error) {
	if err := checkPublished(op, name); err != nil {
		return nil, answer{}, err
	}
	wished := WriteAccess
	if readOnly {
		wished = ReadAccess
	}
	a, err := k.ask(ctx, op, func(n uint32) message { return &follow{number: n, access: wished, room: room, name: name, has: has} })
	if err != nil {
		return nil, a, err
	}
	s, ok := a.message.(*accepted)
	switch {
	case !ok:
		return nil, a, k.surprise(op, a)
	case a.page == nil:
		k.refuse(a)
		return nil, a, peererr.FilesLost("the page to order work by was dropped")
	}
	return s, a, nil
}
