package publish

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"sync"
	"time"
	"unicode/utf8"

	"github.com/cuvmm/cuvmm/cuda"
	"github.com/cuvmm/cuvmm/handles/peer"
	"github.com/cuvmm/cuvmm/internal/errs"
	"github.com/cuvmm/cuvmm/internal/fd"
	"github.com/cuvmm/cuvmm/internal/life"
	"github.com/cuvmm/cuvmm/internal/lock"
	"github.com/cuvmm/cuvmm/internal/wait"
)

// Server publishes buffers and arrays by name to the processes that connect to
// it. All methods are safe for concurrent use. The caller closes it.
type Server struct {
	o       ServerOptions
	most    limits
	refused error // of options that no server can have
	log     *slog.Logger
	closer  life.Closer
	ctx     context.Context // ends with Close
	cancel  context.CancelFunc
	pages   pages
	flights flights
	rates   rates

	// takingOver serializes what TakeOver does after its wait.
	takingOver wait.Slot

	mu           lock.Mutex[lock.Leaf]
	publications map[string]*Publication
	// taken are the listeners at sockets that were taken over, by path.
	taken    map[string]*peer.Listener
	sessions map[*session]struct{}
	last     int  // session's number
	closing  bool // no publication is added any more
	// stuck are withdrawn publications whose stream could not be closed: Close tries
	// again.
	stuck []*Publication
	// replicating counts the followers' goroutines.
	replicating sync.WaitGroup
}

// ServerOptions bound what clients can take of a server. The zero value works.
type ServerOptions struct {
	// Authorize returns what a client may do with a publication. It is called when the
	// client lists and when it follows, on several goroutines, and must not wait for the
	// server. known is false, and the credentials are zero, for an inherited connection.
	// Nil grants WriteAccess to every client that the listener accepts. A panic, or
	// runtime.Goexit, grants nothing and is logged.
	//
	// NoAccess is enforced: the client gets no descriptor. ReadAccess is enforced only
	// against clients of this library. The driver has no read-only descriptors, and a
	// process that has one can map it for writing: memory that an untrusted client must
	// not write has to be published as a copy, in a buffer of its own.
	Authorize func(p peer.Credentials, known bool, name string) Access
	// Heir reports whether a client that follows a publication for reading alone may take it over
	// ([TakeOver]) when this process has ended. It serves what is there then: its mapping stays
	// read-only. It is called, as Authorize, when the client follows; nil, and a panic, name none. Clients
	// that follow for writing are heirs anyway.
	Heir func(p peer.Credentials, known bool, name string) bool
	// MaxPinned is how many bytes a follower may keep mapped after a Shrink took them
	// back: the next Shrink ends a follower that still keeps more, although it was told
	// more than 10 s ago, or that refused to give them back. The other followers of its
	// client go on. 0 is no limit.
	MaxPinned int
	// Log receives the failures of clients: at level Info what a client alone can
	// cause, above it what the server lacks. Nil discards them, but for panics of Authorize,
	// which go to slog.Default.
	Log *slog.Logger
}

// limits bound what clients can take beside memory. No honest program meets the
// server's own; tests lower them.
type limits struct {
	// sessions are the most clients at a time. They never take more than a quarter of the
	// process's limit of open files. Of 16 or more, the last quarter is reserved for
	// processes that have none yet, and any other user than this process's gets at most
	// half.
	sessions int
	// perProcess are the most clients of one process, so that a process that keeps
	// connecting leaves room for others. Processes of other pid namespaces cannot be told
	// apart: those of one user count as one. Inherited connections are not counted.
	perProcess int
	// followers are the most of one client.
	followers int
	// followRate is how many followers the clients of one process may add per second,
	// after as many at once; further requests wait.
	followRate int
	// acknowledging is how long a follower may take to acknowledge an update before
	// ServerOptions.MaxPinned counts what it keeps.
	acknowledging time.Duration
	// idle is how long a client may stay without a follower or a request.
	idle time.Duration
}

// leastSessions is how many clients there is room for, however few files may be open.
const leastSessions = 16

var serverLimits = limits{sessions: 256, perProcess: 32, followers: 4096, followRate: 1000, acknowledging: 10 * time.Second, idle: time.Minute}

// NewServer makes a server without publications and clients. It serves at most 256 clients,
// of which one process has at most 32, and a client has at most 4,096 followers. Of a server
// with a negative MaxPinned, Publish, Array, Serve, ServeConn and TakeOver return
// cuda.ErrInvalidArgument.
func NewServer(o ServerOptions) *Server { return newServer(o, serverLimits) }

