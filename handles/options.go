package handles

import (
	"fmt"
	"log/slog"
	"os"
	"time"
)

// Peer is the process at the other end of a connection, as it was when it
// connected or began to listen. Its pid may be another process's by now, and 0
// is a process in another pid namespace; users of another user namespace appear
// as they are mapped here.
type Peer struct {
	PID      int
	UID, GID uint32
}

// String writes "process 4711 of user 1000, group 1000".
func (p Peer) String() string {
	return fmt.Sprintf("process %d of user %d, group %d", p.PID, p.UID, p.GID)
}

// Options describe a connection, or those of a listener. The zero value lets
// in processes of the same user.
type Options struct {
	// Allow is asked about each peer before anything is read from it; an error
	// refuses it. Nil lets in this process's effective user. A socketpair's
	// peer is not asked about: it was given its end by this process.
	Allow func(Peer) error
	// Timeout is how long the peer may take to greet, to finish a message that
	// it has begun, and to take one that is sent. 0 is 10 seconds.
	Timeout time.Duration
	// MaxFDs is the most file descriptors taken with a message; 0 is MaxFDs,
	// and a negative number takes none.
	MaxFDs int
	// Log is told which peers a listener refused, at Info: whoever connects can
	// cause it as often as they like. Nil tells nobody.
	Log *slog.Logger
}

// defaultTimeout is a variable for tests alone.
var defaultTimeout = 10 * time.Second

func (o Options) withDefaults() Options {
	if o.Allow == nil {
		o.Allow = sameUser
	}
	if o.Timeout <= 0 {
		o.Timeout = defaultTimeout
	}
	switch {
	case o.MaxFDs < 0:
		o.MaxFDs = 0
	case o.MaxFDs == 0 || o.MaxFDs > MaxFDs:
		o.MaxFDs = MaxFDs
	}
	if o.Log == nil {
		o.Log = slog.New(slog.DiscardHandler)
	}
	return o
}

func sameUser(p Peer) error {
	if own := os.Geteuid(); own < 0 || p.UID != uint32(own) {
		return fmt.Errorf("%v, where this process is of user %d", p, own)
	}
	return nil
}
