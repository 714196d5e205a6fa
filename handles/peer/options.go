package peer

import (
	"fmt"
	"log/slog"
	"os"
	"time"

	"github.com/cuvmm/cuvmm/internal/link"
)

// Credentials are those of the process at the other end of a connection, as they were
// when it connected or began to listen. Its pid may be another process's by now, and 0
// is a process in another pid namespace; users of another user namespace appear as
// they are mapped here.
type Credentials struct {
	PID      int
	UID, GID uint32
}

// String writes "process 4711 of user 1000, group 1000".
func (c Credentials) String() string {
	return fmt.Sprintf("process %d of user %d, group %d", c.PID, c.UID, c.GID)
}

// Options describe a connection, or those of a listener. The zero value admits
// processes of the same user.
type Options struct {
	// Allow is called for each peer before anything is read from it; an error refuses
	// the peer. Nil admits this process's effective user. It is not called for the
	// peer of a socketpair, which got its end from this process.
	Allow func(Credentials) error
	// Timeout is how long the peer may take to greet, to finish a message that it has
	// begun, and to take one that is sent. 0 is 10 seconds.
	Timeout time.Duration
	// MaxFDs is the most file descriptors that a message may bring; 0 is [MaxFDs], and
	// a negative number allows none.
	MaxFDs int
	// Log records which peers a listener refused, at Info: any process that can
	// connect can cause such a record at any rate. Nil records nothing.
	Log *slog.Logger
}

func (o Options) withDefaults() Options {
	if o.Allow == nil {
		o.Allow = sameUser
	}
	if o.Timeout <= 0 {
		o.Timeout = link.DefaultTimeout
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

func sameUser(c Credentials) error {
	if own := os.Geteuid(); own < 0 || c.UID != uint32(own) {
		return fmt.Errorf("%v, where this process is of user %d", c, own)
	}
	return nil
}
