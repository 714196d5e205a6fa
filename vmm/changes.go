package vmm

import (
	"sync"
	"sync/atomic"
)

// changes runs the changes of a buffer one after the other. A change may take
// as long as the GPU does, so what must not wait for one hands in a job.
type changes struct {
	running sync.Mutex
	waiting atomic.Int32 // how many jobs there are
	mu      sync.Mutex   // guards jobs, a leaf
	jobs    []func()
}

// Lock waits for the change that runs, and begins one.
func (c *changes) Lock() { c.running.Lock() }

// TryLock begins a change if none runs.
func (c *changes) TryLock() bool { return c.running.TryLock() }

// Unlock ends a change, and does what was handed in meanwhile.
func (c *changes) Unlock() {
	c.running.Unlock()
	c.catchUp()
}

// Soon does the job, which is quick and submits nothing, where no change runs:
// at once, or else when the one that runs has ended. It never blocks.
func (c *changes) Soon(job func()) {
	c.mu.Lock()
	c.jobs = append(c.jobs, job)
	c.waiting.Add(1)
	c.mu.Unlock()
	c.catchUp()
}

// catchUp does the jobs, unless a change runs, whose end does them.
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
