package publish

import (
	"context"
	"errors"
	"time"

	"github.com/cuvmm/cuvmm/cuda"
	"github.com/cuvmm/cuvmm/handles"
	"github.com/cuvmm/cuvmm/handles/peer"
	"github.com/cuvmm/cuvmm/internal/life"
	"github.com/cuvmm/cuvmm/internal/peererr"
	"github.com/cuvmm/cuvmm/internal/sock"
	"github.com/cuvmm/cuvmm/internal/wait"

	"sync"
)

// Client asks a [Server] what it publishes, and follows it. All methods are safe
// for use by any goroutine. The caller closes it, and its followers by
// themselves.
type Client struct {
	path    string // of the socket; empty for a connection that the caller made
	options DialOptions
	ctx     context.Context // ends with Close, and with ComeBack.Context
	cancel  context.CancelFunc
	closer  life.Closer
	dialing sync.WaitGroup

	mu      sync.Mutex
	now     *line
	changed chan struct{} // closed, and made anew, when there is another line
	// process is the one that serves the socket; nil if it cannot be watched.
	process *sock.Process
}

// DialOptions say how a client connects. The zero value connects once.
type DialOptions struct {
	peer.Options
	// ComeBack has the client connect again whenever the connection ends, and its
	// followers go on with whoever publishes under their names then. Nil lets them end
	// with peer.ErrGone.
	ComeBack *ComeBack
}

// ComeBack says how a client connects again. The zero value tries until Close.
type ComeBack struct {
	// Context ends the attempts; nil is none.
	Context context.Context
	// First is the pause after the first attempt that fails, and Most the longest, as
	// each is twice the one before. 0 is 10 milliseconds, and a second.
	First, Most time.Duration
}

// Dial connects to the server at a socket: see [peer.Dial]. The context bounds the
// first connection. The caller closes the client.
func Dial(ctx context.Context, path string, o DialOptions) (*Client, error) {
	const op = "publish.Dial"
	if b := o.ComeBack; b != nil {
		back := *b
		if back.First < 0 || back.Most < 0 {
			return nil, peererr.Invalid(op, "a negative pause", "use 0 for the default")
		}
		if back.First == 0 {
			back.First = 10 * time.Millisecond
		}
		if back.Most == 0 {
			back.Most = time.Second
		}
		o.ComeBack = &back
	}
	c, err := peer.Dial(ctx, path, o.Options)
	if err != nil {
		return nil, err
	}
	k := newClient(c)
	k.path, k.options = path, o
	k.process, _ = k.now.conn.in.Socket().Process() // TakeOver says what is missing
	if b := o.ComeBack; b != nil {
		if b.Context != nil {
			stop := context.AfterFunc(b.Context, k.cancel)
			context.AfterFunc(k.ctx, func() { stop() })
		}
		k.dialing.Go(k.redial)
	}
	return k, nil
}

// NewClient takes a connection over, for nothing else, and reads from it until
// Close. Its followers end with the connection.
func NewClient(c *peer.Conn) *Client { return newClient(c) }

func newClient(c *peer.Conn) *Client {
	k := &Client{now: newLine(c), changed: make(chan struct{})}
	k.ctx, k.cancel = context.WithCancel(context.Background())
	return k
}

// redial connects again whenever a connection has ended.
func (k *Client) redial() {
	for old := k.current(); ; {
		select {
		case <-old.read:
		case <-k.ctx.Done():
			return
		}
		_ = old.close()
		c := k.dialAgain()
		if c == nil {
			return
		}
		old = newLine(c)
		process, _ := old.conn.in.Socket().Process()
		k.mu.Lock()
		if k.process != nil {
			_ = k.process.Close()
		}
		k.now, k.process = old, process
		close(k.changed)
		k.changed = make(chan struct{})
		k.mu.Unlock()
	}
}

// dialAgain connects, or returns nil when the client is closed.
func (k *Client) dialAgain() *peer.Conn {
	for pause := k.options.ComeBack.First; ; pause = min(2*pause, k.options.ComeBack.Most) {
		c, err := peer.Dial(k.ctx, k.path, k.options.Options)
		if err == nil {
			return c
		}
		if !wait.Sleep(k.ctx, pause) {
			return nil
		}
	}
}

func (k *Client) current() *line {
	k.mu.Lock()
	defer k.mu.Unlock()
	return k.now
}

// lineOf returns the present connection.
func (k *Client) lineOf(op string) (*line, error) {
	if k == nil {
		return nil, peererr.Invalid(op, "a nil client", "make one with Dial or NewClient")
	}
	if k.closer.Closed() {
		return nil, peererr.Closed(op, "client")
	}
	return k.current(), nil
}

// after waits for a connection later than one that has ended.
func (k *Client) after(ctx context.Context, old *line) (*line, error) {
	for {
		k.mu.Lock()
		now, changed := k.now, k.changed
		k.mu.Unlock()
		if now != old {
			return now, nil
		}
		select {
		case <-changed:
		case <-k.ctx.Done():
			return nil, peererr.Closed(opFollow, "client")
		case <-ctx.Done():
			return nil, ctx.Err()
		}
	}
}

