package peer

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"time"

	"github.com/cuvmm/cuvmm/cuda"
	"github.com/cuvmm/cuvmm/internal/core"
	"github.com/cuvmm/cuvmm/internal/errs"
	"github.com/cuvmm/cuvmm/internal/life"
	"github.com/cuvmm/cuvmm/internal/sock"
	"github.com/cuvmm/cuvmm/internal/wait"
)

// Listener waits for connections on a socket in a private directory. Its
// methods are safe for concurrent use. The caller closes it.
type Listener struct {
	l         sock.Listener
	dir       *sock.Dir // nil if another process bound the socket
	path      string
	entry     sock.Entry
	options   Options
	accepting wait.Slot
	ctx       context.Context // ends with Close
	end       context.CancelFunc
	closer    life.Closer
}

// maxName keeps the socket's address within the system's limit, 107 bytes.
const maxName = 80

// Listen makes a socket of that name in a directory that belongs to this process's user
// and that only this user may enter (mode 0700; others too with Options.Shared). It makes the directory if there is none.
// An empty name is replaced by a random one, which [Listener.Path] returns. Listen
// replaces a socket that a process of this user left behind when it died. Anything else of
// that name is cuda.ErrInUse; if another process listens there, its cause is a
// [ServedError].
func Listen(dir, name string, o Options) (*Listener, error) {
	const op = "peer.Listen"
	if name == "" {
		name = rand.Text()
	}
	if err := checkName(op, name); err != nil {
		return nil, err
	}
	if dir == "" {
		return nil, errs.PeerInvalid(op, `directory ""`, "name one of this user's own")
	}
	o = o.withDefaults()
	dir, err := filepath.Abs(dir) // cleaned, too: a slash behind a link would follow it
	if err != nil {
		return nil, errs.SystemCall(op, "this process's directory", err)
	}
	d, err := openDir(op, dir, true, o.Shared)
	if err != nil {
		return nil, err
	}
	l := &Listener{dir: d, path: filepath.Join(dir, name), options: o, accepting: wait.NewSlot()}
	l.ctx, l.end = context.WithCancel(context.Background())
	if err := l.bind(op, name); err != nil {
		_ = d.Close()
		return nil, err
	}
	return l, nil
}

func checkName(op, name string) error {
	if name == "" || name == "." || name == ".." || strings.ContainsAny(name, "/\x00") || len(name) > maxName {
		return errs.PeerInvalid(op, fmt.Sprintf("a socket of the name %q", name),
			fmt.Sprintf("use 1 to %d bytes without a slash", maxName))
	}
	return nil
}

// openDir opens a directory that only its owner may enter, or, if it is shared, that only its owner may
// write. With create it makes the directory first, if there is none.
func openDir(op, path string, create, shared bool) (*sock.Dir, error) {
	asked := fmt.Sprintf("directory %q", path)
	var make os.FileMode
	if create {
		if make = 0o700; shared {
			make = 0o711
		}
	}
	d, err := sock.OpenDir(path, make)
	switch {
	case err == nil:
	case sock.NoDir(err):
		return nil, errs.PeerCause(err, op, ErrPeer, asked+" is a symbolic link or no directory", "name the directory itself")
	case create && errors.Is(err, fs.ErrNotExist):
		return nil, errs.PeerCause(err, op, nil, asked, "make the folder above it first")
	default:
		return nil, errs.SystemCall(op, asked, err)
	}
	switch {
	case shared && d.Mode&0o022 != 0:
		err = errs.Peer(op, ErrPeer, fmt.Sprintf("%s has mode %#o", asked, uint32(d.Mode)), "other users could put a socket there: use a directory that only its owner can write, such as one of mode 0711")
	case shared && create && d.Mode&0o011 != 0o011:
		err = errs.Peer(op, ErrPeer, fmt.Sprintf("%s has mode %#o", asked, uint32(d.Mode)), "other users cannot enter it: use a directory of mode 0711")
	case !shared && d.Mode != 0o700:
		err = errs.Peer(op, ErrPeer, fmt.Sprintf("%s has mode %#o", asked, uint32(d.Mode)), "other users could put a socket there: use a directory of mode 0700")
	case create && sameUser(Credentials{UID: d.Owner}) != nil:
		err = errs.Peer(op, ErrPeer, fmt.Sprintf("%s belongs to user %d", asked, d.Owner), "use a directory of this process's user")
	}
	if err != nil {
		_ = d.Close()
		return nil, err
	}
	return d, nil
}

