package inspect

import (
	"strconv"
	"unicode/utf8"

	"github.com/cuvmm/cuvmm/vmm/pool"
)

func (t *snapshotReader) pool(device int, p pool.Snapshot) {
	to := counts(device, p.Stats)
	for _, bytes := range p.Idle {
		to.Idle += bytes
	}
	for _, s := range p.Segments {
		to.Segments = append(to.Segments, t.segment(s))
	}
	for _, s := range p.Streams {
		to.Streams = append(to.Streams, Stream{Stream: Address(s.Stream), Blocks: s.Blocks, Requested: s.Requested, Waiting: s.Waiting, Arena: s.Arena})
	}
	for _, e := range p.History {
		to.History = append(to.History, Event{Op: e.Op.String(), Time: e.Time, Ptr: Address(e.Ptr), Bytes: e.Bytes,
			Stream: Address(e.Stream), Tag: label(e.Tag), Stack: t.text(e.Stack)})
	}
	t.s.Pools = append(t.s.Pools, to)
}

func (t *snapshotReader) segment(s pool.Segment) Segment {
	to := Segment{Ptr: Address(s.Ptr), Bytes: s.Bytes, Kind: string(s.Kind), Chunk: s.Chunk, Slot: s.Slot,
		Stream: Address(s.Stream), Arena: s.Arena, Pinned: s.Pinned}
	blocks := 0
	for _, p := range s.Parts {
		if p.State != pool.Hole {
			blocks++
		}
	}
	to.Blocks = make([]Block, 0, blocks)
	for _, p := range s.Parts {
		if p.State != pool.Hole {
			to.Blocks = append(to.Blocks, Block{Offset: int(p.Ptr - s.Ptr), Bytes: p.Bytes, Requested: p.Requested,
				Waiting: p.State == pool.WaitingBlock, Tag: label(p.Tag), Stack: t.text(p.Stack)})
		}
	}
	return to
}

// label returns a tag's name as text: what reads snapshots takes UTF-8 alone.
func label(t pool.Tag) string {
	name := t.String()
	if !utf8.ValidString(name) {
		return strconv.Quote(name) // so that two tags have different labels
	}
	return name
}

// counts are the numbers of a pool, which take no walk.
func counts(device int, s pool.Stats) Pool {
	to := Pool{Serial: s.Serial, Name: s.Name, Tag: string(s.Tag), Device: device, Reserved: s.Reserved, Requested: s.Requested, Blocks: s.Blocks, Limit: s.Limit,
		Peak: s.PeakReserved, Suspended: s.Suspended, Waiting: s.Waiting, Arenas: s.Arenas,
		Counted: s.Counted, Allocs: s.Allocs, Frees: s.Frees, AllocatedBytes: s.AllocatedBytes}
	for _, tag := range s.Tags {
		to.Tags = append(to.Tags, Use{Name: label(tag.Tag), Bytes: tag.Requested, Count: tag.Blocks})
	}
	return to
}