// List asks what is published, by name.
func (k *Client) List(ctx context.Context) ([]Listing, error) {
	l, err := k.lineOf("publish.Client.List")
	if err != nil {
		return nil, err
	}
	return l.list(ctx)
}

// Released ends when the client's connection is given back, after Close. Followers are
// released by themselves.
func (k *Client) Released() cuda.Completion { return k.closer.Completion() }

// Close ends the connection. Followers keep what they have mapped, as if the
// publisher were gone, until each is closed. Idempotent.
func (k *Client) Close() error {
	return k.closer.Close(func() error {
		k.cancel()
		k.dialing.Wait()
		k.mu.Lock()
		if k.process != nil {
			_ = k.process.Close()
		}
		k.process = nil
		k.mu.Unlock()
		return k.current().close()
	})
}

// returns reports whether a follower comes back after such an end.
func (f *follower) returns(why error) bool {
	return f.client != nil && f.taking.Err() == nil && f.client.options.ComeBack != nil && f.client.ctx.Err() == nil &&
		(errors.Is(why, peer.ErrGone) || errors.Is(why, errMoved))
}

// leads reports whether the present connection's end leads to another one.
func (f *follower) leads() bool {
	select {
	case <-f.inlet.over:
		return f.returns(f.inlet.why) && f.ctx.Err() == nil
	default:
		return false
	}
}

// comeBack follows anew on the client's next connections, until a publisher takes the
// follower in. It returns false if there is nothing to come back to.
func (f *follower) comeBack() bool {
	ctx := f.taking
	pause := f.client.options.ComeBack.First
	for k := f.k; ; {
		next, err := f.client.after(ctx, k)
		if err == nil {
			k, err = next, f.attach(next)
			for mayPass(err) && wait.Sleep(ctx, pause) {
				pause = min(2*pause, f.client.options.ComeBack.Most)
				err = f.attach(k)
			}
		}
		switch {
		case err == nil:
			return true
		case ctx.Err() != nil:
			return false
		case errors.Is(err, peer.ErrGone):
			continue
		}
		f.mu.Lock()
		f.gone, f.state = err, Ended
		f.mu.Unlock()
		return false
	}
}

// mayPass reports whether a publisher that does not take a follower in may do so soon:
// it is not ready yet, or has no room at present.
func mayPass(err error) bool {
	return errors.Is(err, ErrUnknown) || errors.Is(err, peer.ErrTooLarge) || errors.Is(err, peer.ErrTimeout)
}

// attach follows on another connection with what the follower has.
func (f *follower) attach(k *line) error {
	t := &f.tracker
	has := possession{publication: f.identity, generation: t.generation, length: t.length}
	for _, c := range t.chunks {
		has.chunks = append(has.chunks, c.id)
	}
	said, a, err := k.subscribe(f.taking, opFollow, f.name, t.room, f.options.ReadOnly, has)
	if err != nil {
		return err
	}
	defer func() { _ = a.page.Close() }()
	w, err := f.fits(k, said, a.page)
	if err != nil {
		k.leave(said.token, a.inlet)
		return err
	}
	// Nothing uses the word that is replaced, and no stream waits for it.
	f.words.Lock()
	f.letGo()
	old := f.word
	f.mu.Lock()
	f.k, f.token, f.slot, f.inlet, f.word, f.identity = k, said.token, said.slot, a.inlet, w, said.identity
	f.floor, f.completed, f.died, f.ended = min(f.completed, lastGeneration), 0, false, make(chan struct{})
	if p := f.pending; p != nil && p.ordered > f.floor {
		f.pending = nil
	}
	f.waits = nil
	f.mu.Unlock()
	f.words.Unlock()
	t.serial, t.busy = 0, nil
	if err := old.close(opFollow); err != nil {
		f.mu.Lock()
		f.stuck = append(f.stuck, old) // Close tries again
		f.mu.Unlock()
	}
	return nil
}

// fits compares what is published now with what was followed, and opens its word.
func (f *follower) fits(k *line, said *accepted, page *peer.FD) (*word, error) {
	was, is := f.about, said.about
	if is.Kind != was.Kind || is.Element != was.Element || is.ElementSize != was.ElementSize || is.Location != was.Location || is.Device != was.Device {
		return nil, peererr.New(opFollow, handles.ErrMismatch, "a publication of the same name with other elements, or on another device",
			"close the follower, and follow it anew")
	}
	return k.openWord(opFollow, f.dev, page, said.slot)
}

// saw notes the state that a publisher declares.
func (f *follower) saw(s State) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.state = s
}

// mostCame bounds what is remembered of a publisher whose work stands still.
const mostCame = 1024

// remember notes a view that arrived, until a later one is complete: the last that is
// complete is what remains when the publisher dies.
func (f *follower) remember(s shown) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.came = append(f.came, s)
	for len(f.came) > 1 && f.reachedLocked(f.came[1].ordered) {
		f.came = f.came[1:]
	}
	if len(f.came) > mostCame {
		f.came = append(f.came[:1], f.came[2:]...)
	}
}