func (l *Listener) bind(op, name string) error {
	entry, err := l.dir.Bind(name, l.options.Timeout, func() (err error) {
		l.l, err = sock.Listen(l.dir, name, l.options.Shared)
		return err
	})
	if err == nil {
		l.entry = entry
		return nil
	}
	if l.l.UnixListener != nil {
		_ = l.l.Close()
	}
	var served *sock.ServedError
	switch {
	case errors.Is(err, sock.ErrLocked):
		return l.locked(op)
	case errors.Is(err, sock.ErrNotSocket):
		return errs.Peer(op, cuda.ErrInUse, fmt.Sprintf("%q is not a socket of this user", l.path), "use another name, or remove it")
	case errors.As(err, &served) && served.Dial != nil:
		return errs.PeerCause(served.Dial, op, cuda.ErrInUse, fmt.Sprintf("a process serves %q", l.path), "use another name, or end that process")
	case served != nil:
		return errs.PeerCause(&ServedError{Path: l.path, By: Credentials(served.By)}, op, cuda.ErrInUse, "",
			"connect to it if it took over what this process served before it ended; otherwise use another name, or end that process")
	}
	return errs.SystemCall(op, fmt.Sprintf("socket %q", l.path), err)
}

// locked returns the error of a lock that was not released in time.
func (l *Listener) locked(op string) error {
	return errs.Peer(op, ErrTimeout, fmt.Sprintf("another process has held the lock of the directory of %q for %v", l.path, l.options.Timeout),
		"end the process of this user that hangs there")
}

// Path returns the path of the socket, for [Dial]. Of an inherited one it is what the socket was bound
// to, which other processes may not be able to use.
func (l *Listener) Path() string { return l.path }

// Accept waits for the next peer that Options.Allow admits. A peer that it refuses
// receives the reason. Accept does not wait for the peer's greeting, so a
// silent one delays no other. The caller closes the connection.
//
// An error other than that of the context, or cuda.ErrClosed, may be temporary: mostly
// that this process has too many open files.
func (l *Listener) Accept(ctx context.Context) (*Conn, error) {
	const op = "peer.Listener.Accept"
	if !l.closer.Acquire() {
		return nil, errs.PeerClosed(op, "listener")
	}
	defer l.closer.Release()
	if !l.accepting.Take(ctx, l.ctx.Done()) {
		return nil, l.notAccepted(ctx, op)
	}
	defer l.accepting.Give()
	both, cancel := context.WithCancel(ctx)
	defer cancel()
	defer context.AfterFunc(l.ctx, cancel)()
	for {
		var s *sock.Conn
		err := wait.Until(both, time.Time{}, l.l.SetDeadline, func() (err error) {
			s, err = l.l.Accept()
			return err
		})
		switch {
		case err == nil:
		case wait.TimedOut(err) || wait.WasClosed(err):
			return nil, l.notAccepted(ctx, op)
		default:
			return nil, errs.SystemCall(op, l.path, err)
		}
		cred, err := admit(s, l.options)
		if err == nil {
			c := newConn(s, l.options)
			c.peer, c.known = cred, true
			return c, nil
		}
		l.options.Log.Info("cuvmm: a peer was refused", "socket", l.path, "peer", cred.String(), "reason", err.Error())
		refuse(s, nonce{}, 0, fmt.Sprintf("user %d is not allowed", cred.UID))
		s.Abandon() // files in its queue may take long to close
	}
}

func (l *Listener) notAccepted(ctx context.Context, op string) error {
	if l.ctx.Err() != nil {
		return errs.PeerClosed(op, "listener")
	}
	return errs.PeerWait(ctx, op, l.path, "no peer connected: start one")
}

// admit returns the peer's credentials, and the policy's error if it is refused.
func admit(s *sock.Conn, o Options) (Credentials, error) {
	cred, err := s.Peer()
	if err != nil {
		return Credentials{}, err
	}
	p := Credentials(cred)
	err = errs.Peer("peer.Options.Allow", ErrPeer, "the function panicked", "see the log")
	core.Hook(o.Log, "peer.Options.Allow", func() { err = o.Allow(p) })
	return p, err
}

// Close ends the listener and waiting calls of Accept. It removes the socket if that is
// still this listener's. Connections stay open. After an error the socket's name is still
// there, and Close may be called again to remove it; otherwise Close is idempotent.
func (l *Listener) Close() error {
	const op = "peer.Listener.Close"
	// Waiting calls end first. The socket is open until its name is removed: otherwise
	// another process would take it for a stale one.
	l.closer.Life.Close()
	l.end()
	return l.closer.Close(func() error {
		if l.dir == nil {
			return l.l.Close()
		}
		err := l.removeOwn(op)
		_ = l.l.Close() // which a second call finds done
		if err != nil {
			return err
		}
		_ = l.dir.Close()
		return nil
	})
}

// removeOwn removes the name if it is still this listener's.
func (l *Listener) removeOwn(op string) error {
	switch err := l.dir.Unbind(filepath.Base(l.path), l.entry, l.options.Timeout); {
	case errors.Is(err, sock.ErrLocked):
		return l.locked(op)
	case err != nil:
		return errs.SystemCall(op, l.path, err)
	}
	return nil
}
