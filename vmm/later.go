package vmm

import (
	"sync/atomic"
	"time"

	"github.com/cuvmm/cuvmm/internal/core"
)

// later counts what ClipAfter and RevokeAfter have still to do on an object,
// which is not torn down before. It is no operation that runs: nothing of it
// puts work on a stream.
type later struct{ atomic.Int32 }

// wait returns when nothing is left. Nothing new comes: the object is closed.
func (l *later) wait(s *core.System) {
	for l.Load() > 0 {
		s.PollReclaim()
		time.Sleep(50 * time.Microsecond)
	}
}
