package publish

import (
	"crypto/rand"
	"encoding/binary"
	"math"

	"github.com/cuvmm/cuvmm/internal/peererr"
)

// view is what a publication shows at one moment.
type view struct {
	// generation counts its changes from 1 on; 0 shows nothing yet.
	generation uint64
	// ordered is the generation of the last announcement: what the words must
	// have reached before the bytes are there.
	ordered uint64
	length  uint64 // elements
	chunks  []chunk
}

// chunk is a piece of memory. Its identity is random, drawn when it is published
// first, and stays when another process takes the publication over: no two pieces of
// memory have the same, whichever process published them.
type chunk struct{ id, size uint64 }

func newChunk(size uint64) chunk {
	var id [8]byte
	_, _ = rand.Read(id[:]) // never fails
	return chunk{binary.LittleEndian.Uint64(id[:]), size}
}

func sizeOf(chunks []chunk) (bytes uint64) {
	for _, c := range chunks {
		bytes += c.size
	}
	return bytes
}

func sizesOf(chunks []chunk) []uint64 {
	all := make([]uint64, len(chunks))
	for i, c := range chunks {
		all[i] = c.size
	}
	return all
}

// common is how many of the first chunks of two lists are the same.
func common(a, b []chunk) int {
	n := 0
	for n < len(a) && n < len(b) && a[n] == b[n] {
		n++
	}
	return n
}

// feed is what a publisher knows of one follower. It holds no memory and says
// nothing itself: next is what is to be said, and took hears the answer. It is
// always in one of three states:
//
//	state   means                                     leaves it by
//	level   told is the publication's generation      a change of the publication: behind
//	behind  the publication has a later generation    next: asked
//	asked   an update is out (out is not nil)         took: level or behind
//
// What next says, in this order:
//
//	the follower has chunks that are no longer shown,  keep what is still shown, and no more than
//	or more than was shown at some time since          the least length that was shown since
//	its room does not hold all chunks                  over, and nothing else
//	otherwise                                          the next chunks; with the last of them the length
//
// So a follower always gives back before it gets, chunks never change places,
// and one that is slow misses what was between. After an answer that refuses it
// is level without having what the others have, and only the next generation
// tries again: its failure is its own.
type feed struct {
	unit uint64 // bytes of an element
	room uint64 // bytes that the follower can map

	has    []chunk // what the follower has mapped, and may have while asked
	length uint64  // that the follower is at
	told   uint64  // generation that the follower is at, or has refused
	serial uint64  // of the last update
	low    uint64  // the least length shown since the last update was made
	out    *update
	sent   []chunk // what out adds
	reason string  // why the follower refused the last update, or was over
}

func newFeed(unit, room uint64) *feed { return &feed{unit: unit, room: room, low: math.MaxUint64} }

// returns has the feed begin with what a follower that comes back has. Chunks that are
// not published are known by their identity alone.
func (f *feed) returns(p possession, v view) {
	for i, id := range p.chunks {
		c := chunk{id: id}
		if i < len(v.chunks) && v.chunks[i].id == id {
			c = v.chunks[i]
		}
		f.has = append(f.has, c)
	}
	f.length, f.told = p.length, p.generation
}

// lower hears that less is shown.
func (f *feed) lower(length uint64) { f.low = min(f.low, length) }

// next is the next update, and the chunks that it adds; nil where nothing is to
// be said. It brings at most batch chunks.
func (f *feed) next(v view, batch int) (*update, []chunk) {
	if f.out != nil || f.told >= v.generation {
		return nil, nil
	}
	keep := common(f.has, v.chunks)
	low := min(f.low, v.length)
	u := &update{serial: f.serial + 1, generation: v.generation, state: Live, ordered: v.ordered, length: v.length, keep: uint32(keep), last: true}
	var add []chunk
	switch {
	case keep < len(f.has) || low < f.length:
		u.length = min(low, f.length, sizeOf(f.has[:keep])/f.unit)
		u.last = u.length == v.length && keep == len(v.chunks)
	case sizeOf(v.chunks) > f.room:
		u.over = true
	default:
		add = v.chunks[keep:]
		if len(add) > batch {
			add, u.last = add[:batch], false
		}
		u.chunks = add
	}
	f.serial, f.low, f.out, f.sent = u.serial, math.MaxUint64, u, add
	return u, add
}

// took hears the answer to an update. An answer that fits no update is a
// violation of the protocol.
func (f *feed) took(d *done) error {
	u := f.out
	if u == nil || d.serial != u.serial {
		return peererr.Violation("an answer to update %d, where %d is the last one that was sent", d.serial, f.serial)
	}
	before, after := len(f.has), int(u.keep)+len(u.chunks)
	if d.status != statusOK && int(d.chunks) != before || d.status == statusOK && int(d.chunks) != after {
		return peererr.Violation("an answer that names %d chunks, where the follower had %d and was to have %d", d.chunks, before, after)
	}
	sent := f.sent
	f.out, f.sent, f.reason = nil, nil, ""
	if d.status != statusOK {
		f.told, f.reason = u.generation, d.reason
		return nil
	}
	shorter := int(u.keep) < before || u.length < f.length
	f.has = append(f.has[:u.keep:u.keep], sent...)
	switch {
	case u.over:
		f.told, f.reason = u.generation, "its room is too small"
	case u.last:
		f.told, f.length = u.generation, u.length
	case shorter:
		f.length = u.length
	}
	return nil
}

// pinned is how many bytes the follower may still have mapped that are no
// longer shown.
func (f *feed) pinned(v view) uint64 {
	all := f.has
	if len(f.sent) > 0 {
		all = append(append([]chunk(nil), f.has...), f.sent...)
	}
	return sizeOf(all[common(all, v.chunks):])
}
