package pool

import (
	"fmt"
	"slices"
	"sync/atomic"
	"time"

	"github.com/cuvmm/cuvmm/cuda"
	"github.com/cuvmm/cuvmm/internal/core"
	"github.com/cuvmm/cuvmm/internal/lock"
)

// Stats are a pool's counts. Sizes are in bytes.
type Stats struct {
	// Serial is the pool's number in the process, from 1, and never used again.
	Serial int `json:"serial"`
	// Name and Tag are those of Options.
	Name string   `json:"name,omitempty"`
	Tag  cuda.Tag `json:"tag,omitempty"`
	// Reserved is the physical memory that the pool has, and PeakReserved the most
	// that it had since New or ResetPeaks.
	Reserved     int `json:"reserved"`
	PeakReserved int `json:"peakReserved"`
	// Suspended is the part of Reserved that has no memory now: the pool was suspended
	// (vmm.Suspend).
	Suspended int `json:"suspended,omitempty"`
	// Limit is the most that it may have; 0 is no limit.
	Limit int `json:"limit,omitempty"`
	// Requested is the size of the live blocks as requested, and Blocks their number.
	Requested int `json:"requested"`
	Blocks    int `json:"blocks"`
	// Waiting is the number of freed blocks that wait for a stream that the free named,
	// or for the end of a capture.
	Waiting int `json:"waiting"`
	// Streams is the number of streams that the pool keeps memory for.
	Streams int `json:"streams"`
	// Arenas is the number of arenas that captures and their graphs keep.
	Arenas int `json:"arenas"`

	// Counted reports whether Options.Statistics is on. The following fields are zero
	// without it.
	Counted bool `json:"counted,omitempty"`

	// PeakRequested and PeakBlocks are the most that were live at once, since New or
	// ResetPeaks.
	PeakRequested int `json:"peakRequested"`
	PeakBlocks    int `json:"peakBlocks"`
	// Allocs and Frees are the calls that succeeded, and AllocatedBytes the sum of
	// the requests.
	Allocs         int `json:"allocs"`
	Frees          int `json:"frees"`
	AllocatedBytes int `json:"allocatedBytes"`
	// Tags are the same by tag, in the order in which the tags were made, without
	// tags that no block had yet.
	Tags []TagStats `json:"tags,omitempty"`
}

// TagStats are counts of the blocks of one tag.
type TagStats struct {
	Tag            Tag `json:"tag"`
	Requested      int `json:"requested"`     // live
	Blocks         int `json:"blocks"`        // live
	PeakRequested  int `json:"peakRequested"` // summed over streams, each at its own peak
	Allocs         int `json:"allocs"`
	AllocatedBytes int `json:"allocatedBytes"`
}

// totals only grow.
type totals struct{ allocs, frees, bytes int }

// statistics are a pool's counts over all streams.
type statistics struct {
	requested, mostRequested atomic.Uint64
	blocks, mostBlocks       atomic.Uint64
}

// raise makes a maximum at least n.
func raise(most *atomic.Uint64, n uint64) {
	for m := most.Load(); n > m && !most.CompareAndSwap(m, n); m = most.Load() {
	}
}

func (s *statistics) allocated(w *watch, h *header) {
	raise(&s.mostRequested, s.requested.Add(h.asked()))
	raise(&s.mostBlocks, s.blocks.Add(1))
	w.totals.allocs++
	w.totals.bytes += int(h.asked())
	for len(w.tags) <= int(h.tag) {
		w.tags = append(w.tags, TagStats{Tag: Tag(len(w.tags))})
	}
	t := &w.tags[h.tag]
	t.Allocs++
	t.AllocatedBytes += int(h.asked())
	t.Blocks++
	t.Requested += int(h.asked())
	t.PeakRequested = max(t.PeakRequested, t.Requested)
}

func (s *statistics) freed(w *watch, h *header) {
	s.requested.Add(-h.asked())
	s.blocks.Add(^uint64(0))
	w.totals.frees++
	t := &w.tags[h.tag]
	t.Blocks--
	t.Requested -= int(h.asked())
}

