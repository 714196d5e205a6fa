package trace

import (
	"fmt"
	"unicode/utf8"

	"github.com/cuvmm/cuvmm/internal/errs"
)

// What a trace can hold at most, so that a decoder refuses nonsense early.
const (
	MaxBytes   = 1 << 47 // of one block
	MaxStreams = 1024
	MaxTags    = 1024
	MaxText    = 255 // bytes of a name or a tag
)

// Kind says what an operation does.
type Kind uint8

const (
	// Alloc allocates the next block. Blocks are numbered from 0 in the order of
	// their allocation.
	Alloc Kind = iota
	// Free frees a block, in the order of its stream and of the streams that use
	// it.
	Free
	// Use says that a stream other than the block's own has work on it.
	Use
	// Sync is where the program waits for all of its streams, as at the end of
	// a training step.
	Sync
)

func (k Kind) String() string {
	return errs.Name("Kind", k, []string{Alloc: "alloc", Free: "free", Use: "use", Sync: "sync"})
}

// MarshalText is String, for JSON.
func (k Kind) MarshalText() ([]byte, error) { return []byte(k.String()), nil }

// Op is one operation. Fields that its kind does not name are zero.
type Op struct {
	Kind   Kind
	Tag    uint32 // Alloc: index into Trace.Tags
	Stream uint32 // Alloc, Use
	ID     uint32 // Alloc, Free, Use: the block
	Bytes  int    // Alloc: may be zero, at most MaxBytes
}

// Trace is a list of operations. It is plain data: share it between goroutines
// once it no longer changes.
type Trace struct {
	// Name says where it comes from, in at most 255 bytes of UTF-8.
	Name string
	// Streams is how many streams the operations use, numbered from 0; at
	// least 1.
	Streams int
	// Tags name what blocks are for. No tag appears twice.
	Tags []string
	Ops  []Op
}

// Summary is what can be said of a trace without an allocator.
type Summary struct {
	Allocs, Frees, Uses, Syncs int
	// PeakBytes is the most that was ever requested at once: no allocator can
	// reserve less. PeakBlocks is the most blocks that lived at once.
	PeakBytes  int
	PeakBlocks int
	// LiveBytes and LiveBlocks are what is never given back.
	LiveBytes  int
	LiveBlocks int
}

// maxLive bounds the bytes that live at once, so that sums of them fit into an int.
const maxLive = 1 << 60

// Check returns an error that names the first operation which makes no sense:
// a block out of turn, given back twice, or used after that, a stream or a tag
// that the trace does not have. Every trace that this package decodes or
// generates passes.
func (t *Trace) Check() error {
	_, err := t.walk()
	return err
}

// Summary counts the operations. It returns the error of Check for a trace that
// makes no sense.
func (t *Trace) Summary() (Summary, error) { return t.walk() }

func (t *Trace) walk() (Summary, error) {
	var s Summary
	if err := t.checkHeader(); err != nil {
		return s, err
	}
	const gone = -1
	var blocks []int // the bytes of each, or gone
	for i, op := range t.Ops {
		if err := t.checkOp(op, len(blocks)); err != nil {
			return s, fmt.Errorf("operation %d: %w", i, err)
		}
		if op.Kind == Alloc {
			blocks = append(blocks, op.Bytes)
			s.Allocs++
			s.LiveBlocks++
			if s.LiveBytes += op.Bytes; s.LiveBytes > maxLive {
				return s, fmt.Errorf("operation %d: blocks of more than %d bytes at once", i, maxLive)
			}
			s.PeakBytes = max(s.PeakBytes, s.LiveBytes)
			s.PeakBlocks = max(s.PeakBlocks, s.LiveBlocks)
			continue
		}
		if op.Kind == Sync {
			s.Syncs++
			continue
		}
		if blocks[op.ID] == gone {
			return s, fmt.Errorf("operation %d: %v of block %d, which was given back before", i, op.Kind, op.ID)
		}
		if op.Kind == Use {
			s.Uses++
			continue
		}
		s.Frees++
		s.LiveBlocks--
		s.LiveBytes -= blocks[op.ID]
		blocks[op.ID] = gone
	}
	return s, nil
}

func (t *Trace) checkHeader() error {
	if err := checkText("name", t.Name); err != nil {
		return err
	}
	if t.Streams < 1 || t.Streams > MaxStreams {
		return fmt.Errorf("a trace of %d streams: it has 1 to %d", t.Streams, MaxStreams)
	}
	if len(t.Tags) > MaxTags {
		return fmt.Errorf("a trace with %d tags: it has at most %d", len(t.Tags), MaxTags)
	}
	seen := make(map[string]bool, len(t.Tags))
	for _, tag := range t.Tags {
		if err := checkText("tag", tag); err != nil {
			return err
		}
		if seen[tag] {
			return fmt.Errorf("tag %q twice: each stands once", tag)
		}
		seen[tag] = true
	}
	return nil
}

func checkText(what, s string) error {
	if len(s) > MaxText || !utf8.ValidString(s) {
		return fmt.Errorf("%s %.40q: it is UTF-8 of at most %d bytes", what, s, MaxText)
	}
	return nil
}

// checkOp checks what can be told from one operation, when taken blocks were
// numbered so far.
func (t *Trace) checkOp(op Op, taken int) error {
	want := Op{Kind: op.Kind}
	switch op.Kind {
	case Alloc:
		want = op
		switch {
		case uint64(op.ID) != uint64(taken):
			return fmt.Errorf("alloc of block %d: the next one is %d", op.ID, taken)
		case op.Bytes < 0 || op.Bytes > MaxBytes:
			return fmt.Errorf("alloc of %d bytes: at least 0, at most %d", op.Bytes, MaxBytes)
		case int(op.Tag) >= len(t.Tags):
			return fmt.Errorf("alloc with tag %d of %d", op.Tag, len(t.Tags))
		}
	case Free:
		want.ID = op.ID
	case Use:
		want.ID, want.Stream = op.ID, op.Stream
	case Sync:
	default:
		return fmt.Errorf("unknown kind %d", op.Kind)
	}
	switch {
	case op != want:
		return fmt.Errorf("%v with fields that it does not have: %+v", op.Kind, op)
	case int(op.Stream) >= t.Streams:
		return fmt.Errorf("%v on stream %d of %d", op.Kind, op.Stream, t.Streams)
	case (op.Kind == Free || op.Kind == Use) && uint64(op.ID) >= uint64(taken):
		return fmt.Errorf("%v of block %d, of which %d were taken", op.Kind, op.ID, taken)
	}
	return nil
}
