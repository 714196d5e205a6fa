package vmm

import (
	"slices"
	"sync"

	"github.com/cuvmm/cuvmm/cuda"
	"github.com/cuvmm/cuvmm/internal/core"
)

// copies tracks the running copies from and to a buffer, by stream, so that
// ClipAfter, RevokeAfter and Shrink also fence streams that their caller did not
// name: the caller of a copy that waits has no reason to name its stream. Other
// streams are left alone, since they may stand still for as long as they like.
// The lock is a leaf.
type copies struct {
	mu sync.Mutex
	on []copiesOn
	// watchers are those who take away. While there are any, streams whose copies
	// have ended stay in the list: it may be the refusal that has ended them.
	watchers int
}

type copiesOn struct {
	stream *core.Stream
	n      int // copies that run
}

// begin is before the copy is let onto the stream. The caller calls end with the
// answer.
func (c *copies) begin(on *cuda.Stream) *core.Stream {
	c.mu.Lock()
	defer c.mu.Unlock()
	st := core.StreamOf(on)
	if i := c.find(st); i >= 0 {
		c.on[i].n++
	} else {
		c.on = append(c.on, copiesOn{st, 1})
	}
	return st
}

func (c *copies) end(st *core.Stream) {
	c.mu.Lock()
	defer c.mu.Unlock()
	i := c.find(st)
	if c.on[i].n--; c.on[i].n == 0 && c.watchers == 0 {
		c.on = slices.Delete(c.on, i, i+1)
	}
}

func (c *copies) find(st *core.Stream) int {
	return slices.IndexFunc(c.on, func(o copiesOn) bool { return o.stream == st })
}

// watch is before anything is refused to copies. The caller calls unwatch.
func (c *copies) watch() {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.watchers++
}

func (c *copies) unwatch() {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.watchers--; c.watchers == 0 {
		c.on = slices.DeleteFunc(c.on, func(o copiesOn) bool { return o.n == 0 })
	}
}

// mind adds to a fence what the copies that have run since the caller watches
// have put on their streams. No more may be let onto what is taken away.
func (c *copies) mind(f *core.Fence) {
	c.mu.Lock()
	streams := make([]*core.Stream, len(c.on))
	for i, o := range c.on {
		streams[i] = o.stream
	}
	c.mu.Unlock()
	f.AddStreams(streams)
}
