package peer

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"time"

	"github.com/cuvmm/cuvmm/cuda"
	"github.com/cuvmm/cuvmm/internal/errs"
	"github.com/cuvmm/cuvmm/internal/sock"
	"github.com/cuvmm/cuvmm/internal/wait"
)

// Dial connects to the socket of a [Listener] and waits for the greetings of both
// sides. Only its owner may enter the socket's directory (mode 0700; see Options.Shared), and the peer must
// be a process of that user that Options.Allow admits. Only the last folder of the path
// must not be a symbolic link. A process that does not greet in time is named by the error, whose cause is a
// [ServedError] then. The caller closes the connection.
func Dial(ctx context.Context, path string, o Options) (*Conn, error) {
	const op = "peer.Dial"
	dir, name := filepath.Split(path)
	if err := checkName(op, name); err != nil {
		return nil, err
	}
	if dir == "" {
		dir = "."
	}
	o = o.withDefaults()
	d, err := openDir(op, filepath.Clean(dir), false, o.Shared)
	if err != nil {
		return nil, err
	}
	defer func() { _ = d.Close() }()
	s, err := dial(ctx, op, d, path, name, o.Timeout)
	if err != nil {
		return nil, err
	}
	cred, err := admit(s, o)
	if err == nil && cred.UID != d.Owner {
		err = fmt.Errorf("%v, but the directory belongs to user %d", cred, d.Owner)
	}
	if err != nil {
		_ = s.Close()
		return nil, errs.PeerCause(err, op, ErrPeer, fmt.Sprintf("the process that serves %q", path), "run as the user of that process, or admit it with Options.Allow if it is the intended one")
	}
	c := newConn(s, o)
	c.peer, c.known = cred, true
	if err := c.greet(ctx, op); err != nil {
		_ = c.Close()
		return nil, servedBy(ctx, path, cred, err)
	}
	return c, nil
}

// servedBy adds to the error of a process that did not greet in time which one that is. Its cause is a [ServedError].
func servedBy(ctx context.Context, path string, by Credentials, err error) error {
	var late *Error
	if ctx.Err() == nil && !errors.Is(err, ErrTimeout) || !errors.As(err, &late) {
		return err
	}
	said := *late
	said.Asked, said.Hint = "no greeting", "see what that process, or one that it started, does"
	said.cause = fmt.Errorf("%w: %w", &ServedError{Path: path, By: by}, late.cause)
	return &said
}

// DialWait is like [Dial], but waits for a process to serve the socket, even if its
// directory does not exist yet. If none does, it returns [ErrTimeout] at the context's deadline.
func DialWait(ctx context.Context, path string, o Options) (*Conn, error) {
	var pause wait.Backoff
	for unserved := false; ; {
		c, err := Dial(ctx, path, o)
		switch {
		case err == nil:
			return c, nil
		case errors.Is(err, ErrGone) || errors.Is(err, fs.ErrNotExist):
			unserved = true
			if wait.Sleep(ctx, pause.Next()) {
				continue
			}
		case !unserved || ctx.Err() == nil || errors.As(err, new(*ServedError)):
			return nil, err
		}
		return nil, errs.PeerWait(ctx, "peer.DialWait", fmt.Sprintf("no process serves socket %q", path), "start the process that serves it, and name the same path in both")
	}
}

// dial retries while the listener's queue is full, which a Unix socket reports at once,
// and while a listener is being made: it has the directory's lock between binding and
// listening.
func dial(ctx context.Context, op string, d *sock.Dir, path, name string, timeout time.Duration) (*sock.Conn, error) {
	asked := fmt.Sprintf("socket %q", path)
	met := asked // what kept it waiting
	limit := time.Now().Add(timeout)
	var backoff wait.Backoff
	for settled := false; ; {
		s, err := sock.Dial(ctx, d, name)
		switch {
		case err == nil:
			return s, nil
		case sock.NotListening(err) && !settled:
			met = asked + " has no listener, and another process has locked its directory to make one"
			settled = unlocked(ctx, d, limit)
			if settled || ctx.Err() != nil {
				continue
			}
		case sock.Busy(err):
			met = asked + " has a full queue"
			if backoff.Sleep(ctx, limit) || ctx.Err() != nil {
				continue
			}
		}
		if errors.Is(err, context.DeadlineExceeded) { // which the dialer may see before the context ends
			<-ctx.Done()
		}
		switch {
		case sock.NotListening(err):
			return nil, errs.PeerCause(err, op, ErrGone, "no process serves "+asked, "start the process that serves it")
		case sock.Busy(err) || ctx.Err() != nil:
			return nil, errs.PeerWait(ctx, op, met, "see whether the process that serves it accepts connections")
		}
		return nil, errs.SystemCall(op, asked, err)
	}
}

// unlocked waits for the directory's lock to be free. It returns false if that fails.
func unlocked(ctx context.Context, d *sock.Dir, limit time.Time) bool {
	for {
		ok, err := d.TryLock()
		if ok {
			d.Unlock()
			return true
		}
		if err != nil || !wait.SleepUntil(ctx, time.Millisecond, limit) {
			return false
		}
	}
}

// Pair makes a connection to a child that is yet to be started. The caller puts the file
// into the child's exec.Cmd.ExtraFiles and closes it after Start, since otherwise the end
// of the child would go unnoticed. The caller closes both.
func Pair(o Options) (*Conn, *os.File, error) {
	s, f, err := sock.Pair()
	if err != nil {
		return nil, nil, errs.SystemCall("peer.Pair", "a socketpair", err)
	}
	return newConn(s, o.withDefaults()), f, nil
}

// Inherit makes a connection from the file that a parent made with [Pair]: the
// first of exec.Cmd.ExtraFiles is os.NewFile(3, "parent"). It takes ownership of the
// file, unless it fails.
func Inherit(f *os.File, o Options) (*Conn, error) {
	const op = "peer.Inherit"
	if f == nil {
		return nil, errs.PeerInvalid(op, "a nil file", "pass the file that the parent made with Pair")
	}
	s, err := sock.FromFile(f)
	if err != nil {
		if errors.Is(err, sock.ErrNoSocket) {
			return nil, errs.PeerCause(err, op, cuda.ErrInvalidArgument, f.Name(), "pass the file that the parent made with Pair")
		}
		return nil, errs.SystemCall(op, f.Name(), err)
	}
	f.Close()
	return newConn(s, o.withDefaults()), nil
}
