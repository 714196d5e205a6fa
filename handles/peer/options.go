package peer

import (
	"fmt"
	"log/slog"
	"os"
	"time"

	"github.com/cuvmm/cuvmm/internal/fd"
	"github.com/cuvmm/cuvmm/internal/link"
)

// Credentials identify the process at the other end of a connection, as of the time when it
// connected or began to listen. The system may have reused its pid since. PID 0
// is a process in another pid namespace; users of another user namespace appear as
// they are mapped into this one.
type Credentials struct {
	PID      int
	UID, GID uint32
}

// String writes "process 4711 of user 1000, group 1000".
func (c Credentials) String() string {
	return fmt.Sprintf("process %d of user %d, group %d", c.PID, c.UID, c.GID)
}

// Options configure a connection, or all connections of a listener. The zero value admits
// processes of the same user.
type Options struct {
	// Allow is called for each peer before anything is read from it; an error refuses
	// the peer, and so does a panic, which is logged. Nil admits this process's effective user. It is not called for
	// a socketpair, whose other end this process handed out itself.
	Allow func(Credentials) error
	// Shared lets processes of other users reach the socket, so that Allow alone decides who is served. Listen
	// makes a directory that others may enter but neither list nor change (mode 0711), or takes one that others
	// cannot write, and a socket to which everyone may connect. Dial takes such a directory, too. Nil as
	// Allow then admits root beside this process's user.
	Shared bool
	// Timeout bounds how long the peer takes to greet, to finish a message that it has
	// begun, and to read one that is sent. 0 is 10 seconds.
	Timeout time.Duration
	// MaxFDs bounds the file descriptors of a received message. 0 is a quarter of this
	// process's limit of open files, but at most [MaxFDs]; a negative number allows none.
	MaxFDs int
	// Log records the peers that a listener refused, at Info, since any process that can
	// connect can cause such records at any rate. Nil logs nothing.
	Log *slog.Logger
}

func (o Options) withDefaults() Options {
	switch {
	case o.Allow != nil:
	case o.Shared:
		o.Allow = sameUserOrRoot
	default:
		o.Allow = sameUser
	}
	if o.Timeout <= 0 {
		o.Timeout = link.DefaultTimeout
	}
	switch {
	case o.MaxFDs < 0:
		o.MaxFDs = 0
	case o.MaxFDs == 0:
		o.MaxFDs = defaultFDs()
	default:
		o.MaxFDs = min(o.MaxFDs, MaxFDs)
	}
	if o.Log == nil {
		o.Log = slog.New(slog.DiscardHandler)
	}
	return o
}

// defaultFDs is the default of Options.MaxFDs: one message leaves room for the program's
// own files and for other connections.
func defaultFDs() int {
	limit, err := fd.Limit()
	if err != nil {
		return MaxFDs // not on Linux, so there are no connections anyway
	}
	return int(max(1, min(limit/4, MaxFDs)))
}

func sameUser(c Credentials) error {
	if own := os.Geteuid(); own < 0 || c.UID != uint32(own) {
		return fmt.Errorf("%v, but this process is of user %d", c, own)
	}
	return nil
}

// sameUserOrRoot admits root too, whom no directory keeps out.
func sameUserOrRoot(c Credentials) error {
	if c.UID == 0 {
		return nil
	}
	return sameUser(c)
}
