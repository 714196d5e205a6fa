package peer

import (
	"errors"
	"fmt"

	"github.com/cuvmm/cuvmm/internal/errs"
)

// Errors between processes; test for them with errors.Is. The error
// itself is an *[Error]. A use after Close is [cuda.ErrClosed], an argument that
// can never work [cuda.ErrInvalidArgument].
var (
	// ErrProtocol: the peer violated the protocol, or has no version in common. The
	// connection is closed.
	ErrProtocol = errors.New("protocol violation")
	// ErrPeer: the policy does not admit the process at the other end, or the owner of
	// the socket's directory.
	ErrPeer = errors.New("peer not allowed")
	// ErrRefused: the peer ended the connection, or refused to share or receive memory,
	// and gave its reason.
	ErrRefused = errors.New("refused by the peer")
	// ErrGone: the peer closed the connection or ended.
	ErrGone = errors.New("the peer is gone")
	// ErrTooLarge: more bytes, chunks or file descriptors than the limit.
	ErrTooLarge = errors.New("too large")
	// ErrTruncated: part of a message or of its file descriptors was lost in transit,
	// mostly because this process has too many open files.
	ErrTruncated = errors.New("truncated")
	// ErrTimeout: the peer did not reply in time.
	ErrTimeout = errors.New("timed out")
	// ErrOpenFiles: descriptors of shared memory have used up their share of the limit
	// of open files.
	ErrOpenFiles = errors.New("too many open files")
)

// Error is a failed operation of this package, of handles or of handles/publish.
type Error struct {
	// Op is the operation, such as "peer.Dial".
	Op string
	// Asked is the request, or what was received.
	Asked string
	// Hint is the remedy.
	Hint string

	kind  error
	cause error
}

// Error returns all of it on one line.
func (e *Error) Error() string { return errs.Line(e.Op, e.kind, e.Asked, e.cause, e.Hint) }

// Unwrap returns the sentinel and the cause.
func (e *Error) Unwrap() []error { return errs.Unwrap(e.kind, e.cause) }

// ServedError says that another process listens at a socket, and which: the cause of
// the [cuda.ErrInUse] of [Listen], and of a [Dial] that it did not greet in time. A process that was restarted, and whose memory another
// process has taken over meanwhile, learns from it that it was superseded, and by which
// process.
type ServedError struct {
	// Path is where the socket is.
	Path string
	// By is the process that listens. PID is 0 if it is of another pid namespace.
	By Credentials
}

// Error names the process and the socket.
func (e *ServedError) Error() string { return fmt.Sprintf("%v serves %q", e.By, e.Path) }

func init() {
	errs.SetPeer(errs.PeerType{
		New: func(op string, kind error, asked string, cause error, hint string) error {
			return &Error{Op: op, Asked: asked, Hint: hint, kind: kind, cause: cause}
		},
		Protocol: ErrProtocol, Timeout: ErrTimeout, Truncated: ErrTruncated,
	})
}
