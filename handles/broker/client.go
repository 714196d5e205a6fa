package broker

import (
	"cmp"
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"maps"
	"sync"
	"time"
	"unicode/utf8"

	"github.com/cuvmm/cuvmm/cuda"
	"github.com/cuvmm/cuvmm/handles/broker/keeper"
	"github.com/cuvmm/cuvmm/handles/peer"
	"github.com/cuvmm/cuvmm/handles/publish"
	"github.com/cuvmm/cuvmm/internal/errs"
	"github.com/cuvmm/cuvmm/internal/life"
	"github.com/cuvmm/cuvmm/internal/wait"
	"github.com/cuvmm/cuvmm/internal/wire"
)

// Client writes and attaches the objects of a broker. All methods are safe for concurrent use, and go
// on with the next broker when one ends. The caller closes it, after its objects and writers.
type Client struct {
	path    string
	o       DialOptions
	number  holder
	closer  life.Closer
	closing context.Context // ends with Close
	endAll  context.CancelFunc
	ctx     context.Context // ends with closing, and when a client that does not come back is cut off
	cancel  context.CancelFunc
	running sync.WaitGroup
	// waits and commits are taken by requests that go on at the broker, which allows maxAwaits.
	waits, commits wait.Slot

	mu      sync.Mutex
	now     *line
	changed chan struct{} // closed and replaced when there is another line
	away    error         // why the last attempt to come back failed
	// held are the objects that are open here, and loose the keys of those that this client may hold
	// without knowing: the next broker is told of both.
	held  map[keeper.Key]map[*Object]struct{}
	loose map[keeper.Key]struct{}
	// early is an object that the broker asked for while its memory was on the way.
	early keeper.Key
}

// DialOptions configure [Dial]. The zero value connects now, and again whenever the connection ends.
type DialOptions struct {
	peer.Options
	// Wait makes Dial wait, until its context ends, for a process to serve the socket. Otherwise a
	// socket that no process serves is an error.
	Wait bool
	// ComeBack bounds how the client connects again.
	ComeBack publish.ComeBack
}

// Dial connects to the broker at a socket: see [peer.Dial]. Other users may use it too ([peer.Options], Shared),
// and a broker of this process's user or of root is trusted, unless Options.Allow says otherwise. The context
// bounds the first connection. The caller closes the client.
func Dial(ctx context.Context, path string, o DialOptions) (*Client, error) {
	const op = "broker.Dial"
	o.Shared = true
	back := &o.ComeBack
	if back.First < 0 || back.Most < 0 {
		return nil, errs.PeerInvalid(op, "a negative pause", "use 0 for the default")
	}
	if back.First == 0 {
		back.First = 10 * time.Millisecond
	}
	if back.Most == 0 {
		back.Most = time.Second
	}
	k, err := dial(ctx, op, path, o)
	if err != nil {
		return nil, err
	}
	k.o = o
	if back.Context != nil {
		stop := context.AfterFunc(back.Context, k.cancel)
		context.AfterFunc(k.ctx, func() { stop() })
	}
	k.running.Go(k.redial)
	return k, nil
}

// dial makes the first connection. A broker may end, or stop, before it has greeted.
func dial(ctx context.Context, op, path string, o DialOptions) (*Client, error) {
	if !o.Wait {
		c, err := peer.Dial(ctx, path, o.Options)
		if err != nil {
			return nil, err
		}
		return newClient(ctx, op, path, c)
	}
	for pause := o.ComeBack.First; ; pause = min(2*pause, o.ComeBack.Most) {
		var k *Client
		c, err := peer.DialWait(ctx, path, o.Options)
		if err == nil {
			k, err = newClient(ctx, op, path, c)
		}
		again := errors.Is(err, peer.ErrGone) || errors.Is(err, peer.ErrTimeout)
		if err == nil || !again || !wait.Sleep(ctx, pause) {
			return k, err
		}
	}
}

// NewClient makes a client of a connection, which it owns. It does not come back when that ends.
func NewClient(ctx context.Context, c *peer.Conn) (*Client, error) {
	const op = "broker.NewClient"
	if c == nil {
		return nil, errs.PeerInvalid(op, "a nil connection", "make one with peer.Inherit")
	}
	k, err := newClient(ctx, op, "", c)
	if err == nil {
		k.running.Go(func() {
			select {
			case <-k.now.over:
				k.cancel()
			case <-k.ctx.Done():
			}
		})
	}
	return k, err
}

