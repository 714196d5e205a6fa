package pool

import (
	"fmt"
	"path"
	"runtime"
	"slices"
	"strings"
	"time"

	"github.com/cuvmm/cuvmm/cuda"
	"github.com/cuvmm/cuvmm/internal/driver"
	"github.com/cuvmm/cuvmm/internal/errs"
)

// Snapshot is all that a pool knows of its memory, at one time. It is plain
// data, and has a form in JSON.
type Snapshot struct {
	Time   time.Time `json:"time"`
	Device string    `json:"device"`
	Stats  Stats     `json:"stats"`
	// Segments are the pool's mapped memory, by address.
	Segments []Segment `json:"segments"`
	// Idle are the sizes of chunks that are mapped nowhere, in bytes.
	Idle    []int           `json:"idle,omitempty"`
	Streams []StreamSummary `json:"streams"`
	// History is what was kept since StartHistory.
	History History `json:"history,omitempty"`
}

// Segment is a run of chunks that belongs to one stream.
type Segment struct {
	Ptr   cuda.Ptr    `json:"ptr"`
	Bytes int         `json:"bytes"`
	Kind  SegmentKind `json:"kind"`
	// Chunk is the size of its chunks, in bytes.
	Chunk int `json:"chunk"`
	// Slot is the size of each block of a slab; 0 in other segments.
	Slot int `json:"slot,omitempty"`
	// Stream is the raw handle of the stream that the segment belongs to.
	Stream uintptr `json:"stream"`
	// Arena reports whether it is kept for a capture, or for its graph.
	Arena bool `json:"arena,omitempty"`
	// Pinned chunks never move, because peers were granted access to them.
	Pinned int `json:"pinned,omitempty"`
	// Parts are the blocks and the holes between them, by address, without a
	// gap.
	Parts []Part `json:"parts"`
}

// Hole is the most bytes that lie free in one piece.
func (s Segment) Hole() int {
	most := 0
	for _, p := range s.Parts {
		if p.State == Hole {
			most = max(most, p.Bytes)
		}
	}
	return most
}

// SegmentKind says what serves requests from a segment.
type SegmentKind string

// The kinds of segments.
const (
	SlabSegment   SegmentKind = "slab"   // small requests, in slots of one size
	RegionSegment SegmentKind = "region" // larger ones, in chunks that may move
)

// Part is a block, or a hole.
type Part struct {
	Ptr   cuda.Ptr  `json:"ptr"`
	Bytes int       `json:"bytes"` // that it takes
	State PartState `json:"state"`
	// Requested is the requested size of a live block, and Tag what the block is for.
	Requested int `json:"requested,omitempty"`
	Tag       Tag `json:"tag,omitempty"`
	// Stack is the stack that allocated the block, with Options.Track.
	Stack []string `json:"stack,omitempty"`
}

// PartState says what is in a part.
type PartState string

// The states of parts.
const (
	LiveBlock    PartState = "live"
	WaitingBlock PartState = "waiting" // freed; it waits for other streams, or a capture
	Hole         PartState = "hole"
)

// StreamSummary is what the pool keeps for a stream.
type StreamSummary struct {
	Stream    uintptr `json:"stream"`
	Blocks    int     `json:"blocks"`
	Requested int     `json:"requested"`
	Waiting   int     `json:"waiting"`
	// Unpassed reports whether the GPU may still use memory that was freed on the
	// stream, as far as the pool knows, so that only this stream can have it.
	Unpassed bool `json:"unpassed,omitempty"`
	Arena    bool `json:"arena,omitempty"`
}

// MarshalText is the tag's name, for JSON.
func (t Tag) MarshalText() ([]byte, error) { return []byte(t.String()), nil }

