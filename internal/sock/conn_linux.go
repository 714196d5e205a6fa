package sock

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"syscall"

	"github.com/cuvmm/cuvmm/internal/fd"
	"golang.org/x/sys/unix"
)

// Conn is one end of a connection that preserves packet boundaries. Deadlines
// are those of package net. One goroutine at a time calls Send, and one Receive.
type Conn struct {
	*net.UnixConn
	raw syscall.RawConn
	out outgoing
	in  incoming
}

func wrap(u *net.UnixConn) (*Conn, error) {
	raw, err := u.SyscallConn()
	if err != nil {
		_ = u.Close()
		return nil, err
	}
	c := &Conn{UnixConn: u, raw: raw}
	c.out.try, c.in.try = c.out.send, c.in.receive
	return c, nil
}

// Shutdown ends the connection for both sides and all calls that wait on it.
// Packets that have arrived can still be received.
func (c *Conn) Shutdown() {
	_ = c.raw.Control(func(s uintptr) { _ = unix.Shutdown(int(s), unix.SHUT_RDWR) })
}

// Close ends the connection and closes its descriptor. If descriptors in unread packets
// take long to close it does not wait for them.
func (c *Conn) Close() error {
	fd.Await(c.Abandon())
	return nil
}

// Abandon is Close that does not wait at all. done is closed at its end.
func (c *Conn) Abandon() (done <-chan struct{}) {
	c.Shutdown()
	return fd.Away(func() { _ = c.UnixConn.Close() })
}

// Send sends one packet, which must not be empty, with at most MaxFDs
// descriptors.
func (c *Conn) Send(p []byte, fds []int) error {
	var oob []byte
	if len(fds) > 0 {
		oob = unix.UnixRights(fds...)
	}
	o := &c.out
	o.packet, o.oob, o.err = p, oob, nil
	waited := c.raw.Write(o.try)
	o.packet, o.oob = nil, nil
	if waited != nil {
		return waited
	}
	if errors.Is(o.err, unix.EPIPE) || errors.Is(o.err, unix.ECONNRESET) {
		return io.EOF
	}
	return os.NewSyscallError("sendmsg", o.err)
}

// outgoing is a Send that runs. It belongs to the connection, so that a packet costs no
// allocation.
type outgoing struct {
	packet, oob []byte
	err         error
	try         func(s uintptr) bool // send
}

// send returns false if the socket's buffer is full.
func (o *outgoing) send(s uintptr) bool {
	for {
		if err := unix.Sendmsg(int(s), o.packet, o.oob, nil, unix.MSG_NOSIGNAL|unix.MSG_DONTWAIT); err != unix.EINTR {
			o.err = err
			return err != unix.EAGAIN
		}
	}
}

// SendNow sends one packet without descriptors if it does not block.
func (c *Conn) SendNow(p []byte) (sent bool) {
	_ = c.raw.Control(func(s uintptr) {
		sent = unix.Sendmsg(int(s), p, nil, nil, unix.MSG_NOSIGNAL|unix.MSG_DONTWAIT) == nil
	})
	return sent
}

// oobSize has space for all descriptors of a packet, and for other control messages that
// the kernel may add.
var oobSize = unix.CmsgSpace(4*MaxFDs) + 512

// incoming is a Receive that runs, as outgoing is a Send.
type incoming struct {
	into, oob      []byte
	n, oobn, flags int
	err            error
	try            func(s uintptr) bool // receive
}

// receive returns false if there is nothing yet.
func (i *incoming) receive(s uintptr) bool {
	reset := false
	for {
		n, oobn, flags, _, err := unix.Recvmsg(int(s), i.into, i.oob, unix.MSG_CMSG_CLOEXEC|unix.MSG_DONTWAIT)
		switch {
		case err == unix.EINTR:
		case err == unix.ECONNRESET && !reset:
			// The peer closed with unread packets of ours, which the kernel reports
			// first, and once. Its earlier packets can still be received.
			reset = true
		case err == unix.EAGAIN && !reset:
			return false
		default:
			i.n, i.oobn, i.flags, i.err = n, oobn, flags, err
			return true
		}
	}
}