func newClient(ctx context.Context, op, path string, c *peer.Conn) (*Client, error) {
	k := &Client{path: path, waits: make(wait.Slot, maxAwaits/2), commits: make(wait.Slot, maxAwaits/4), changed: make(chan struct{}), held: map[keeper.Key]map[*Object]struct{}{}, loose: map[keeper.Key]struct{}{}}
	_, _ = rand.Read(k.number[:]) // never fails
	if err := k.hello(ctx, op, c); err != nil {
		_ = c.Close()
		return nil, err
	}
	k.closing, k.endAll = context.WithCancel(context.Background())
	k.ctx, k.cancel = context.WithCancel(k.closing)
	k.now = newLine(c, k.broker(), k.wanted)
	return k, nil
}

// broker names the broker in errors.
func (k *Client) broker() string {
	if k.path == "" {
		return "the broker"
	}
	return fmt.Sprintf("the broker at %q", k.path)
}

// hello tells the broker who this client is. One that takes no more clients may have ended the connection by then, and
// has said why.
func (k *Client) hello(ctx context.Context, op string, c *peer.Conn) error {
	err := c.Send(ctx, peer.Message{Kind: wire.BrokerHello, Body: k.number[:]})
	if errors.Is(err, peer.ErrGone) {
		m, why := c.Receive(ctx)
		_ = m.Close()
		err = cmp.Or(why, err)
	}
	if err != nil {
		return fmt.Errorf("%s: %s: %w", op, k.broker(), err)
	}
	return nil
}

// redial connects again whenever a connection has ended. It pauses after one that ended soon, because
// a broker that refuses it would do so again at once.
func (k *Client) redial() {
	pause, began := k.o.ComeBack.First, time.Now()
	for old := k.now; ; {
		select {
		case <-old.over:
		case <-k.ctx.Done():
			return
		}
		_ = old.c.Close()
		// What comes on it last is noted before the next broker is told what this client holds.
		if !old.giving.Take(k.ctx, nil) {
			return
		}
		for {
			if time.Since(began) > k.o.ComeBack.Most {
				pause = k.o.ComeBack.First
			} else if !wait.Sleep(k.ctx, pause) {
				return
			} else {
				pause = min(2*pause, k.o.ComeBack.Most)
			}
			began = time.Now()
			l, err := k.comeBack()
			if err == nil {
				old = l
				break
			}
			k.mu.Lock()
			k.away = err
			k.mu.Unlock()
		}
	}
}

// comeBack connects, and tells the broker what this client holds.
func (k *Client) comeBack() (*line, error) {
	c, err := peer.Dial(k.ctx, k.path, k.o.Options)
	if err != nil {
		return nil, err
	}
	if err := k.hello(k.ctx, "broker.Client", c); err != nil {
		_ = c.Close()
		return nil, err
	}
	// Nothing is attached before there is a connection, and what is closed meanwhile is released on it.
	l := newLine(c, k.broker(), k.wanted)
	tell := func(kind uint16, key keeper.Key) error {
		_, err := l.do(k.ctx, "broker.Client", request{kind: kind, key: key})
		return err
	}
	k.mu.Lock()
	defer k.mu.Unlock()
	held := maps.Clone(k.held)
	// Once more for what was closed while the broker was told.
	for first := true; err == nil && (first || len(k.loose) > 0); first = false {
		loose := maps.Clone(k.loose)
		k.mu.Unlock()
		for key := range loose {
			err = errors.Join(err, tell(wire.BrokerRelease, key))
		}
		for key := range held {
			lost := tell(wire.BrokerHold, key)
			if errors.Is(lost, ErrLost) {
				k.lose(key, lost)
				continue
			}
			err = errors.Join(err, lost)
		}
		held = nil
		k.mu.Lock()
		if err == nil {
			maps.DeleteFunc(k.loose, func(key keeper.Key, _ struct{}) bool { _, told := loose[key]; return told })
		}
	}
	if err != nil {
		_ = c.Close()
		return nil, err
	}
	k.now, k.away = l, nil
	close(k.changed)
	k.changed = make(chan struct{})
	return l, nil
}

// hold notes an object that is open here.
func (k *Client) hold(o *Object) {
	k.mu.Lock()
	defer k.mu.Unlock()
	if k.held[o.key] == nil {
		k.held[o.key] = map[*Object]struct{}{}
	}
	k.held[o.key][o] = struct{}{}
	delete(k.loose, o.key)
	if k.early == o.key {
		o.want()
	}
}

// lose tells the objects of a key that the broker does not have it any more.
func (k *Client) lose(key keeper.Key, why error) {
	k.mu.Lock()
	defer k.mu.Unlock()
	for o := range k.held[key] {
		o.lose(why)
	}
}

// wanted tells the objects of a key that the broker asks for their memory.
func (k *Client) wanted(key keeper.Key) {
	k.mu.Lock()
	defer k.mu.Unlock()
	if len(k.held[key]) == 0 {
		k.early = key
	}
	for o := range k.held[key] {
		o.want()
	}
}