func newServer(o ServerOptions, most limits) *Server {
	var refused error
	if o.MaxPinned < 0 {
		refused = errs.PeerInvalid("publish.NewServer", fmt.Sprintf("a ServerOptions.MaxPinned of %d", o.MaxPinned), "use 0 for no limit, or more")
	}
	if o.Authorize == nil {
		o.Authorize = func(peer.Credentials, bool, string) Access { return WriteAccess }
	}
	if o.Log == nil {
		o.Log = slog.New(slog.DiscardHandler)
	}
	s := &Server{o: o, most: most, refused: refused, log: o.Log, publications: map[string]*Publication{}, sessions: map[*session]struct{}{}, takingOver: wait.NewSlot()}
	s.pages.life = &s.closer
	s.rates.perSecond, s.rates.burst = most.followRate, most.followRate
	s.ctx, s.cancel = context.WithCancel(context.Background())
	return s
}

// Serve serves the clients of a listener until the context ends, or the listener
// or the server is closed; then it returns nil. It does not close the listener, and
// clients that are connected stay.
func (s *Server) Serve(ctx context.Context, l *peer.Listener) error {
	const op = "publish.Server.Serve"
	if l == nil {
		return errs.PeerInvalid(op, "a nil listener", "make one with Listen")
	}
	if s.refused != nil {
		return s.refused
	}
	if !s.closer.Acquire() {
		return nil
	}
	defer s.closer.Release()
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	defer context.AfterFunc(s.ctx, cancel)()
	for {
		c, err := l.Accept(ctx)
		switch {
		case err == nil:
			s.start(c)
		case ctx.Err() != nil || errors.Is(err, cuda.ErrClosed):
			return nil
		default:
			// Often temporary, such as a lack of file descriptors.
			s.log.Warn("cuvmm: a client could not be accepted", "error", err)
			wait.Sleep(ctx, acceptPause)
		}
	}
}

// acceptPause is the pause after an Accept that failed.
const acceptPause = 50 * time.Millisecond

// start serves a connection on a goroutine of its own, unless the server is
// closed.
func (s *Server) start(c *peer.Conn) {
	if !s.closer.Acquire() {
		_ = c.Close()
		return
	}
	go func() {
		defer s.closer.Release()
		if err := s.serve(connOf(c), clientOf(c)); err != nil {
			of, _ := c.Peer()
			s.log.Info("cuvmm: a client failed", "client", of.String(), "error", err)
		}
	}()
}

// ServeConn serves one client, such as a child over an inherited connection, until it
// disconnects or the context ends. It returns nil if the client disconnected cleanly.
// It owns the connection and closes it.
func (s *Server) ServeConn(ctx context.Context, c *peer.Conn) error {
	const op = "publish.Server.ServeConn"
	if c == nil {
		return errs.PeerInvalid(op, "a nil connection", "make one with Pair or Accept")
	}
	if s.refused != nil {
		return errors.Join(s.refused, c.Close())
	}
	if !s.closer.Acquire() {
		_ = c.Close()
		return errs.PeerClosed(op, "server")
	}
	defer s.closer.Release()
	defer context.AfterFunc(ctx, func() { _ = c.Close() })()
	return s.serve(connOf(c), clientOf(c))
}

func (s *Server) serve(c conn, of client) error {
	c.in.Limits().NoFDs = true // or those of a message that never ends would fill this process's table
	ss := &session{server: s, conn: c, client: of, followers: map[token]*replicator{}, parting: map[token]struct{}{}, denying: wait.NewSlot(), pages: map[*cuda.Device]*page{}}
	s.mu.Lock()
	s.last++
	ss.number = s.last
	err := s.crowdedLocked(of)
	if err == nil {
		s.sessions[ss] = struct{}{}
	}
	s.mu.Unlock()
	if err != nil {
		return errors.Join(c.in.Fail(err), c.Close())
	}
	err = ss.run(s.ctx)
	s.mu.Lock()
	delete(s.sessions, ss)
	s.mu.Unlock()
	return err
}