// Receive receives one packet into p. The descriptors, closed on exec, are the
// caller's, even if an error comes with them. lost says that the packet or
// its descriptors did not fit: into p, or into this process's limit of open
// files. The error is io.EOF if the peer has closed or is gone.
func (c *Conn) Receive(p []byte) (n int, fds []int, lost bool, err error) {
	i := &c.in
	if i.oob == nil {
		i.oob = make([]byte, oobSize)
	}
	i.into, i.n, i.oobn, i.flags, i.err = p, 0, 0, 0, nil
	waited := c.raw.Read(i.try)
	i.into = nil
	if waited != nil {
		return 0, nil, false, waited
	}
	fds, bad := rights(i.oob[:max(i.oobn, 0)])
	switch {
	case errors.Is(i.err, unix.ECONNRESET) || errors.Is(i.err, unix.EAGAIN):
		return 0, fds, false, io.EOF
	case i.err != nil:
		return 0, fds, false, os.NewSyscallError("recvmsg", i.err)
	case i.n == 0:
		return 0, fds, false, io.EOF
	}
	return i.n, fds, bad || i.flags&(unix.MSG_TRUNC|unix.MSG_CTRUNC) != 0, nil
}

// Ready reports whether Receive would return at once.
func (c *Conn) Ready() (ready bool) {
	_ = c.raw.Control(func(s uintptr) { ready, _ = asked(int(s), unix.POLLIN) })
	return ready
}

// Writable reports whether the peer has read enough for a Send that returns at once.
func (c *Conn) Writable() (writable bool) {
	_ = c.raw.Control(func(s uintptr) { writable, _ = asked(int(s), unix.POLLOUT) })
	return writable
}

// HungUp reports whether the peer's end is closed, also while what it sent before is unread.
func (c *Conn) HungUp() bool {
	up := false
	_ = c.raw.Control(func(s uintptr) {
		over, err := asked(int(s), unix.POLLRDHUP)
		up = err == nil && !over
	})
	return !up
}

// asked reports whether one of the events is there. A signal, by which the runtime preempts a
// goroutine, ends the system's call without an answer, although that does not wait.
func asked(fd int, events int16) (bool, error) {
	for {
		n, err := unix.Poll([]unix.PollFd{{Fd: int32(fd), Events: events}}, 0)
		if !errors.Is(err, unix.EINTR) {
			return n > 0, err
		}
	}
}

// Unread returns how much of the sent data the peer has not received yet, in bytes as the
// kernel accounts them. It is 0 for a closed connection.
func (c *Conn) Unread() (bytes int) {
	_ = c.raw.Control(func(s uintptr) { bytes, _ = unix.IoctlGetInt(int(s), unix.SIOCOUTQ) })
	return bytes
}

// rights returns the descriptors among control messages, and whether one of the messages
// is malformed.
func rights(oob []byte) (fds []int, bad bool) {
	if len(oob) == 0 {
		return nil, false
	}
	messages, err := unix.ParseSocketControlMessage(oob)
	bad = err != nil
	for _, m := range messages {
		if m.Header.Level != unix.SOL_SOCKET || m.Header.Type != unix.SCM_RIGHTS {
			continue
		}
		some, err := unix.ParseUnixRights(&m)
		fds, bad = append(fds, some...), bad || err != nil
	}
	return fds, bad
}

// TooManyInFlight reports whether a Send failed because too many descriptors of
// this user are in flight.
func TooManyInFlight(err error) bool { return errors.Is(err, unix.ETOOMANYREFS) }

// Busy reports whether a Dial failed because the queue of the listener is full.
func Busy(err error) bool { return errors.Is(err, unix.EAGAIN) }

// NotListening reports whether a Dial failed because the file is not, or no
// longer, a socket with a listener.
func NotListening(err error) bool { return errors.Is(err, unix.ECONNREFUSED) }

// Peer returns the credentials of the other end of a connection that Dial or Accept made.
// Both ends of a socketpair have the credentials of the process that made it.
func (c *Conn) Peer() (Credentials, error) {
	var cred *unix.Ucred
	var err error
	if e := c.raw.Control(func(s uintptr) { cred, err = unix.GetsockoptUcred(int(s), unix.SOL_SOCKET, unix.SO_PEERCRED) }); e != nil {
		return Credentials{}, e
	}
	if err != nil {
		return Credentials{}, os.NewSyscallError("getsockopt SO_PEERCRED", err)
	}
	return Credentials{int(cred.Pid), cred.Uid, cred.Gid}, nil
}

// Pair returns two ends: one for this process, the other for a child to inherit.
func Pair() (*Conn, *os.File, error) {
	fds, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_SEQPACKET|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return nil, nil, os.NewSyscallError("socketpair", err)
	}
	near, far := os.NewFile(uintptr(fds[0]), "near end"), os.NewFile(uintptr(fds[1]), "far end")
	c, err := FromFile(near)
	near.Close()
	if err != nil {
		far.Close()
		return nil, nil, err
	}
	return c, far, nil
}

