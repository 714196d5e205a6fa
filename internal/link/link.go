// Package link gives the packages that share memory access to the inner state of a
// peer.Conn and a peer.FD: messages of reserved kinds, limits, and the ends of
// connections. Users never import it, and no public signature needs it: the public types
// embed a [Holder], and [Of] looks inside.
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
// op names the caller's operation in errors.
type Conn[M any] interface {
	// Send sends a message of any kind.
	Send(ctx context.Context, op string, m M) error
	// SendWithin is Send that returns peer.ErrTimeout if it could send nothing within
	// the timeout; the connection goes on.
	SendWithin(ctx context.Context, op string, m M, timeout time.Duration) error
	// Warn tells the peer that a message follows soon, so that it wakes meanwhile. It
	// never blocks, and nothing depends on its arrival.
	Warn()
	// Await waits until take returns true, and reads messages meanwhile. It calls take
	// again after every message.
	Await(ctx context.Context, op string, take func() bool) error
	// Drain reads the messages that have arrived, while there is room for them.
	Drain(ctx context.Context, op string) error
	// Fail ends the connection for good and tells the peer why. It returns the first
	// reason of its end.
	Fail(err error) error
	// Over is closed when the connection has ended, and Ended returns the error of an
	// operation after that.
	Over() <-chan struct{}
	Ended(op string) error
	// Acquire keeps the connection open until Release. It returns false if it is closed.
	Acquire() bool
	Release()
	// Inbox returns the receiver of reserved kinds.
	Inbox() Inbox[M]
	// Limits may be changed before anything is received.
	Limits() *Limits
	// Socket returns the socket beneath.
	Socket() *sock.Conn
}

// Limits bound the messages that a connection receives, and its waits.
type Limits struct {
	// Timeout is peer.Options.Timeout.
	Timeout time.Duration
	// MaxFDs bounds the descriptors of a message; with NoFDs any is a violation.
	MaxFDs int
	NoFDs  bool
	// MayLose reports whether messages of a kind are received even if their
	// descriptors exceed this process's limit. The descriptors are nil then, and the
	// receiver refuses the object instead of the connection.
	MayLose func(kind uint16) bool
	// Warned: the peer's warnings are accurate enough to spin for the messages that
	// they announce.
	Warned bool
	// Log is never nil.
	Log *slog.Logger
}

// DefaultTimeout is peer.Options.Timeout if that is 0. It is a variable for tests
// alone.
var DefaultTimeout = 10 * time.Second

// Inbox takes the messages of reserved kinds that a connection receives.
type Inbox[M any] interface {
	// Sort takes a message, unless it returns false. An error is a violation of the
	// protocol.
	Sort(m M) (keep bool, err error)
	// Discard closes the messages that were not taken. No Sort follows it.
	Discard()
}

var newInbox any

// SetInbox sets how each connection makes its inbox. handles calls it
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
