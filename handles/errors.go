package handles

import (
	"context"
	"errors"
	"io/fs"
	"os"
	"syscall"

	"github.com/cuvmm/cuvmm/cuda"
	"github.com/cuvmm/cuvmm/internal/errs"
)

// What can go wrong between processes; test for them with errors.Is. The error
// itself is an *[Error]. A use after Close is [cuda.ErrClosed], an argument
// that could never work [cuda.ErrInvalidArgument].
var (
	// ErrProtocol: the peer sent what no peer of this version sends. The
	// connection is closed.
	ErrProtocol = errors.New("protocol violation")
	// ErrPeer: the process at the other end, or the owner of the socket's
	// directory, is not one that the policy lets in.
	ErrPeer = errors.New("peer not allowed")
	// ErrRefused: the peer said why it ended the connection, or why it did not
	// take, or give, memory.
	ErrRefused = errors.New("refused by the peer")
	// ErrGone: the peer closed the connection or ended.
	ErrGone = errors.New("the peer is gone")
	// ErrTooLarge: more bytes, chunks or file descriptors than the limit.
	ErrTooLarge = errors.New("too large")
	// ErrTruncated: part of a message or of its file descriptors was lost on
	// the way, mostly since this process may open no more files.
	ErrTruncated = errors.New("truncated")
	// ErrTimeout: the peer did not answer in time.
	ErrTimeout = errors.New("timed out")
	// ErrDescriptor: the bytes are no descriptor, or not the one form that a
	// descriptor has.
	ErrDescriptor = errors.New("invalid descriptor")
	// ErrSizeMismatch: a declared size that this memory cannot have.
	ErrSizeMismatch = errors.New("size mismatch")
	// ErrMismatch: the memory is not what was declared, or not what was asked
	// for.
	ErrMismatch = errors.New("not what was declared")
	// ErrNotMemory: a file descriptor that is not of GPU memory.
	ErrNotMemory = errors.New("no GPU memory")
	// ErrOpenFiles: the share of this process's limit of open files that is for
	// descriptors of shared memory is used up.
	ErrOpenFiles = errors.New("too many open files")
	// ErrUnknown: nothing is published under that name.
	ErrUnknown = errors.New("not published")
	// ErrWithdrawn: the publisher withdrew what is followed. What is mapped
	// stays until the follower is closed.
	ErrWithdrawn = errors.New("withdrawn")
	// ErrUnfinished: the publisher ended before the work was done that a
	// generation was announced behind. Its elements are not shown any more, and
	// what was computed from them does not count.
	ErrUnfinished = errors.New("unfinished generation")
	// ErrStalled: a publisher that lives did not finish the work that a generation
	// was announced behind within FollowOptions.MaxWait.
	ErrStalled = errors.New("publisher stalled")
)

// Error is a failed operation of this package.
type Error struct {
	// Op is the operation, such as "handles.Dial".
	Op string
	// Asked says what was asked for, or what came.
	Asked string
	// Hint says what to do about it.
	Hint string

	kind  error
	cause error
}

// Error says everything that is known, on one line.
func (e *Error) Error() string { return errs.Line(e.Op, e.kind, e.Asked, e.cause, e.Hint) }

// Unwrap returns the sentinel and the cause.
func (e *Error) Unwrap() []error { return errs.Unwrap(e.kind, e.cause) }

func failure(op string, kind error, asked, hint string) *Error {
	return &Error{Op: op, Asked: asked, Hint: hint, kind: kind}
}

func (e *Error) because(cause error) *Error {
	e.cause = cause
	return e
}

func closedError(op, what string) error {
	return failure(op, cuda.ErrClosed, "the "+what+" is closed", "use it before its Close")
}

// systemError is a failure of the operating system that no rule of this
// package explains.
func systemError(op, asked string, err error) error {
	switch {
	case errors.Is(err, errors.ErrUnsupported):
		return failure(op, cuda.ErrNotSupported, asked, "file descriptors travel between processes on Linux only")
	case errors.Is(err, fs.ErrPermission):
		return failure(op, cuda.ErrNotPermitted, asked, "run as the user that owns it").because(err)
	case errors.Is(err, fs.ErrNotExist):
		return failure(op, nil, asked, "start the process that serves it first, and name the same directory").because(err)
	case errors.Is(err, syscall.ENAMETOOLONG):
		return failure(op, nil, asked, "use a shorter name").because(err)
	case errors.Is(err, syscall.EMFILE), errors.Is(err, syscall.ENFILE):
		return failure(op, nil, asked, "close files that are not needed, or raise the limit of open files (ulimit -n)").because(err)
	}
	return failure(op, nil, asked, "the operating system refused it").because(err)
}

// waitError is the end of a wait that was cut short: by the context where that
// has ended, otherwise by the limit.
func waitError(ctx context.Context, op, asked, hint string) error {
	if cause := context.Cause(ctx); cause != nil {
		if errors.Is(cause, context.DeadlineExceeded) {
			return failure(op, ErrTimeout, asked, hint).because(cause)
		}
		return failure(op, nil, asked, "the caller's context ended").because(cause)
	}
	return failure(op, ErrTimeout, asked, hint).because(os.ErrDeadlineExceeded)
}
