package broker

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"os/exec"
	"sync"
	"time"

	"github.com/cuvmm/cuvmm/cuda"
	"github.com/cuvmm/cuvmm/handles/broker/keeper"
	"github.com/cuvmm/cuvmm/handles/peer"
	"github.com/cuvmm/cuvmm/handles/publish"
	"github.com/cuvmm/cuvmm/internal/core"
	"github.com/cuvmm/cuvmm/internal/errs"
	"github.com/cuvmm/cuvmm/internal/fd"
	"github.com/cuvmm/cuvmm/internal/life"
	"github.com/cuvmm/cuvmm/internal/link"
	"github.com/cuvmm/cuvmm/internal/wait"
)

// Broker keeps objects and serves them to clients. All methods are safe for concurrent use. The
// caller closes it.
type Broker struct {
	sys    *cuda.System
	o      Options
	keeper *keeper.Client // nil without one
	closer life.Closer
	ctx    context.Context // ends with Close, and when the keeper fails: its cause is why
	end    context.CancelCauseFunc
	// running are the sessions and the watches of processes.
	running sync.WaitGroup

	// remembering is held while the keeper is told of a client, or to forget it, publishing while it is told who
	// publishes what is kept, or that it was removed, and counting while it is told the highest version; before mu.
	remembering, publishing, counting sync.Mutex

	mu    sync.Mutex
	books *books
	// changed is closed and replaced when an object is sealed, or ends.
	changed chan struct{}
	// present are the clients that are connected, or whose process lives.
	present  map[holder]*presence
	sessions int            // those, too, that hold something without one
	ofUser   map[uint32]int // sessions, too
	// dropping is how many objects ended whose files are not closed yet.
	dropping int
	counted  Status // what has been counted
}

// Options configure a Broker. The zero value keeps objects as long as the broker lives, without
// limits, for every client that the listener accepts.
type Options struct {
	// Keeper keeps the objects when this process ends: make it of the connection that the process
	// has inherited (keeper.RunOptions). Nil has them end with the broker.
	Keeper *keeper.Client
	// Authorize returns what a caller may do with objects of a name, such as [Policy.Authorize]. It is called
	// on several goroutines, with each request anew. Nil grants everything. A panic grants nothing and is
	// logged.
	Authorize func(c Caller, name string) Grant
	// Limit bounds the bytes of all objects; 0 is no bound.
	Limit int
	// Return is how long the clients of an earlier broker have to come back, before the objects that
	// they were writing, or alone held, end. 0 is 10 seconds.
	Return time.Duration
	// Ask is how long a request for which there is no room waits for the holders of other objects, who are
	// asked to release them (Object.Wanted). 0 is a second.
	Ask time.Duration
	// Copy makes the command of a process that copies what is committed under a Grant with Copy. Its descriptor 3
	// is the connection for [RunCopy], which it calls, and then ends. Nil refuses such objects; a panic, or a nil
	// command, fails the commit.
	Copy func() *exec.Cmd
	// Warning returns what an administrator should know of the broker's configuration, for Status.Warning. Nil
	// and "" are nothing.
	Warning func() string
	// Log receives the failures of clients at level Debug, since they can cause them at any rate, commits
	// at Info, and above it what the broker lacks. Nil discards them, but for panics of Authorize, which go
	// to slog.Default.
	Log *slog.Logger
}

// maxSessions bounds the clients at a time, beside a quarter of the process's limit of open files.
const maxSessions = 1024

// New makes a broker on a System, whose devices its memory is on, with the objects that its keeper
// has.
func New(ctx context.Context, sys *cuda.System, o Options) (*Broker, error) {
	const op = "broker.New"
	switch {
	case sys == nil:
		return nil, errs.PeerInvalid(op, "a nil System", "open one")
	case o.Limit < 0 || o.Return < 0 || o.Ask < 0:
		return nil, errs.PeerInvalid(op, fmt.Sprintf("a limit of %d bytes, %v to return and %v to be asked", o.Limit, o.Return, o.Ask), "use 0 for the default, or more")
	}
	if o.Authorize == nil {
		o.Authorize = func(Caller, string) Grant { return Grant{Access: publish.WriteAccess} }
	}
	if o.Return == 0 {
		o.Return = 10 * time.Second
	}
	if o.Ask == 0 {
		o.Ask = time.Second
	}
	if o.Log == nil {
		o.Log = slog.New(slog.DiscardHandler)
	}
	b := &Broker{sys: sys, o: o, keeper: o.Keeper, books: newBooks(o.Limit), changed: make(chan struct{}), present: map[holder]*presence{}, ofUser: map[uint32]int{}, counted: Status{Since: time.Now()}}
	if err := b.restore(ctx, op); err != nil {
		return nil, err
	}
	b.ctx, b.end = context.WithCancelCause(context.Background())
	if b.keeper != nil {
		b.running.Go(b.followKeeper)
	}
	b.watchExpected()
	b.change(b.books.endCopied)
	b.running.Go(func() {
		if wait.Sleep(b.ctx, o.Return) {
			b.settle()
		}
	})
	return b, nil
}