// letGo notes that an object is closed here, and tells the broker of the last of a key.
func (k *Client) letGo(o *Object) {
	if k.closer.Acquire() { // from now on Close waits until the broker is told
		defer k.closer.Release()
	}
	k.mu.Lock()
	delete(k.held[o.key], o)
	l := k.now
	k.mu.Unlock()
	k.giveBack(l, o.key)
}

// giveBack tells the broker what this client does not have. It takes the turn of requests that bring memory,
// or one of those could have the broker count what this release ends. A broker that does not reply keeps no
// caller waiting for longer than a moment.
func (k *Client) giveBack(l *line, key keeper.Key) {
	told := make(chan struct{})
	k.running.Go(func() {
		defer close(told)
		if l.giving.Take(k.ctx, l.over) {
			defer l.giving.Give()
		}
		k.release(l, key)
	})
	select {
	case <-told:
	case <-time.After(releaseWait):
	}
}

const releaseWait = time.Second

// release tells the broker that this client does not have an object, unless it does, or has it tell
// the next broker.
func (k *Client) release(l *line, key keeper.Key) {
	k.mu.Lock()
	still := len(k.held[key]) > 0
	if !still {
		delete(k.held, key)
	}
	k.mu.Unlock()
	if still {
		return
	}
	ctx := context.WithoutCancel(k.ctx) // the connection bounds it
	for {
		_, err := l.do(ctx, "broker.Client", request{kind: wire.BrokerRelease, key: key})
		if err == nil {
			return
		}
		k.mu.Lock()
		now := k.now
		if now == l {
			k.loose[key] = struct{}{}
		}
		k.mu.Unlock()
		if now == l {
			return
		}
		l = now // the client came back meanwhile
	}
}

// do sends a request with one reply, and waits for it.
func (l *line) do(ctx context.Context, op string, r request) (reply, error) {
	number, replies, err := l.request(ctx, op, r)
	if err != nil {
		return reply{}, err
	}
	defer l.abandon(number)
	return l.next(ctx, op, replies)
}

// await is do of a request that goes on at the broker, and need not once the context has ended.
func (l *line) await(ctx context.Context, op string, r request) (reply, error) {
	number, replies, err := l.request(ctx, op, r)
	if err != nil {
		return reply{}, err
	}
	defer l.abandon(number)
	got, err := l.next(ctx, op, replies)
	if err != nil && ctx.Err() != nil {
		within, cancel := context.WithTimeout(context.WithoutCancel(ctx), releaseWait) // a broker may read nothing
		defer cancel()
		_ = l.c.Send(within, (&request{kind: wire.BrokerCancel, number: number}).pack())
	}
	return got, err
}

// made refuses a client that no function has made.
func (k *Client) made(op string) error {
	if k == nil || k.ctx == nil {
		return errs.PeerInvalid(op, "a nil or zero client", "make one with Dial or NewClient")
	}
	return nil
}

// on calls a function with the connection, and again with the next one if that ended. Close ends the context that it passes.
func (k *Client) on(ctx context.Context, op string, f func(ctx context.Context, l *line) error) error {
	if err := k.made(op); err != nil {
		return err
	}
	if !k.closer.Acquire() {
		return errs.PeerClosed(op, "client")
	}
	defer k.closer.Release()
	within, cancel := context.WithCancel(ctx)
	defer cancel()
	defer context.AfterFunc(k.closing, cancel)()
	for {
		k.mu.Lock()
		l, changed := k.now, k.changed
		k.mu.Unlock()
		err := f(within, l)
		switch {
		case err == nil:
			return nil
		case k.closing.Err() != nil:
			return errs.PeerClosed(op, "client")
		case !lineOver(l, err):
			return err
		}
		select {
		case <-changed:
		case <-k.ctx.Done():
			if k.closing.Err() != nil {
				return errs.PeerClosed(op, "client")
			}
			return err
		case <-ctx.Done():
			return k.stayedAway(ctx, op, err)
		}
	}
}

// stayedAway is the error of a call whose connection ended with an error, and for which none came in time.
func (k *Client) stayedAway(ctx context.Context, op string, why error) error {
	k.mu.Lock()
	if k.away != nil && !errors.Is(k.away, peer.ErrGone) {
		why = k.away
	}
	k.mu.Unlock()
	what, hint := " has gone", "see whether its keeper starts another"
	if errors.Is(why, peer.ErrRefused) {
		what, hint = " refused this client, or has ended", "see its reason"
	}
	return errs.Both(errs.PeerWait(ctx, op, k.broker()+what, hint), why)
}

// lineOver reports whether a request failed because its connection ended. The peer may be gone before
// the connection has noticed.
func lineOver(l *line, err error) bool {
	ended := errors.Is(err, peer.ErrRefused) || errors.Is(err, peer.ErrProtocol) || errors.Is(err, cuda.ErrClosed)
	return errors.Is(err, peer.ErrGone) || ended && over(l.c)
}

