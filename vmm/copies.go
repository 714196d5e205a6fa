package vmm

import (
	"slices"

	"github.com/cuvmm/cuvmm/cuda"
	"github.com/cuvmm/cuvmm/internal/core"
	"github.com/cuvmm/cuvmm/internal/lock"
)

// copies tracks the running copies from and to a buffer, by stream, so that
// ClipAfter and Shrink also fence streams that their caller did not
// name: they cannot know the streams of copies in other goroutines. Other streams are
// not fenced, since they may be blocked for any length of time. The lock is a leaf.
type copies struct {
	mu lock.Mutex[lock.Leaf]
	on []copiesOn
	// watchers counts the operations that are taking memory or access away. While
	// there are any, streams whose copies have ended stay in the list: the operation's
	// own refusal may have ended them.
	watchers int
}

type copiesOn struct {
	stream *core.Stream
	n      int // running copies
}

// begin is called before the copy is checked and submitted. The caller passes the
// result to end.
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

// watch is called before copies are refused anything. The caller calls unwatch.
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

// addTo adds the work of all copies that have run since watch to a fence. By now
// copies are refused the memory that is taken away.
func (c *copies) addTo(f *core.Fence) {
	c.mu.Lock()
	streams := make([]*core.Stream, len(c.on))
	for i, o := range c.on {
		streams[i] = o.stream
	}
	c.mu.Unlock()
	f.AddStreams(streams)
}
