package peer

import (
	"context"
	"errors"
	"os"

	"github.com/cuvmm/cuvmm/cuda"
	"github.com/cuvmm/cuvmm/internal/errs"
	"github.com/cuvmm/cuvmm/internal/sock"
	"github.com/cuvmm/cuvmm/internal/wait"
)

// File returns another descriptor of the socket, for a child that accepts on it ([InheritListener]).
// Peers that connect while neither accepts wait for the next that does. The caller closes it.
func (l *Listener) File() (*os.File, error) {
	const op = "peer.Listener.File"
	if !l.closer.Acquire() {
		return nil, errs.PeerClosed(op, "listener")
	}
	defer l.closer.Release()
	f, err := l.l.File()
	if err != nil {
		return nil, errs.SystemCall(op, l.path, err)
	}
	return f, nil
}

// InheritListener makes a listener of a socket that listens already: one that a parent made
// ([Listener.File]), or a service manager (a Unix socket of type SOCK_SEQPACKET). It takes ownership
// of the file, unless it fails. Whoever bound the socket to its path removes that, and sees to it that
// other users cannot reach it: Close does not.
func InheritListener(f *os.File, o Options) (*Listener, error) {
	const op = "peer.InheritListener"
	if f == nil {
		return nil, errs.PeerInvalid(op, "a nil file", "pass the file of a listener")
	}
	s, err := sock.ListenerFromFile(f)
	if err != nil {
		if errors.Is(err, sock.ErrNoSocket) {
			return nil, errs.PeerCause(err, op, cuda.ErrInvalidArgument, f.Name(), "pass a Unix socket of type SOCK_SEQPACKET that listens")
		}
		return nil, errs.SystemCall(op, f.Name(), err)
	}
	_ = f.Close()
	l := &Listener{l: s, path: s.Addr().String(), options: o.withDefaults(), accepting: wait.NewSlot()}
	l.ctx, l.end = context.WithCancel(context.Background())
	return l, nil
}
