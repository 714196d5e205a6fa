// Package link is how the packages that share memory reach into a peer.Conn and a
// peer.FD: messages of reserved kinds, limits, and the ends of connections. Users
// never import it, and no public signature needs it: the public types embed a
// [Holder], and [Of] looks inside.
//
// It stands below peer, so its types take those of peer as parameters: M is
// peer.Message.
package link

import (
	"context"
	"log/slog"
	"time"

	"github.com/cuvmm/cuvmm/internal/sock"
)

// Conn is the inner state of a peer.Conn. All methods are safe for concurrent use.
// The operation's name is the caller's, for errors.
type Conn[M any] interface {
	// Send sends a message of any kind.
	Send(ctx context.Context, op string, m M) error
	// SendWithin is Send that gives up after so long if nothing could be sent: that
	// is peer.ErrTimeout, and the connection goes on.
	SendWithin(ctx context.Context, op string, m M, patience time.Duration) error
	// Warn tells the peer that a message is about to come, so that it wakes
	// meanwhile. It never waits, and nothing depends on what becomes of it.
	Warn()
	// Await waits until take returns true, and reads what comes meanwhile. take is
	// called again whenever a message has come.
	Await(ctx context.Context, op string, take func() bool) error
	// Drain reads what has come already, as far as there is room for it.
	Drain(ctx context.Context, op string) error
	// Fail ends the connection for good and tells the peer why. It returns the first
	// reason that there was.
	Fail(err error) error
	// Over is closed when the connection has ended, and Ended is the error of an
	// operation then.
	Over() <-chan struct{}
	Ended(op string) error
	// Acquire keeps the connection open until Release, unless it is closed.
	Acquire() bool
	Release()
	// Inbox is what takes the messages of reserved kinds.
	Inbox() Inbox[M]
	// Limits may be changed before anything is received.
	Limits() *Limits
	// Socket is what the packets travel over.
	Socket() *sock.Conn
}

// Limits bound what a connection takes, and how long it waits.
type Limits struct {
	// Timeout is peer.Options.Timeout.
	Timeout time.Duration
	// MaxFDs is the most descriptors in a message; with NoFDs any is a violation.
	MaxFDs int
	NoFDs  bool
	// MayLose says of which kinds a message is taken even if its descriptors do not
	// fit into this process, which then are nil: its receiver refuses the object
	// alone.
	MayLose func(kind uint16) bool
	// Warned: the peer's warnings are true often enough to spin for what they
	// announce.
	Warned bool
	// Log is never nil.
	Log *slog.Logger
}

// DefaultTimeout is peer.Options.Timeout if that is 0. It is a variable for tests
// alone.
var DefaultTimeout = 10 * time.Second

// Inbox takes what a connection receives of reserved kinds.
type Inbox[M any] interface {
	// Sort takes a message, unless keep is false. An error says that no peer sends
	// that now.
	Sort(m M) (keep bool, err error)
	// Discard closes what nothing has taken, after the last Sort.
	Discard()
}

var newInbox any

// SetInbox tells the package how each connection gets its inbox. handles calls it
// once; in a program without handles messages of reserved kinds are violations.
func SetInbox[M any](make func() Inbox[M]) { newInbox = make }

// NewInbox makes the inbox of a new connection, or returns nil.
func NewInbox[M any]() Inbox[M] {
	if newInbox == nil {
		return nil
	}
	return newInbox.(func() Inbox[M])()
}

// Holder is embedded, under an unexported name, by a public type with the inner state
// T. Its only method is unexported, so users cannot reach that.
type Holder[T any] struct{ inner T }

// Hold makes the holder.
func Hold[T any](inner T) Holder[T] { return Holder[T]{inner} }

func (h *Holder[T]) link() T { return h.inner }

// Of looks inside a public type. Of one that no constructor has made it returns the
// zero T.
func Of[T any](x interface{ link() T }) T { return x.link() }
