package publish

import (
	"context"
	"errors"
	"fmt"
	"path/filepath"
	"slices"
	"sync"
	"time"

	"github.com/cuvmm/cuvmm/cuda"
	"github.com/cuvmm/cuvmm/handles"
	"github.com/cuvmm/cuvmm/handles/peer"
	"github.com/cuvmm/cuvmm/internal/errs"
	"github.com/cuvmm/cuvmm/internal/life"
	"github.com/cuvmm/cuvmm/internal/lock"
	"github.com/cuvmm/cuvmm/internal/sock"
	"github.com/cuvmm/cuvmm/internal/wait"
)

// Client lists, opens and follows the publications of a [Server]. All methods are safe
// for concurrent use. The caller closes it, and closes its followers separately.
type Client struct {
	path    string // of the socket, absolute; empty if the caller made the connection
	options DialOptions
	ctx     context.Context // ends with Close, and with ComeBack.Context
	cancel  context.CancelFunc
	closer  life.Closer
	dialing sync.WaitGroup

	mu      lock.Mutex[lock.Leaf]
	now     *line
	changed chan struct{} // closed and replaced when there is another line
	// process serves the socket; nil if it cannot be watched. folder is the socket's.
	process *sock.Process
	folder  *sock.Dir
	// followers are those that are not closed.
	followers map[*follower]struct{}
}

// DialOptions configure [Dial]. The zero value connects once.
type DialOptions struct {
	peer.Options
	// ComeBack makes the client connect again whenever the connection ends. Its
	// followers then continue with the next process that publishes under their names. If
	// it is nil they end with peer.ErrGone.
	ComeBack *ComeBack
	// Wait makes Dial wait, until its context ends, for a process to serve the socket.
	// Otherwise a socket that no process serves is an error.
	Wait bool
}

// ComeBack configures how a client connects again. The zero value tries until Close.
type ComeBack struct {
	// Context ends the attempts. Nil means that only Close does.
	Context context.Context
	// First is the pause after the first failed attempt. Each pause is twice the one
	// before, and Most bounds them. 0 is 10 milliseconds and one second.
	First, Most time.Duration
}

// Dial connects to the server at a socket: see [peer.Dial]. The context bounds the
// first connection. The caller closes the client.
func Dial(ctx context.Context, path string, o DialOptions) (*Client, error) {
	const op = "publish.Dial"
	if b := o.ComeBack; b != nil {
		back := *b
		if back.First < 0 || back.Most < 0 {
			return nil, errs.PeerInvalid(op, "a negative pause", "use 0 for the default")
		}
		if back.First == 0 {
			back.First = 10 * time.Millisecond
		}
		if back.Most == 0 {
			back.Most = time.Second
		}
		o.ComeBack = &back
	}
	path, err := filepath.Abs(path) // a later chdir changes nothing
	if err != nil {
		return nil, errs.SystemCall(op, "this process's directory", err)
	}
	dial := peer.Dial
	if o.Wait {
		dial = peer.DialWait
	}
	c, err := dial(ctx, path, o.Options)
	if err != nil {
		return nil, err
	}
	k := newClient(c)
	k.path, k.options = path, o
	k.metLocked() // nothing else refers to it yet
	if b := o.ComeBack; b != nil {
		if b.Context != nil {
			stop := context.AfterFunc(b.Context, k.cancel)
			context.AfterFunc(k.ctx, func() { stop() })
		}
		k.dialing.Go(k.redial)
	}
	return k, nil
}

// NewClient makes a client of a connection, which it owns and reads until Close. Its
// followers end with the connection.
func NewClient(c *peer.Conn) *Client { return newClient(c) }

func newClient(c *peer.Conn) *Client {
	k := &Client{now: newLine(c), changed: make(chan struct{})}
	k.ctx, k.cancel = context.WithCancel(context.Background())
	return k
}

// redial connects again whenever a connection has ended. It pauses after a connection
// that ended soon, because a server that refuses it would do so again at once.
func (k *Client) redial() {
	b, pause, began := k.options.ComeBack, k.options.ComeBack.First, time.Now()
	for old := k.current(); ; {
		select {
		case <-old.read:
		case <-k.ctx.Done():
			return
		}
		old.retire()
		switch {
		case time.Since(began) > b.Most:
			pause = b.First
		case !wait.Sleep(k.ctx, pause):
			return
		default:
			pause = min(2*pause, b.Most)
		}
		c := k.dialAgain()
		if c == nil {
			return
		}
		old, began = newLine(c), time.Now()
		k.mu.Lock()
		k.now = old
		k.metLocked()
		close(k.changed)
		k.changed = make(chan struct{})
		k.mu.Unlock()
	}
}

