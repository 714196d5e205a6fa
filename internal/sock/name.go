package sock

import (
	"context"
	"errors"
	"io/fs"
	"time"

	"github.com/cuvmm/cuvmm/internal/wait"
)

// A socket's name is made and removed under its directory's lock, by all processes, and
// only so: a socket is bound before it listens, and between the two it looks like one that
// a process left when it died.

// ErrLocked reports that another process has held the lock of a directory for too long.
var ErrLocked = errors.New("another process holds the lock of the directory")

// ErrNotSocket reports a name that is not a socket of the directory's owner.
var ErrNotSocket = errors.New("not a socket of this user")

// ServedError reports a socket that a process listens on.
type ServedError struct {
	// By is that process, zero if the system does not tell.
	By Credentials
	// Dial is the error of connecting to it, nil if that succeeded.
	Dial error
}

func (e *ServedError) Error() string { return "a process serves the socket" }

// Unwrap returns the error of connecting.
func (e *ServedError) Unwrap() error { return e.Dial }

// Bind calls listen, which makes a socket of the name. A socket of the directory's owner
// that no process listens on is removed before. Bind waits no longer than the limit.
func (d *Dir) Bind(name string, limit time.Duration, listen func() error) (made Entry, err error) {
	err = d.locked(limit, func() error {
		if err := d.removeStale(name, limit); err != nil {
			return err
		}
		if err := listen(); err != nil {
			return err
		}
		if made, err = d.Lookup(name); err != nil {
			_ = d.Remove(name)
		}
		return err
	})
	return made, err
}

// RemoveStale removes a socket that no process listens on.
func (d *Dir) RemoveStale(name string, limit time.Duration) error {
	return d.locked(limit, func() error { return d.removeStale(name, limit) })
}

// Unbind removes the name if it is still the entry's. The socket is closed after that:
// otherwise another process would take it for a stale one.
func (d *Dir) Unbind(name string, made Entry, limit time.Duration) error {
	return d.locked(limit, func() error {
		if entry, err := d.Lookup(name); err != nil || entry != made {
			return nil
		}
		return d.Remove(name)
	})
}

func (d *Dir) locked(limit time.Duration, f func() error) error {
	for end := time.Now().Add(limit); ; {
		ok, err := d.TryLock()
		switch {
		case err != nil:
			return err
		case ok:
			defer d.Unlock()
			return f()
		case !wait.SleepUntil(context.Background(), time.Millisecond, end):
			return ErrLocked
		}
	}
}

func (d *Dir) removeStale(name string, limit time.Duration) error {
	entry, err := d.Lookup(name)
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if err != nil {
		return err
	}
	if !entry.Socket || entry.Owner != d.Owner {
		return ErrNotSocket
	}
	ctx, cancel := context.WithTimeout(context.Background(), limit)
	defer cancel()
	c, err := Dial(ctx, d, name)
	if err == nil {
		by, _ := c.Peer()
		_ = c.Close()
		return &ServedError{By: by}
	}
	if !NotListening(err) {
		return &ServedError{Dial: err}
	}
	return d.Remove(name)
}
