package handles

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"runtime"
	"slices"
	"sync"

	"github.com/cuvmm/cuvmm/cuda"
	"github.com/cuvmm/cuvmm/internal/life"
)

// Client asks a [Server] what it publishes, and follows it. All methods are safe
// for use by any goroutine. The caller closes it, and its followers by
// themselves.
type Client struct {
	conn   *Conn
	ctx    context.Context // ends with Close
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
	page    *FD
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
	fds  []*FD
	lost bool // the descriptors, for want of room
}

func newInlet() *inlet { return &inlet{updates: make(chan arrival, 1), over: make(chan struct{})} }

// end says that nothing more comes. Only the goroutine that reads calls it.
func (i *inlet) end(why error) {
	i.why = why
	close(i.over)
}

// NewClient takes a connection over, for nothing else, and reads from it until
// Close.
func NewClient(c *Conn) *Client {
	k := &Client{conn: c, read: make(chan struct{}), asked: map[uint32]chan answer{}, followers: map[token]*inlet{}}
	k.ctx, k.cancel = context.WithCancel(context.Background())
	if c == nil {
		k.err = failure("handles.NewClient", cuda.ErrInvalidArgument, "a nil connection", "make one with Dial or Inherit")
		close(k.read)
		return k
	}
	c.warned = true
	c.in.maxFDs = batchChunks // what an update brings, whatever Options.MaxFDs says
	c.in.mayLose = func(kind uint16) bool { return kind == acceptedMessage || kind == updateMessage }
	go k.listen()
	return k
}

// Close ends the connection. Followers keep what they have mapped, as if the
// publisher were gone, until each is closed. The second Close does nothing.
func (k *Client) Close() error {
	return k.closer.Close(func() error {
		k.cancel()
		if k.conn == nil {
			return nil
		}
		err := k.conn.Close()
		<-k.read
		return err
	})
}

