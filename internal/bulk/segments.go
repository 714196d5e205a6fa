package bulk

import (
	"sort"

	"github.com/cuvmm/cuvmm/internal/driver"
)

// WorthJoining is a gap that takes as long to copy as another copy takes to submit.
const WorthJoining = 64 << 10

// Join joins segments that follow each other in device memory with at most so many bytes
// between them. The gaps are copied like the rest, out and in: they must be mapped, and hold
// nothing that may not be overwritten with what it was.
func Join(segments []Segment, gap uint64) []Segment {
	joined := make([]Segment, 0, len(segments))
	for _, s := range segments {
		if s.Bytes == 0 {
			continue
		}
		if n := len(joined); n > 0 {
			last := &joined[n-1]
			if end := last.Ptr + driver.Ptr(last.Bytes); s.Ptr >= end && uint64(s.Ptr-end) <= gap {
				last.Bytes = uint64(s.Ptr-last.Ptr) + s.Bytes
				continue
			}
		}
		joined = append(joined, s)
	}
	return joined
}

// plan is segments in the order of the bytes that they hold. Neighbors are joined, so that
// many small segments side by side are few copies.
type plan struct {
	segments []Segment
	starts   []uint64 // of each segment, in the stream of bytes
	bytes    uint64
}

func newPlan(segments []Segment) *plan {
	p := &plan{segments: Join(segments, 0)}
	p.starts = make([]uint64, len(p.segments))
	for i, s := range p.segments {
		p.starts[i] = p.bytes
		p.bytes += s.Bytes
	}
	return p
}

// each passes the device memory of n bytes from offset on to f, as few runs as there are, with
// the place of each run within the n bytes.
func (p *plan) each(offset, n uint64, f func(dev driver.Ptr, at, n uint64) error) error {
	i := sort.Search(len(p.starts), func(i int) bool { return p.starts[i] > offset }) - 1
	for at := uint64(0); at < n; i++ {
		s, in := p.segments[i], offset+at-p.starts[i]
		run := min(s.Bytes-in, n-at)
		if err := f(s.Ptr+driver.Ptr(in), at, run); err != nil {
			return err
		}
		at += run
	}
	return nil
}
