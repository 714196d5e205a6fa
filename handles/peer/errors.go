package peer

import (
	"errors"
	"fmt"

	"github.com/cuvmm/cuvmm/internal/errs"
	"github.com/cuvmm/cuvmm/internal/peererr"
)

// What can go wrong between processes; test for them with errors.Is. The error
// itself is an *[Error]. A use after Close is [cuda.ErrClosed], an argument that
// could never work [cuda.ErrInvalidArgument].
var (
	// ErrProtocol: the peer sent what no peer of this version sends. The connection is
	// closed.
	ErrProtocol = errors.New("protocol violation")
	// ErrPeer: the policy does not admit the process at the other end, or the owner of
	// the socket's directory.
	ErrPeer = errors.New("peer not allowed")
	// ErrRefused: the peer said why it ended the connection, or why it did not take,
	// or give, memory.
	ErrRefused = errors.New("refused by the peer")
	// ErrGone: the peer closed the connection or ended.
	ErrGone = errors.New("the peer is gone")
	// ErrTooLarge: more bytes, chunks or file descriptors than the limit.
	ErrTooLarge = errors.New("too large")
	// ErrTruncated: part of a message or of its file descriptors was lost on the way,
	// mostly because this process may open no more files.
	ErrTruncated = errors.New("truncated")
	// ErrTimeout: the peer did not reply in time.
	ErrTimeout = errors.New("timed out")
	// ErrOpenFiles: the share of the limit of open files that is for descriptors of
	// shared memory is used up.
	ErrOpenFiles = errors.New("too many open files")
)

// Error is a failed operation of this package, of handles or of handles/publish.
type Error struct {
	// Op is the operation, such as "peer.Dial".
	Op string
	// Asked says what was asked for, or what came.
	Asked string
	// Hint says what to do about it.
	Hint string

	kind  error
	cause error
}

// Error returns everything that is known, on one line.
func (e *Error) Error() string { return errs.Line(e.Op, e.kind, e.Asked, e.cause, e.Hint) }

// Unwrap returns the sentinel and the cause.
func (e *Error) Unwrap() []error { return errs.Unwrap(e.kind, e.cause) }

// ServedError says that another process listens at a socket, and which: the cause of
// the [cuda.ErrInUse] of [Listen]. A process that was restarted, and whose memory another
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
	peererr.Set(peererr.Type{
		New: func(op string, kind error, asked string, cause error, hint string) error {
			return &Error{Op: op, Asked: asked, Hint: hint, kind: kind, cause: cause}
		},
		Protocol: ErrProtocol, Timeout: ErrTimeout, Truncated: ErrTruncated,
	})
}
