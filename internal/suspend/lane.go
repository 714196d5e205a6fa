package suspend

import (
	"sync"

	"github.com/cuvmm/cuvmm/cuda"
	"github.com/cuvmm/cuvmm/internal/bulk"
	"github.com/cuvmm/cuvmm/internal/driver"
)

// A lane is the chunks whose bytes one device copies, in that order. Two goroutines go along it:
// one copies, and one unmaps and releases what was copied, or maps what is to be copied. Each
// driver call for a chunk takes some ten microseconds and a copy of 32 MiB six hundred, so what
// is beside the copies costs nothing, and before or after them some hundredths of the whole.
type lane struct {
	groups []group
	runs   []bulk.Run
	end    uint64 // of the last run, in its backing
	bytes  uint64 // that are copied
	// reached is how many of the bytes have been copied, or may be.
	reached *gate
}

// group is chunks of a lane that driver calls take together, up to some byte of the lane.
type group struct {
	chunks []*chunk
	end    uint64
}

// A group ends with the chunk that makes it so large. A run of chunks is unmapped faster than they
// are one by one, and what is copied next waits for its whole group.
const (
	groupBytes  = 128 << 20
	groupChunks = 16
)

// lanes returns the lanes of chunks, whose mapping at is what they are copied through.
func lanes(chunks []*chunk) (all []*lane) {
	byDevice := map[*cuda.Device]*lane{}
	for _, c := range chunks {
		dev := c.first.m.Device()
		if c.kept != nil {
			dev = c.kept.dev
		}
		l := byDevice[dev]
		if l == nil {
			l = &lane{reached: newGate()}
			byDevice[dev] = l
			all = append(all, l)
		}
		l.add(c)
	}
	return all
}

func (l *lane) add(c *chunk) {
	if c.kept != nil {
		n := len(l.runs)
		if n == 0 || l.runs[n-1].Backing != c.kept.backing || l.end != c.off {
			l.runs = append(l.runs, bulk.Run{Backing: c.kept.backing, Offset: c.off})
			n++
		}
		r := &l.runs[n-1]
		for _, p := range c.parts {
			r.Segments = append(r.Segments, bulk.Segment{Ptr: c.at.Ptr() + driver.Ptr(p.off), Bytes: p.size})
		}
		l.end = c.off + c.bytes()
		l.bytes += c.bytes()
	}
	n := len(l.groups)
	if n == 0 || l.groups[n-1].full() {
		l.groups = append(l.groups, group{})
		n++
	}
	g := &l.groups[n-1]
	g.chunks, g.end = append(g.chunks, c), l.bytes
}

// whole returns all chunks as one group.
func (l *lane) whole() (g group) {
	for _, part := range l.groups {
		g.chunks = append(g.chunks, part.chunks...)
	}
	g.end = l.bytes
	return g
}

func (g *group) full() bool {
	var bytes uint64
	for _, c := range g.chunks {
		bytes += c.size
	}
	return bytes >= groupBytes || len(g.chunks) >= groupChunks
}

// gate holds one goroutine up until another has come so far.
type gate struct {
	mu   sync.Mutex
	more sync.Cond
	n    uint64
	err  error
}

func newGate() *gate {
	g := new(gate)
	g.more.L = &g.mu
	return g
}

// open lets the other pass up to n.
func (g *gate) open(n uint64) {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.n = max(g.n, n)
	g.more.Broadcast()
}

// shut says why it is not opened any further.
func (g *gate) shut(err error) {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.err = err
	g.more.Broadcast()
}

// wait returns once the gate is open up to n, or the error with which it was shut before.
func (g *gate) wait(n uint64) error {
	g.mu.Lock()
	defer g.mu.Unlock()
	for g.n < n && g.err == nil {
		g.more.Wait()
	}
	if g.n >= n {
		return nil
	}
	return g.err
}
