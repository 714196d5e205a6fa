package vmm

import (
	"errors"
	"sync/atomic"
	"time"

	"github.com/cuvmm/cuvmm/internal/core"
	"github.com/cuvmm/cuvmm/internal/life"
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

// soon has a job done that the buffer is not torn down before, and that Drain
// waits for.
func (b *buffer) soon(job func()) {
	b.later.Add(1)
	done := b.res.System().Pending()
	b.changes.Soon(func() {
		job()
		done()
		b.later.Add(-1)
	})
}

// reclaim has passed called when the fence has passed, and do as a job of the
// buffer's. The reclaimer, which waits for no change, asks until it is done.
func (b *buffer) reclaim(f *core.Fence, alive *life.Life, do func() error, passed func()) {
	b.later.Add(1) // the buffer is not torn down before
	const idle, handedIn, done = 0, 1, 2
	var state atomic.Int32
	var err error
	b.res.System().Reclaim(f, alive, func() error {
		passed()
		if state.CompareAndSwap(idle, handedIn) {
			b.changes.Soon(func() {
				if err = do(); errors.Is(err, life.ErrAgain) {
					state.Store(idle)
					return
				}
				b.later.Add(-1)
				state.Store(done)
			})
		}
		if state.Load() != done {
			return life.ErrAgain
		}
		return err
	})
}