// ResetPeaks makes the pool's peaks what is there now. Those of tags stay. It is safe for
// concurrent use; a peak that other goroutines reach meanwhile may be lost.
func (p *Pool) ResetPeaks() {
	p.mostHeld.Store(p.reserved.Load())
	if s := p.stats; s != nil {
		s.mostRequested.Store(s.requested.Load())
		s.mostBlocks.Store(s.blocks.Load())
	}
	if c := p.cache.Load(); c != nil {
		(*c).ResetPeaks()
	}
}

// inUse is what a budget shows: the live blocks as they were requested.
func (p *Pool) inUse() uint64 { return uint64(p.Stats().Requested) }

// Stats returns the pool's counts. While other goroutines allocate, they are of
// slightly different moments.
func (p *Pool) Stats() Stats {
	p.mu.Lock()
	defer p.mu.Unlock()
	s := Stats{Serial: p.serial, Name: p.o.Name, Tag: p.o.Tag, Counted: p.stats != nil, Reserved: int(p.reserved.Load()), PeakReserved: int(p.mostHeld.Load()), Limit: int(p.limit.Load()), Arenas: p.arenas,
		Suspended: int(p.suspendedBytesLocked()),
		Allocs:    p.retired.allocs, Frees: p.retired.frees, AllocatedBytes: p.retired.bytes}
	if p.stats != nil {
		s.PeakRequested, s.PeakBlocks = int(p.stats.mostRequested.Load()), int(p.stats.mostBlocks.Load())
	}
	byTag := slices.Clone(p.retiredTags)
	for _, sh := range p.shards {
		sh.mu.Lock()
		s.Requested += int(sh.requested)
		s.Blocks += int(sh.live)
		s.Waiting += sh.waiting.n
		s.Streams++
		if w := sh.watch; w != nil {
			s.Allocs += w.totals.allocs
			s.Frees += w.totals.frees
			s.AllocatedBytes += w.totals.bytes
			byTag = addTags(byTag, w.tags)
		}
		sh.mu.Unlock()
	}
	for _, t := range byTag {
		if t.Allocs > 0 {
			s.Tags = append(s.Tags, t)
		}
	}
	if c := p.cache.Load(); c != nil {
		s.counted((*c).Counts())
	}
	return s
}

// Waited returns how long the requests for a stream have waited for memory that the GPU
// still used, in all. A request counts when its wait ends.
func (p *Pool) Waited(s *cuda.Stream) time.Duration {
	st := core.StreamOf(s)
	if st == nil {
		return 0
	}
	sh, ok := st.Locals.Get(p.local).(*shard)
	if !ok || sh.pool != p {
		return 0
	}
	return time.Duration(sh.waited.Load())
}

// addTags adds counts, by tag.
func addTags(to, from []TagStats) []TagStats {
	for len(to) < len(from) {
		to = append(to, TagStats{Tag: Tag(len(to))})
	}
	for i, t := range from {
		to[i].Requested += t.Requested
		to[i].Blocks += t.Blocks
		to[i].PeakRequested += t.PeakRequested
		to[i].Allocs += t.Allocs
		to[i].AllocatedBytes += t.AllocatedBytes
	}
	return to
}

// Tag says what blocks are for, in statistics and errors. The zero Tag is no tag.
type Tag uint16

// tags are the names, of all pools.
var tags = struct {
	mu    lock.RWMutex[lock.Leaf]
	names []string
}{names: []string{""}}

// NewTag returns the tag of a name, the same each time. Tags are never freed: name the
// parts of a program, not what passes through it. There are 65,535; further names share
// the zero Tag.
func NewTag(name string) Tag {
	tags.mu.Lock()
	defer tags.mu.Unlock()
	at := slices.Index(tags.names, name)
	if at < 0 {
		if len(tags.names) > 1<<16-1 {
			return 0
		}
		at = len(tags.names)
		tags.names = append(tags.names, name)
	}
	return Tag(at)
}

// String returns the tag's name, or the number of a tag that NewTag never returned.
func (t Tag) String() string {
	tags.mu.RLock()
	defer tags.mu.RUnlock()
	if int(t) >= len(tags.names) {
		return fmt.Sprintf("tag %d", uint16(t))
	}
	return tags.names[t]
}

func (t *totals) add(o totals) {
	t.allocs += o.allocs
	t.frees += o.frees
	t.bytes += o.bytes
}