// crowdedLocked returns the error of a client for which there is no room: there are too
// many clients, or too many of its process, or of its user if that is not this
// process's. The caller holds mu.
func (s *Server) crowdedLocked(of client) error {
	ofUser, ofProcess := 0, 0
	for ss := range s.sessions {
		if other := ss.client; of.known && other.known && other.UID == of.UID {
			ofUser++
			if other.PID == of.PID {
				ofProcess++
			}
		}
	}
	const op = "publish.Server.Serve"
	const later = "try again when another has left"
	places := s.most.sessions
	if limit, err := fd.Limit(); err == nil {
		places = min(places, max(leastSessions, int(min(limit, 1<<20))/sessionShare))
	}
	reserve := 0
	if places >= 16 {
		reserve = places / 4
	}
	free := places - len(s.sessions)
	switch most := max(1, places/2); {
	case free <= 0:
		return errs.Peer(op, peer.ErrTooLarge, fmt.Sprintf("%d clients, where %d is the most", places+1, places), later+", or raise the limit of open files (ulimit -n) if that bounds the places")
	case ofProcess >= s.most.perProcess:
		return errs.Peer(op, peer.ErrTooLarge, fmt.Sprintf("%d clients of process %d, where %d is the most", ofProcess+1, of.PID, s.most.perProcess), "follow all publications by one client of the process")
	case ofProcess > 0 && free <= reserve:
		return errs.Peer(op, peer.ErrTooLarge, fmt.Sprintf("%d clients of process %d, where the last %d places are for processes that have none", ofProcess+1, of.PID, reserve), later)
	case of.known && of.UID != uint32(os.Geteuid()) && ofUser >= most:
		return errs.Peer(op, peer.ErrTooLarge, fmt.Sprintf("%d clients of user %d, where %d is the most", ofUser+1, of.UID, most), later)
	}
	return nil
}

// sessionShare divides the limit of open files: the clients' connections take at most
// one part in so many.
const sessionShare = 4

// enter adds a publication.
func (s *Server) enter(op string, p *Publication) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	switch {
	case s.closing:
		return errs.PeerClosed(op, "server")
	case s.publications[p.name] != nil:
		return errs.Peer(op, cuda.ErrInUse, fmt.Sprintf("a publication of the name %q", p.name), "use another name, or withdraw that one")
	case len(s.publications) >= maxPublications:
		return errs.Peer(op, peer.ErrTooLarge, fmt.Sprintf("%d publications", maxPublications+1), "withdraw some")
	}
	s.publications[p.name] = p
	return nil
}

func (s *Server) leave(p *Publication) {
	s.mu.Lock()
	defer s.mu.Unlock()
	delete(s.publications, p.name)
}

func (s *Server) find(name string) *Publication {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.publications[name]
}

func (s *Server) all() []*Publication {
	s.mu.Lock()
	defer s.mu.Unlock()
	all := make([]*Publication, 0, len(s.publications))
	for _, p := range s.publications {
		all = append(all, p)
	}
	return all
}

// Close withdraws all publications and ends all connections. Before that it waits until
// the work behind the announcements is done, so that no follower loses what was
// announced to it, and until the followers are told, each within Options.Timeout.
// Followers that come back wait for another publisher at the same socket; for the
// others the publications are withdrawn. After an error it may be called again.
func (s *Server) Close() error {
	const op = "publish.Server.Close"
	s.closer.Life.Close() // no operation begins any more
	s.mu.Lock()
	s.closing = true // for one that began before
	s.mu.Unlock()
	var errs []error
	for _, p := range s.all() {
		errs = append(errs, p.withdraw(op, ended{state: Moved, reason: "the publisher's server was closed"}))
	}
	s.pages.out.Wait()
	s.replicating.Wait()
	s.cancel() // Serve, and the sessions
	s.mu.Lock()
	taken := s.taken
	s.taken = nil
	s.mu.Unlock()
	for _, l := range taken {
		errs = append(errs, l.Close())
	}
	return s.closer.Close(func() error { return errors.Join(append(errs, s.closeStuck(), s.pages.close(op))...) })
}

func (s *Server) keep(p *Publication) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.stuck = append(s.stuck, p)
}

func (s *Server) closeStuck() error {
	s.mu.Lock()
	stuck := s.stuck
	s.stuck = nil
	s.mu.Unlock()
	var errs []error
	for _, p := range stuck {
		err := p.timeline.close()
		if err != nil {
			errs = append(errs, err)
			s.keep(p)
		}
		p.ending.End(err)
	}
	return errors.Join(errs...)
}

func checkPublished(op, name string) error {
	if name == "" || len(name) > MaxName || !utf8.ValidString(name) {
		return errs.PeerInvalid(op, fmt.Sprintf("the name %q", name), fmt.Sprintf("use 1 to %d bytes of UTF-8", MaxName))
	}
	return nil
}
