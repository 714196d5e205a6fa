package bulk

import (
	"sort"

	"github.com/cuvmm/cuvmm/internal/driver"
)

// plan is segments in the order of the bytes that they hold. Neighbors are joined, so that
// many small segments side by side are few copies.
type plan struct {
	segments []Segment
	starts   []uint64 // of each segment, in the stream of bytes
	bytes    uint64
}

func newPlan(segments []Segment) *plan {
	p := &plan{}
	for _, s := range segments {
		if s.Bytes == 0 {
			continue
		}
		if n := len(p.segments); n > 0 && p.segments[n-1].Ptr+driver.Ptr(p.segments[n-1].Bytes) == s.Ptr {
			p.segments[n-1].Bytes += s.Bytes
		} else {
			p.segments, p.starts = append(p.segments, s), append(p.starts, p.bytes)
		}
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