// metLocked holds the process that serves the current connection, and the socket's folder.
// Without them TakeOver returns an error.
func (k *Client) metLocked() {
	k.partLocked()
	k.process, _ = k.now.conn.in.Socket().Process()
	k.folder, _ = sock.OpenDir(filepath.Dir(k.path), 0)
}

func (k *Client) partLocked() {
	if k.process != nil {
		_ = k.process.Close()
	}
	if k.folder != nil {
		_ = k.folder.Close()
	}
	k.process, k.folder = nil, nil
}

// dialAgain connects, or returns nil if the client is closed.
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

// lineOf returns the current connection.
func (k *Client) lineOf(op string) (*line, error) {
	if k == nil {
		return nil, errs.PeerInvalid(op, "a nil client", "make one with Dial or NewClient")
	}
	if k.closer.Closed() {
		return nil, errs.PeerClosed(op, "client")
	}
	return k.current(), nil
}

// after waits for the connection that replaces one that has ended.
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
			if !k.closer.Closed() {
				return nil, errs.Peer(opFollower, peer.ErrGone, "the publisher, and the context of DialOptions.ComeBack has ended", "make another client to follow it again")
			}
			return nil, errs.PeerClosed(opFollower, "client")
		case <-ctx.Done():
			return nil, ctx.Err()
		}
	}
}

// List returns the server's publications, sorted by name, without the ones that the client
// has no access to.
func (k *Client) List(ctx context.Context) ([]Listing, error) {
	const op = "publish.Client.List"
	l, err := k.lineOf(op)
	if err != nil {
		return nil, err
	}
	all, err := l.list(ctx, op)
	if errors.Is(err, peer.ErrGone) && k.options.ComeBack != nil && k.ctx.Err() == nil {
		err = errs.Peer(op, peer.ErrGone, "", "try again later: the client connects again by itself")
	}
	return all, err
}

// Await waits, until the context ends, for the server to publish something under the name that this
// client may follow: [Follow] and [Open] return [ErrUnknown] while there is nothing. A client that comes back waits
// for a server, too, as [DialOptions].Wait has Dial do.
func (k *Client) Await(ctx context.Context, name string) error {
	const op = "publish.Client.Await"
	if err := checkPublished(op, name); err != nil {
		return err
	}
	for pause := shortestPause; ; pause = min(2*pause, longestPause) {
		l, err := k.lineOf(op)
		if err != nil {
			return err
		}
		all, err := l.list(ctx, op)
		switch {
		case err == nil && slices.ContainsFunc(all, func(p Listing) bool { return p.Name == name }):
			return nil
		case err != nil && ctx.Err() == nil && !(l.ended() && k.options.ComeBack != nil && k.ctx.Err() == nil):
			return err
		case !wait.Sleep(ctx, pause):
			return errs.PeerWait(ctx, op, fmt.Sprintf("nothing is published as %q", name), "start the process that publishes it, or wait longer")
		}
	}
}

// The shortest and the longest pause between two requests for the listing.
const shortestPause, longestPause = time.Millisecond, 100 * time.Millisecond

// Close ends the connection. Followers keep what they have mapped, as if the
// publisher had ended, until each is closed, and streams that still wait for the publisher
// go on ([ErrUnfinished]). Idempotent.
func (k *Client) Close() error {
	return k.closer.Close(func() error {
		k.cancel()
		k.dialing.Wait()
		k.mu.Lock()
		k.partLocked()
		k.mu.Unlock()
		return k.current().close()
	})
}

// Listing describes one publication of a server.
type Listing struct {
	Name string
	Kind handles.Kind
	// Access is what the client may do with the publication.
	Access Access
	// Element and ElementSize, in bytes, are set for arrays only.
	Element     handles.ElementType
	ElementSize int
	// Length counts the elements of an array, or the bytes of a buffer, that are shown;
	// Bytes is the memory behind them.
	Length, Bytes int
	// Generation is 0 until the first announcement.
	Generation uint64
	// Identity is random. It stays when another process takes the publication over, and
	// differs if a publication of that name is made anew.
	Identity [16]byte
	// Tag is the group that the memory belongs to, in the publisher's words, and Description the
	// SHA-256 of the description, which is zero if there is none ([PublishOptions]).
	Tag         cuda.Tag
	Description [32]byte
}
