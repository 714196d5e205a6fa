package publish

import (
	"crypto/rand"
	"encoding/binary"
	"math"

	"github.com/cuvmm/cuvmm/internal/errs"
)

// view is what a publication shows at one moment.
type view struct {
	// generation counts its changes from 1 on; 0 shows nothing yet.
	generation uint64
	// ordered is the generation of the last announcement: the bytes are complete
	// when the words have reached it.
	ordered uint64
	length  uint64 // elements
	chunks  []chunk
	// away: the memory is suspended, so that nothing is shown.
	away bool
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

func sizesOf(chunks []chunk) []int {
	all := make([]int, len(chunks))
	for i, c := range chunks {
		all[i] = int(c.size)
	}
	return all
}

// common counts the leading chunks that two lists share.
func common(a, b []chunk) int {
	n := 0
	for n < len(a) && n < len(b) && a[n] == b[n] {
		n++
	}
	return n
}

// progress tracks one follower on the publisher's side. It holds no memory and sends
// nothing: next returns the update to send, and acknowledged takes the follower's
// acknowledgement. It is always in one of three states:
//
//	state    means                                    leaves it by
//	level    told is the publication's generation     a change of the publication: behind
//	behind   the publication has a later generation   next: waiting
//	waiting  an update is in flight (out is not nil)  acknowledged: level or behind
//
// What next returns, in this order:
//
//	the follower has chunks that are no longer shown,  keep what is still shown, and no more than
//	or more than was shown at some time since          the least length that was shown since
//	its room does not hold all chunks                  over, and nothing else
//	otherwise                                          the next chunks; with the last of them the length
//
// So a follower always gives memory back before it gets more, chunks never change
// places, and a slow follower skips generations. A follower that refuses an update is
// level without having what the others have, and only the next generation retries: its
// failure affects no other follower.
type progress struct {
	unit uint64 // bytes of an element
	room uint64 // bytes that the follower can map

	has    []chunk // mapped by the follower, or about to be while waiting; never changed in place
	length uint64  // the follower's
	told   uint64  // the generation that the follower has, or has refused
	serial uint64  // of the last update
	low    uint64  // the least length shown since the last update was made
	out    *update // in flight
	sent   []chunk // what out adds; never changed in place
	reason string  // why the follower refused the last update, or was over
}

func newProgress(unit, room uint64) *progress {
	return &progress{unit: unit, room: room, low: math.MaxUint64}
}

// resume begins with the chunks of a follower that comes back. Of chunks that are not
// published only the identity is known.
func (f *progress) resume(p possession, v view) {
	for i, id := range p.chunks {
		c := chunk{id: id}
		if i < len(v.chunks) && v.chunks[i].id == id {
			c = v.chunks[i]
		}
		f.has = append(f.has, c)
	}
	f.length, f.told = p.length, p.generation
}

// level reports whether the follower has, or has refused, what is shown.
func (f *progress) level(v view) bool { return f.out == nil && f.told >= v.generation }

// lower notes that less is shown.
func (f *progress) lower(length uint64) { f.low = min(f.low, length) }

// next returns the next update, with at most batch chunks, and the chunks that it adds;
// nil if there is nothing to send.
func (f *progress) next(v view, batch int) (*update, []chunk) {
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
	if v.away {
		u.state = Suspended
	}
	f.serial, f.low, f.out, f.sent = u.serial, math.MaxUint64, u, add
	return u, add
}

// acknowledged takes the acknowledgement of the update in flight. One that fits no
// update violates the protocol.
func (f *progress) acknowledged(d *done) error {
	u := f.out
	if u == nil || d.serial != u.serial {
		return errs.Violation("an acknowledgement of update %d, where %d is the last that was sent", d.serial, f.serial)
	}
	before, after := len(f.has), int(u.keep)+len(u.chunks)
	if d.status != statusOK && int(d.chunks) != before || d.status == statusOK && int(d.chunks) != after {
		return errs.Violation("an acknowledgement of %d chunks, where the follower had %d and was to have %d", d.chunks, before, after)
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

// pinned returns the bytes that the follower may still have mapped and that are no
// longer shown.
func (f *progress) pinned(v view) uint64 { return pinned(f.has, f.sent, v.chunks) }

// pinned returns the bytes of has, and of sent behind it, that are not in shown.
func pinned(has, sent, shown []chunk) uint64 {
	same := common(has, shown)
	if same < len(has) {
		return sizeOf(has[same:]) + sizeOf(sent)
	}
	return sizeOf(sent[common(sent, shown[same:]):])
}