// FromFile makes a connection from an inherited end. The file stays the
// caller's.
func FromFile(f *os.File) (*Conn, error) {
	raw, err := f.SyscallConn()
	if err != nil {
		return nil, err
	}
	if e := raw.Control(func(s uintptr) { err = check(int(s)) }); e != nil {
		return nil, e
	}
	if err != nil {
		return nil, err
	}
	n, err := net.FileConn(f)
	if err != nil {
		return nil, err
	}
	return wrap(n.(*net.UnixConn))
}

func check(s int) error {
	domain, err := unix.GetsockoptInt(s, unix.SOL_SOCKET, unix.SO_DOMAIN)
	if err != nil {
		return fmt.Errorf("%w: %w", ErrNoSocket, err)
	}
	kind, err := unix.GetsockoptInt(s, unix.SOL_SOCKET, unix.SO_TYPE)
	if err != nil || domain != unix.AF_UNIX || kind != unix.SOCK_SEQPACKET {
		return ErrNoSocket
	}
	if _, err := unix.Getpeername(s); err != nil {
		return fmt.Errorf("%w: %w", ErrNoSocket, err)
	}
	// The socket's maker may have enabled further control messages, of which the second
	// would open a descriptor with each packet. Kernels that lack one never send it.
	_ = unix.SetsockoptInt(s, unix.SOL_SOCKET, unix.SO_PASSCRED, 0)
	_ = unix.SetsockoptInt(s, unix.SOL_SOCKET, unix.SO_PASSPIDFD, 0)
	return nil
}

// Listener listens on a socket in a directory. It removes nothing.
type Listener struct{ *net.UnixListener }

// Listen makes the socket, whose name must be free.
func Listen(d *Dir, name string, shared bool) (Listener, error) {
	l, err := net.ListenUnix("unixpacket", &net.UnixAddr{Name: d.through(name), Net: "unixpacket"})
	if err != nil {
		return Listener{}, d.named(err, name)
	}
	l.SetUnlinkOnClose(false)
	if shared { // a process that may not write a socket cannot connect
		if err := os.Chmod(d.through(name), 0o666); err != nil {
			_ = l.Close()
			return Listener{}, err
		}
	}
	return Listener{l}, nil
}

// ListenerFromFile returns a listener of a file that listens already. The file stays the caller's.
func ListenerFromFile(f *os.File) (Listener, error) {
	raw, err := f.SyscallConn()
	if err != nil {
		return Listener{}, err
	}
	if e := raw.Control(func(s uintptr) {
		var kind, listening int
		kind, err = unix.GetsockoptInt(int(s), unix.SOL_SOCKET, unix.SO_TYPE)
		if err == nil {
			listening, err = unix.GetsockoptInt(int(s), unix.SOL_SOCKET, unix.SO_ACCEPTCONN)
		}
		if err != nil || kind != unix.SOCK_SEQPACKET || listening == 0 {
			err = ErrNoSocket
		}
	}); e != nil {
		return Listener{}, e
	}
	if err != nil {
		return Listener{}, err
	}
	l, err := net.FileListener(f)
	if err != nil {
		return Listener{}, err
	}
	of, isUnix := l.(*net.UnixListener)
	if !isUnix {
		_ = l.Close()
		return Listener{}, ErrNoSocket
	}
	of.SetUnlinkOnClose(false)
	return Listener{of}, nil
}

// ListenStream is Listen for a socket of bytes, to be used with package net/http.
func ListenStream(d *Dir, name string) (net.Listener, error) {
	l, err := net.ListenUnix("unix", &net.UnixAddr{Name: d.through(name), Net: "unix"})
	if err != nil {
		return nil, d.named(err, name)
	}
	l.SetUnlinkOnClose(false)
	return l, nil
}

// Accept waits for a connection.
func (l Listener) Accept() (*Conn, error) {
	u, err := l.AcceptUnix()
	if err != nil {
		return nil, err
	}
	return wrap(u)
}

// Dial connects to a socket in a directory.
func Dial(ctx context.Context, d *Dir, name string) (*Conn, error) {
	var dialer net.Dialer
	n, err := dialer.DialContext(ctx, "unixpacket", d.through(name))
	if err != nil {
		return nil, d.named(err, name)
	}
	return wrap(n.(*net.UnixConn))
}