// restore takes over what the keeper has.
func (b *Broker) restore(ctx context.Context, op string) error {
	if b.keeper == nil {
		return nil
	}
	all, err := b.keeper.All(ctx)
	if err != nil {
		return err
	}
	for i := range all {
		for _, f := range all[i].Files {
			link.Of(f).SetForeign(false) // the keeper has them from a broker
		}
		restore := b.books.restore
		if isClient(&all[i]) {
			restore = b.expect
		}
		if err := restore(&all[i]); err != nil {
			for _, e := range all {
				_ = e.Close()
			}
			return errs.PeerCause(err, op, nil, fmt.Sprintf("entry %v of the keeper", all[i].Key), "start the version of this program that wrote it: nothing was dropped")
		}
	}
	return nil
}

// Serve serves the clients of a listener until the context ends, or the listener or the broker is
// closed; then it returns nil. It does not close the listener, and clients that are connected stay.
// Once the keeper does not reply it returns that error, and the broker serves nobody any more: end the
// process.
func (b *Broker) Serve(ctx context.Context, l *peer.Listener) error {
	const op = opServe
	if b == nil || b.ctx == nil {
		return errs.PeerInvalid(op, "a nil or zero broker", "make one with New")
	}
	if l == nil {
		return errs.PeerInvalid(op, "a nil listener", "make one with peer.Listen")
	}
	if !b.closer.Acquire() {
		return nil
	}
	defer b.closer.Release()
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	defer context.AfterFunc(b.ctx, cancel)()
	for {
		c, err := l.Accept(ctx)
		switch {
		case err == nil:
			b.running.Go(func() {
				defer func() { _ = c.Close() }()
				_ = b.serve(b.ctx, c)
			})
		case b.failed() != nil:
			return b.failed()
		case ctx.Err() != nil || errors.Is(err, cuda.ErrClosed):
			return nil
		default:
			// Often temporary, such as a lack of file descriptors.
			b.o.Log.Warn("cuvmm: a client could not be accepted", "error", err)
			wait.Sleep(ctx, acceptPause)
		}
	}
}

// acceptPause is the pause after an Accept that failed.
const acceptPause = 50 * time.Millisecond

// ServeConn serves one client, such as a child over an inherited connection, until it disconnects or
// the context ends. It returns nil if the client disconnected cleanly. It closes the connection.
func (b *Broker) ServeConn(ctx context.Context, c *peer.Conn) error {
	const op = "broker.Broker.ServeConn"
	if b == nil || b.ctx == nil {
		return errs.PeerInvalid(op, "a nil or zero broker", "make one with New")
	}
	if c == nil {
		return errs.PeerInvalid(op, "a nil connection", "make one with peer.Pair")
	}
	if !b.closer.Acquire() {
		_ = c.Close()
		return errs.PeerClosed(op, "broker")
	}
	defer b.closer.Release()
	defer func() { _ = c.Close() }()
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	defer context.AfterFunc(b.ctx, cancel)()
	return b.serve(ctx, c)
}

// serve runs a session.
func (b *Broker) serve(ctx context.Context, c *peer.Conn) error {
	s := &session{b: b, c: c, copying: wait.NewSlot(), replying: wait.NewSlot(), awaits: map[uint32]context.CancelFunc{}}
	of, _ := c.Peer() // an inherited one counts as root's
	err := b.enter(of.UID)
	if err == nil {
		defer b.leave(of.UID)
		err = s.run(ctx)
	} else {
		err = s.fail(err)
	}
	if err != nil && ctx.Err() == nil {
		b.o.Log.Debug("cuvmm: a client failed", "client", s.of.String(), "error", err)
	}
	return err
}

// othersShare divides the sessions: a user other than root and the broker's own has at most one part in so
// many, so that none keeps the others out.
const othersShare = 8

// enter admits a client, or refuses it for a reason that it is told.
func (b *Broker) enter(uid uint32) error {
	most := maxSessions
	if limit, err := fd.Limit(); err == nil {
		most = min(most, int(min(limit, 1<<20))/4)
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.sessions >= most {
		return errs.Peer("", ErrLimit, fmt.Sprintf("%d clients, where %d are the most", b.sessions+1, most), "try again when another has left")
	}
	if most := max(most/othersShare, 1); uid != 0 && int(uid) != os.Geteuid() && b.ofUser[uid] >= most {
		return errs.Peer("", ErrLimit, fmt.Sprintf("%d clients of user %d, where %d are the most", b.ofUser[uid]+1, uid, most), "disconnect another first")
	}
	b.enterLocked(uid)
	return nil
}

func (b *Broker) enterLocked(uid uint32) {
	b.sessions++
	b.ofUser[uid]++
}

func (b *Broker) leave(uid uint32) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.leaveLocked(uid)
}