// Close disconnects. Calls that wait return cuda.ErrClosed, and what is on its way to them is given back. Objects and
// writers must be closed before (cuda.ErrInUse). A broker that stays away for longer than a second is not told what was closed
// meanwhile: it may count that, or keep a publication from its next publisher, until the process has ended.
func (k *Client) Close() error {
	const op = "broker.Client.Close"
	if err := k.made(op); err != nil {
		return err
	}
	if err := k.unused(op); err != nil {
		return err
	}
	k.closer.Life.Close()
	k.settle()
	k.endAll()
	return k.closer.Close(func() error {
		cut := time.AfterFunc(releaseWait, func() { _ = k.line().c.Close() }) // a broker that does not reply
		k.running.Wait()
		cut.Stop()
		if err := k.unused(op); err != nil { // a call got one meanwhile
			return err
		}
		return k.line().c.Close()
	})
}

// settle waits a moment for a broker that learns what was closed while there was none.
func (k *Client) settle() {
	for limit := time.After(releaseWait); ; {
		k.mu.Lock()
		owes, changed := len(k.loose) > 0, k.changed
		k.mu.Unlock()
		if !owes {
			return
		}
		select {
		case <-changed:
		case <-k.ctx.Done():
			return
		case <-limit:
			return
		}
	}
}

// unused refuses to close a client that has objects.
func (k *Client) unused(op string) error {
	k.mu.Lock()
	defer k.mu.Unlock()
	for _, all := range k.held {
		for o := range all {
			return errs.Peer(op, cuda.ErrInUse, fmt.Sprintf("%s, such as %q", errs.Count(len(k.held), "open object"), o.About().Name), "close them first")
		}
	}
	return nil
}

// line returns the connection.
func (k *Client) line() *line {
	k.mu.Lock()
	defer k.mu.Unlock()
	return k.now
}

// List returns the objects that the client may read, also those that are being written, by name and
// then by age.
func (k *Client) List(ctx context.Context) (all []Listing, err error) {
	const op = "broker.Client.List"
	err = k.on(ctx, op, func(ctx context.Context, l *line) error {
		all = nil
		number, replies, err := l.request(ctx, op, request{kind: wire.BrokerList})
		if err != nil {
			return err
		}
		defer l.abandon(number)
		for {
			r, err := l.next(ctx, op, replies)
			if err != nil {
				return err
			}
			if all = append(all, r.objects...); r.last {
				return nil
			}
		}
	})
	return all, err
}

// Remove ends the objects of a name, or one version: they are attached no more, and their memory is
// free when no process has it mapped. Version 0 is all that are committed. It needs write access to
// the name.
func (k *Client) Remove(ctx context.Context, name string, version uint64) error {
	const op = "broker.Client.Remove"
	if err := k.made(op); err != nil {
		return err
	}
	if err := checkName(op, name); err != nil {
		return err
	}
	sent := false // to a broker that may have ended after it removed them
	return k.on(ctx, op, func(ctx context.Context, l *line) error {
		number, replies, err := l.request(ctx, op, request{kind: wire.BrokerRemove, name: name, version: version})
		if err != nil {
			return err
		}
		defer l.abandon(number)
		_, err = l.next(ctx, op, replies)
		if sent && errors.Is(err, ErrUnknown) {
			return nil
		}
		sent = true
		return err
	})
}

// awaitPause is the pause of a call that waits beside many others.
const awaitPause = 20 * time.Millisecond

// await waits until a name is sealed, or nobody writes it, or for a moment beside many other calls that wait: others
// may wait for longer. what is what it waits for.
func (k *Client) await(ctx context.Context, op, name, what string) error {
	const hint = "see what that process does: Client.List names it"
	if !k.waits.Try() {
		if wait.Sleep(ctx, awaitPause) {
			return nil
		}
		return errs.PeerWait(ctx, op, what, hint)
	}
	defer k.waits.Give()
	return k.on(ctx, op, func(ctx context.Context, l *line) error {
		_, err := l.await(ctx, op, request{kind: wire.BrokerAwait, name: name})
		if err != nil && ctx.Err() != nil {
			err = errs.PeerWait(ctx, op, what, hint)
		}
		return err
	})
}

func checkName(op, name string) error {
	if name == "" || len(name) > MaxName || !utf8.ValidString(name) {
		return errs.PeerInvalid(op, fmt.Sprintf("the name %q, of %s", wire.Clip(name, 40), errs.Bytes(len(name))), fmt.Sprintf("use 1 to %d bytes of UTF-8", MaxName))
	}
	return nil
}