// listen sorts what the server says.
func (k *Client) listen() {
	var err error
	for err == nil {
		var m Message
		if m, err = k.conn.Receive(k.ctx); err != nil {
			break
		}
		if err = k.take(m); err != nil {
			_ = m.Close()
			err = k.conn.fail(err)
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
func (k *Client) take(m Message) error {
	files := len(m.FDs)
	if m.lost {
		files = lostFiles
	}
	said, err := toClient(m.Kind, m.Body, files)
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
func (k *Client) sortLocked(said message, m Message) (unwanted bool, err error) {
	switch s := said.(type) {
	case *listing:
		return k.answerLocked(s.number, answer{message: s})
	case *denied:
		return k.answerLocked(s.number, answer{message: s})
	case *accepted:
		if _, there := k.followers[s.token]; there {
			return false, violation("two followers of one token")
		}
		a := answer{message: s, inlet: newInlet()}
		if !m.lost {
			a.page = m.FDs[0]
		}
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
			return false, violation("an update for an unknown token")
		case i == nil: // it left, and the server did not know yet
			return true, nil
		}
		select {
		case i.updates <- arrival{s, m.FDs, m.lost}:
		default:
			return false, violation("an update before the one before was answered")
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
func (k *Client) answerLocked(number uint32, a answer) (unwanted bool, err error) {
	to, asked := k.asked[number]
	if !asked {
		return false, violation("an answer to request %d, which was not made", number)
	}
	delete(k.asked, number)
	if to == nil {
		return true, nil
	}
	to <- a // has room for one
	return false, nil
}

const opFollow = "handles.Follow"

func reasonOfEnd(m *ended) error {
	switch m.status {
	case statusWithdrawn:
		return failure(opFollow, ErrWithdrawn, "", "close the follower when its work is done")
	case statusLeft:
		return closedError(opFollow, "follower")
	}
	return failure(opFollow, ErrRefused, fmt.Sprintf("%q", m.reason), "the reason is the publisher's own words")
}

// ask sends a request and waits for its answer.
func (k *Client) ask(ctx context.Context, op string, request func(number uint32) message) (answer, error) {
	if !k.closer.Acquire() {
		return answer{}, closedError(op, "client")
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
		if errors.Is(err, ErrGone) {
			err = k.whyGone(ctx, op, err)
		}
		return answer{}, err
	}
	limited, cancel := context.WithTimeout(ctx, k.conn.limits.Timeout)
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
		return answer{}, waitError(ctx, op, "the server has not answered", "see what it waits for, or raise Options.Timeout")
	}
}

// gone is the answer where nothing is read any more. The caller has mu.
func (k *Client) gone(op string) error {
	if k.closer.Closed() {
		return closedError(op, "client")
	}
	return fmt.Errorf("%s: %w", op, k.err)
}

// whyGone waits for what the server said before it went, which is read.
func (k *Client) whyGone(ctx context.Context, op string, err error) error {
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
func (k *Client) abandon(number uint32, to chan answer) {
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
func (k *Client) refuse(a answer) {
	if s, ok := a.message.(*accepted); ok {
		_ = a.page.Close()
		k.leave(s.token, a.inlet)
	}
}

// leave tells the server that a follower wants no more, and drops what is under
// way to it. Twice is once.
func (k *Client) leave(t token, i *inlet) {
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
		_ = closeAll(a.fds)
	default:
	}
}

// Listing is what a server says of a publication.
type Listing struct {
	Name string
	Kind Kind
	// Access is what this client may do with it.
	Access Access
	// Element and ElementSize, in bytes, are set for arrays alone.
	Element     ElementType
	ElementSize int
	// Length elements of an array, or bytes of a buffer, are shown, in so many
	// Bytes of memory.
	Length, Bytes int
	// Generation is 0 where nothing was announced yet.
	Generation uint64
}

// List asks what is published, by name.
func (k *Client) List(ctx context.Context) ([]Listing, error) {
	const op = "handles.Client.List"
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
		all[i] = Listing{e.name, e.kind, e.access, e.element, int(e.size), int(e.length), int(e.bytes), e.generation}
	}
	slices.SortFunc(all, func(a, b Listing) int { return cmp.Compare(a.Name, b.Name) })
	return all, nil
}

// surprise is an answer to another question than was asked.
func (k *Client) surprise(op string, a answer) error {
	if d, ok := a.message.(*denied); ok {
		return deniedError(op, d)
	}
	k.refuse(a)
	return k.conn.fail(violation("an answer of kind %#x to another request", a.message.kind()))
}

func deniedError(op string, d *denied) error {
	kind := map[status]error{statusUnknown: ErrUnknown, statusLimit: ErrTooLarge, statusForbidden: cuda.ErrNotPermitted}[d.status]
	if kind == nil {
		kind = ErrRefused
	}
	if d.status == statusForbidden {
		return failure(op, kind, fmt.Sprintf("%q", d.reason), "set ReadOnly, or ask the publisher for more")
	}
	return failure(op, kind, fmt.Sprintf("%q", d.reason), "List tells what is published; the reason is the publisher's own words")
}

// subscribe asks for a publication.
func (k *Client) subscribe(ctx context.Context, op, name string, room uint64, readOnly bool) (*accepted, answer, error) {
	if k == nil {
		return nil, answer{}, failure(op, cuda.ErrInvalidArgument, "a nil client", "make one with NewClient")
	}
	if err := checkPublished(op, name); err != nil {
		return nil, answer{}, err
	}
	wished := WriteAccess
	if readOnly {
		wished = ReadAccess
	}
	a, err := k.ask(ctx, op, func(n uint32) message { return &follow{n, wished, room, name} })
	if err != nil {
		return nil, a, err
	}
	s, ok := a.message.(*accepted)
	switch {
	case !ok:
		return nil, a, k.surprise(op, a)
	case a.page == nil:
		k.refuse(a)
		return nil, a, errFDsLost("the page to order work by was dropped")
	}
	return s, a, nil
}
