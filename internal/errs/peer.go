package errs

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"strconv"
	"strings"
	"syscall"
)

// Errors between processes are made here for handles/peer and the packages above it, which
// name their kinds by sentinel. peer defines their type.

// PeerType is how handles/peer makes its errors.
type PeerType struct {
	// New makes an error. The kind is a sentinel, or nil, and the cause may be nil.
	New func(op string, kind error, asked string, cause error, hint string) error
	// Protocol, Timeout and Truncated are sentinels of peer.
	Protocol, Timeout, Truncated error
}

var peerType PeerType

// SetPeer sets how errors between processes are made. peer calls it once.
func SetPeer(t PeerType) { peerType = t }

// Peer makes the error of an operation that failed: the kind is a sentinel, or nil.
func Peer(op string, kind error, asked, hint string) error {
	return peerType.New(op, kind, asked, nil, hint)
}

// PeerCause is Peer with a cause.
func PeerCause(cause error, op string, kind error, asked, hint string) error {
	return peerType.New(op, kind, asked, cause, hint)
}

// PeerInvalid returns the error of an argument that can never work.
func PeerInvalid(op, asked, hint string) error {
	return Peer(op, InvalidArgument.sentinel(), asked, hint)
}

// Words returns another process's text in quotes, once: what cannot be printed is escaped, and
// quotes within it are not.
func Words(said string) string {
	q := strconv.Quote(said)
	return `"` + strings.ReplaceAll(q[1:len(q)-1], `\"`, `"`) + `"`
}

// PeerClosed returns the error of an operation on a closed object.
func PeerClosed(op, what string) error {
	return Peer(op, Closed.sentinel(), "the "+what+" is closed", "use it before its Close")
}

// OpReceive is the operation in the error of a violation, which a receiver finds.
const OpReceive = "peer.Conn.Receive"

// SameHint is the hint of violations.
const SameHint = "use the same version of this library in both processes, and nothing else on this socket"

// Violation returns the error of a message or packet that the protocol does not allow.
func Violation(format string, args ...any) error {
	return Peer(OpReceive, peerType.Protocol, fmt.Sprintf(format, args...), SameHint)
}

// FilesLost returns the error of descriptors that exceeded this process's limit.
func FilesLost(what string) error {
	return Peer(OpReceive, peerType.Truncated, what, "close files that are not needed, or raise this process's limit of open files (ulimit -n)")
}

// SystemCall returns the error of a failed system call.
func SystemCall(op, asked string, err error) error {
	switch {
	case errors.Is(err, errors.ErrUnsupported):
		return Peer(op, NotSupported.sentinel(), asked, "file descriptors travel between processes on Linux only")
	case errors.Is(err, fs.ErrPermission):
		return PeerCause(err, op, NotPermitted.sentinel(), asked, "run as the user that owns it")
	case errors.Is(err, fs.ErrNotExist):
		return PeerCause(err, op, nil, asked, "start the process that serves it first, and name the same directory")
	case errors.Is(err, syscall.ENAMETOOLONG):
		return PeerCause(err, op, nil, asked, "use a shorter name")
	case errors.Is(err, syscall.EMFILE), errors.Is(err, syscall.ENFILE):
		return PeerCause(err, op, nil, asked, "close files that are not needed, or raise the limit of open files (ulimit -n)")
	}
	return PeerCause(err, op, nil, asked, "the operating system refused it")
}

// PeerWait returns the error of a wait that was cut short: by the context if that has ended,
// otherwise by the limit.
func PeerWait(ctx context.Context, op, asked, hint string) error {
	if cause := context.Cause(ctx); cause != nil {
		if errors.Is(cause, context.DeadlineExceeded) {
			return PeerCause(cause, op, peerType.Timeout, asked, hint)
		}
		return PeerCause(cause, op, nil, asked, "the caller's context ended")
	}
	return PeerCause(os.ErrDeadlineExceeded, op, peerType.Timeout, asked, hint)
}