func (b *Broker) leaveLocked(uid uint32) {
	b.sessions--
	if b.ofUser[uid]--; b.ofUser[uid] == 0 {
		delete(b.ofUser, uid)
	}
}

// Close ends all sessions and forgets the objects, which live on with the keeper. Clients connect to
// the next broker.
func (b *Broker) Close() error {
	if b == nil || b.ctx == nil {
		return errs.PeerInvalid("broker.Broker.Close", "a nil or zero broker", "make one with New")
	}
	b.closer.Life.Close()
	b.end(errs.Peer("", cuda.ErrClosed, "the broker ends", "connect to the next one"))
	return b.closer.Close(func() error {
		b.running.Wait()
		b.mu.Lock()
		defer b.mu.Unlock()
		for _, o := range b.books.objects {
			if o.files != nil {
				o.files.close()
			}
		}
		b.books.objects = map[keeper.Key]*object{}
		return nil
	})
}

// failed returns why the broker serves nobody any more, unless it was closed.
func (b *Broker) failed() error {
	if b.closer.Closed() {
		return nil
	}
	return b.ending()
}

// ending returns why the broker serves nobody any more. A request that meets that may be half done, so
// it gets no reply: the client asks the next broker.
func (b *Broker) ending() error { return context.Cause(b.ctx) }

// keep has the keeper keep an object. Without its reply nothing that a client is told would hold, so
// the broker fails.
func (b *Broker) keep(key keeper.Key, record any, files ...*peer.FD) error {
	if b.keeper == nil {
		return nil
	}
	text, err := json.Marshal(record)
	if err == nil {
		err = b.keeper.Write(b.ctx, keeper.Entry{Key: key, Record: text, Files: files})
	}
	var refused *peer.Error
	switch {
	case errors.Is(err, peer.ErrTooLarge) && errors.As(err, &refused): // the keeper's limit; it goes on
		return errs.Peer(opServe, ErrLimit, "the keeper "+refused.Asked, "remove objects, or raise the limit of open files of keeper and broker (ulimit -n)")
	case err != nil:
		b.fail(err)
	}
	return err
}

func (b *Broker) fail(err error) {
	if b.ctx.Err() == nil {
		b.o.Log.Error("cuvmm: the keeper does not reply; the broker ends", "error", err)
	}
	b.end(err)
}

// followKeeper ends the broker when its keeper ends, with which the objects do.
func (b *Broker) followKeeper() {
	select {
	case <-b.keeper.Over():
		b.fail(errs.Peer(opServe, peer.ErrGone, "the keeper", "end this process: with another keeper it starts anew"))
	case <-b.ctx.Done():
	}
}

// change changes the books, and closes what ended by that: the keeper's files first, so that no later
// broker serves it.
func (b *Broker) change(f func() []*object) {
	b.mu.Lock()
	gone := f()
	b.changedLocked()
	b.dropping += len(gone)
	b.mu.Unlock()
	if len(gone) == 0 {
		return
	}
	b.drop(gone)
	b.mu.Lock()
	defer b.mu.Unlock()
	b.dropping -= len(gone)
	b.changedLocked()
}

// remove ends the objects of a name, or one version.
func (b *Broker) remove(op, name string, version uint64) (err error) {
	b.publishing.Lock()
	defer b.publishing.Unlock()
	b.change(func() (gone []*object) {
		gone, err = b.books.remove(op, name, version)
		return gone
	})
	return err
}

func (b *Broker) changedLocked() {
	close(b.changed)
	b.changed = make(chan struct{})
}

func (b *Broker) drop(gone []*object) {
	for _, o := range gone {
		b.mu.Lock()
		f := o.files
		b.mu.Unlock()
		if f == nil {
			continue // who makes its memory finds that it has ended
		}
		if b.keeper != nil && b.ctx.Err() == nil { // one that closes leaves the keeper as it is
			if err := b.keeper.Drop(b.ctx, o.key); err != nil {
				b.fail(err)
			}
		}
		b.mu.Lock()
		f.over = true
		last := f.users == 0
		b.mu.Unlock()
		if last {
			f.close()
		}
	}
}

// unuse ends the use of an object's files, which the last user of one that has ended closes.
func (b *Broker) unuse(f *files) {
	b.mu.Lock()
	f.users--
	last := f.over && f.users == 0
	b.mu.Unlock()
	if last {
		f.close()
	}
}

// grant returns what a caller may do with objects of a name.
func (b *Broker) grant(c Caller, name string) (g Grant) {
	core.Hook(b.o.Log, "broker.Options.Authorize", func() { g = b.o.Authorize(c, name) })
	if counts := g.Quota.Counts; counts != nil {
		g.Quota.Counts = func(name string) bool {
			is := true
			core.Hook(b.o.Log, "broker.Quota.Counts", func() { is = counts(name) })
			return is
		}
	}
	return g
}
