package vmm

import (
	"errors"
	"sync/atomic"

	"github.com/cuvmm/cuvmm/internal/core"
	"github.com/cuvmm/cuvmm/internal/life"
)

// pendingJobs counts the clips that are still to be done on a buffer; its teardown waits
// for them. They are not operations of the buffer's life, since they submit no GPU work.
type pendingJobs struct{ atomic.Int32 }

// runOrQueue runs the job now or after the change that runs. Teardown and Drain wait
// for it.
func (b *buffer) runOrQueue(job func()) {
	b.pending.Add(1)
	done := b.res.System().Pending()
	b.changes.RunOrQueue(func() {
		job()
		done()
		b.pending.Add(-1)
	})
}

// reclaim calls passed when the fence has passed, and then runs do as a job of the
// buffer. The reclaimer, which never waits for a change, polls until do has run.
func (b *buffer) reclaim(f *core.Fence, alive *life.Life, do func() error, passed func()) {
	b.pending.Add(1) // the teardown waits for it
	const idle, handedIn, done = 0, 1, 2
	var state atomic.Int32
	var err error
	b.res.System().Reclaim(f, alive, func() error {
		passed()
		if state.CompareAndSwap(idle, handedIn) {
			b.changes.RunOrQueue(func() {
				if err = do(); errors.Is(err, life.ErrAgain) {
					state.Store(idle)
					return
				}
				b.pending.Add(-1)
				state.Store(done)
			})
		}
		if state.Load() != done {
			return life.ErrAgain
		}
		return err
	})
}