// Snapshot describes the pool as it is. While other goroutines allocate, its
// parts are of slightly different moments. It takes time in proportion to the
// blocks, and holds each lock for a bounded number of them, well below a
// millisecond, so that no request waits for all.
func (p *Pool) Snapshot() Snapshot {
	defer p.aside(true)()
	s := Snapshot{Time: time.Now(), Device: p.dev.String(), Stats: p.Stats(), History: p.History()}
	p.mu.Lock()
	for _, h := range p.idle {
		s.Idle = append(s.Idle, int(h.Size))
	}
	p.mu.Unlock()
	for _, sh := range p.all() {
		sh.mu.Lock()
		s.Streams = append(s.Streams, StreamSummary{
			Stream: uintptr(sh.stream.Handle), Blocks: int(sh.live), Requested: int(sh.requested), Waiting: sh.waiting.n,
			Unpassed: sh.clock.Behind(), Arena: sh.arena != nil,
		})
		sh.mu.Unlock()
	}
	r := newSegmentReader(p)
	for _, pl := range *p.places.Load() {
		if pl.reg.kind == mid {
			r.spans(pl.reg)
		} else {
			r.slabs(pl.reg)
		}
	}
	s.Segments = r.segments
	for i := range s.Segments {
		if seg := &s.Segments[i]; !p.moves() {
			seg.Pinned = seg.Bytes / seg.Chunk
		}
	}
	return s
}

func (sh *shard) segment(kind SegmentKind, ptr driver.Ptr, bytes, chunk uint64) Segment {
	return Segment{Ptr: cuda.Ptr(ptr), Bytes: int(bytes), Kind: kind, Chunk: int(chunk), Stream: uintptr(sh.stream.Handle), Arena: sh.arena != nil}
}

func (s *Segment) hole(at driver.Ptr, size uint64) { s.Parts = addHole(s.Parts, at, size) }

// addHole adds free memory, to the hole before it if there is one.
func addHole(parts []Part, at driver.Ptr, size uint64) []Part {
	if size == 0 {
		return parts
	}
	if n := len(parts); n > 0 && parts[n-1].State == Hole {
		parts[n-1].Bytes += int(size)
		return parts
	}
	return append(parts, Part{Ptr: cuda.Ptr(at), Bytes: int(size), State: Hole})
}

// site is the stack that allocated a block.
type site struct {
	pcs [24]uintptr
	n   int
}

func caller() (s site) {
	s.n = runtime.Callers(2, s.pcs[:])
	return s
}

// frames are the callers that are not this package's own.
func (s *site) frames() (of []runtime.Frame) {
	frames := runtime.CallersFrames(s.pcs[:s.n])
	for more := true; more; {
		var f runtime.Frame
		f, more = frames.Next()
		own := strings.HasPrefix(f.Function, "github.com/cuvmm/cuvmm/vmm/pool.") && !strings.HasSuffix(f.File, "_test.go")
		if f.Function != "" && !own && !strings.HasPrefix(f.Function, "runtime.") {
			of = append(of, f)
		}
	}
	return of
}

// Live is a live block.
type Live struct {
	Block Block
	Tag   Tag
	// Stack is the stack that allocated it, the innermost function first, with
	// Options.Track.
	Stack []runtime.Frame
}

// String says what the block is, and where it was allocated: "1 MiB at 0x...
// (weights), allocated at model.go:12".
func (l Live) String() string {
	s := fmt.Sprintf("%s at %v", errs.Bytes(l.Block.bytes), l.Block.ptr)
	if l.Tag != 0 {
		s += fmt.Sprintf(" (%v)", l.Tag)
	}
	if len(l.Stack) > 0 {
		s += fmt.Sprintf(", allocated at %s:%d", path.Base(l.Stack[0].File), l.Stack[0].Line)
	}
	return s
}

// Live lists the live blocks, by address.
func (p *Pool) Live() []Live {
	defer p.aside(true)()
	return p.liveBlocks()
}

func (p *Pool) liveBlocks() []Live {
	var all []Live
	p.each(func(h *header) {
		l := Live{Block: h.block(), Tag: h.tag}
		if w := h.home.shard.watch; w != nil {
			if s, ok := w.sites[h]; ok {
				l.Stack = s.frames()
			}
		}
		all = append(all, l)
	})
	slices.SortFunc(all, func(a, b Live) int {
		if a.Block.ptr < b.Block.ptr {
			return -1
		}
		return 1
	})
	return all
}
