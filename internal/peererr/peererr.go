// Package peererr makes the errors between processes, for handles/peer and the packages
// above it. peer defines their type and their sentinels.
package peererr

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"strconv"
	"strings"
	"syscall"

	"github.com/cuvmm/cuvmm/cuda"
)

// Type is how peer makes its errors.
type Type struct {
	// New makes an error. The kind is a sentinel, or nil, and the cause may be nil.
	New func(op string, kind error, asked string, cause error, hint string) error
	// Protocol, Timeout and Truncated are sentinels of peer.
	Protocol, Timeout, Truncated error
}

var made Type

// Set tells the package the type of its errors. peer calls it once.
func Set(t Type) { made = t }

// New makes the error of an operation that failed: the kind is a sentinel, or nil.
func New(op string, kind error, asked, hint string) error {
	return made.New(op, kind, asked, nil, hint)
}

// Wrap is New with a cause.
func Wrap(cause error, op string, kind error, asked, hint string) error {
	return made.New(op, kind, asked, cause, hint)
}

// Invalid returns the error of an argument that can never work.
func Invalid(op, asked, hint string) error { return New(op, cuda.ErrInvalidArgument, asked, hint) }

// Words returns another process's text in quotes, once: what cannot be printed is escaped, and
// quotes within it are not.
func Words(said string) string {
	q := strconv.Quote(said)
	return `"` + strings.ReplaceAll(q[1:len(q)-1], `\"`, `"`) + `"`
}

// Closed returns the error of an operation on a closed object.
func Closed(op, what string) error {
	return New(op, cuda.ErrClosed, "the "+what+" is closed", "use it before its Close")
}

// OpReceive is the operation in the error of a violation, which a receiver finds.
const OpReceive = "peer.Conn.Receive"

// SameHint is the hint of violations.
const SameHint = "use the same version of this library in both processes, and nothing else on this socket"

// Violation returns the error of a message or packet that the protocol does not allow.
func Violation(format string, args ...any) error {
	return New(OpReceive, made.Protocol, fmt.Sprintf(format, args...), SameHint)
}

// FilesLost returns the error of descriptors that exceeded this process's limit.
func FilesLost(what string) error {
	return New(OpReceive, made.Truncated, what, "close files that are not needed, or raise this process's limit of open files (ulimit -n)")
}

// System returns the error of a failed system call.
func System(op, asked string, err error) error {
	switch {
	case errors.Is(err, errors.ErrUnsupported):
		return New(op, cuda.ErrNotSupported, asked, "file descriptors travel between processes on Linux only")
	case errors.Is(err, fs.ErrPermission):
		return Wrap(err, op, cuda.ErrNotPermitted, asked, "run as the user that owns it")
	case errors.Is(err, fs.ErrNotExist):
		return Wrap(err, op, nil, asked, "start the process that serves it first, and name the same directory")
	case errors.Is(err, syscall.ENAMETOOLONG):
		return Wrap(err, op, nil, asked, "use a shorter name")
	case errors.Is(err, syscall.EMFILE), errors.Is(err, syscall.ENFILE):
		return Wrap(err, op, nil, asked, "close files that are not needed, or raise the limit of open files (ulimit -n)")
	}
	return Wrap(err, op, nil, asked, "the operating system refused it")
}

// Wait returns the error of a wait that was cut short: by the context if that has ended,
// otherwise by the limit.
func Wait(ctx context.Context, op, asked, hint string) error {
	if cause := context.Cause(ctx); cause != nil {
		if errors.Is(cause, context.DeadlineExceeded) {
			return Wrap(cause, op, made.Timeout, asked, hint)
		}
		return Wrap(cause, op, nil, asked, "the caller's context ended")
	}
	return Wrap(os.ErrDeadlineExceeded, op, made.Timeout, asked, hint)
}
