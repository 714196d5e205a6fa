//go:build !linux

package sock

import (
	"context"
	"errors"
	"net"
	"os"
)

// Conn is never made.
type Conn struct{ *net.UnixConn }

func (c *Conn) Shutdown() {}

func (c *Conn) Abandon() <-chan struct{} { return nil }

func (c *Conn) Send([]byte, []int) error { return errors.ErrUnsupported }

func (c *Conn) SendNow([]byte) bool { return false }

func (c *Conn) Receive([]byte) (n int, fds []int, lost bool, err error) {
	return 0, nil, false, errors.ErrUnsupported
}

func (c *Conn) Peer() (Credentials, error) { return Credentials{}, errors.ErrUnsupported }

func (c *Conn) Groups() ([]uint32, error) { return nil, errors.ErrUnsupported }

func (c *Conn) Ready() bool { return false }

func (c *Conn) Writable() bool { return false }

func (c *Conn) HungUp() bool { return true }

func (c *Conn) Unread() int { return 0 }

func TooManyInFlight(error) bool { return false }

func Busy(error) bool { return false }

func NotListening(error) bool { return false }

func NoDir(error) bool { return false }

func Pair() (*Conn, *os.File, error) { return nil, nil, errors.ErrUnsupported }

func FromFile(*os.File) (*Conn, error) { return nil, errors.ErrUnsupported }

// Listener is never made.
type Listener struct{ *net.UnixListener }

func Listen(*Dir, string, bool) (Listener, error) { return Listener{}, errors.ErrUnsupported }

func ListenerFromFile(*os.File) (Listener, error) { return Listener{}, errors.ErrUnsupported }

func ListenStream(*Dir, string) (net.Listener, error) { return nil, errors.ErrUnsupported }

func (l Listener) Accept() (*Conn, error) { return nil, errors.ErrUnsupported }

func Dial(context.Context, *Dir, string) (*Conn, error) { return nil, errors.ErrUnsupported }

// Dir is never made.
type Dir struct {
	Owner uint32
	Mode  os.FileMode
}

func OpenDir(string, os.FileMode) (*Dir, error) { return nil, errors.ErrUnsupported }

func (d *Dir) Lookup(string) (Entry, error) { return Entry{}, errors.ErrUnsupported }

func (d *Dir) Remove(string) error { return errors.ErrUnsupported }

func (d *Dir) Same(*Dir) bool { return false }

func (d *Dir) ReadFile(string, int) ([]byte, error) { return nil, errors.ErrUnsupported }

func (d *Dir) WriteFile(string, []byte) error { return errors.ErrUnsupported }

func (d *Dir) TryLock() (bool, error) { return false, errors.ErrUnsupported }

func (d *Dir) Unlock() {}

func (d *Dir) Close() error { return errors.ErrUnsupported }

func ListenAbstract(string) (*net.UnixListener, error) { return nil, errors.ErrUnsupported }
func DialAbstract(string) (*net.UnixConn, error)       { return nil, errors.ErrUnsupported }
func OfThisUser(*net.UnixConn) bool                    { return false }
