package vmm

import (
	"sync/atomic"

	"github.com/cuvmm/cuvmm/internal/lock"
)

// changes serializes the changes of a buffer. A change may wait for the GPU, so an
// operation that must not wait for a change queues a job instead.
type changes struct {
	running lock.Mutex[lock.Long]
	waiting atomic.Int32          // the length of jobs
	mu      lock.Mutex[lock.Leaf] // guards jobs, a leaf
	jobs    []func()
}

// Lock begins a change, after the one that runs.
func (c *changes) Lock() { c.running.Lock() }

// TryLock begins a change if none runs.
func (c *changes) TryLock() bool { return c.running.TryLock() }

// Unlock ends a change and runs the jobs that were queued meanwhile.
func (c *changes) Unlock() {
	c.running.Unlock()
	c.catchUp()
}

// RunOrQueue runs the job at once if no change runs, and otherwise after the one that
// runs. It never blocks. The job is quick and submits no GPU work.
func (c *changes) RunOrQueue(job func()) {
	c.mu.Lock()
	c.jobs = append(c.jobs, job)
	c.waiting.Add(1)
	c.mu.Unlock()
	c.catchUp()
}

// catchUp runs the queued jobs, unless a change runs: its Unlock runs them.
func (c *changes) catchUp() {
	for c.waiting.Load() > 0 && c.running.TryLock() {
		c.mu.Lock()
		jobs := c.jobs
		c.jobs = nil
		c.waiting.Add(-int32(len(jobs)))
		c.mu.Unlock()
		for _, job := range jobs {
			job()
		}
		c.running.Unlock()
	}
}
