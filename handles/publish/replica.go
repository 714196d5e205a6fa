package publish

import (
	"fmt"

	"github.com/cuvmm/cuvmm/handles"
	"github.com/cuvmm/cuvmm/handles/peer"
	"github.com/cuvmm/cuvmm/internal/errs"
)

// lastGeneration is the last that a publication can have. The value that ends all
// waits for generations is larger.
const lastGeneration = 1<<62 - 1

// replica tracks the publication on the follower's side. It holds no memory: take
// checks an update before any of it is carried out, and finish notes the outcome. It is
// always in one of two states:
//
//	state  means                          leaves it by
//	idle   every update is acknowledged   take: busy
//	busy   an update is being carried out finish: idle; take again: a violation
//
// An update violates the protocol unless its serial is the next, its generation is
// later, and it either takes chunks or length away, or adds chunks that the device can
// have and that fit, or declares that they do not fit.
type replica struct {
	unit        uint64 // bytes of an element
	granularity uint64
	room        uint64 // bytes of address space
	most        int    // chunks

	chunks     []chunk
	state      State
	bytes      uint64
	length     uint64
	generation uint64
	serial     uint64
	busy       *update
}

// less reports whether the update takes something away.
func (t *replica) less(u *update) bool {
	return !u.over && (int(u.keep) < len(t.chunks) || len(u.chunks) == 0 && u.length < t.length)
}

// apply checks an update and begins it.
func (t *replica) apply(u *update) error {
	switch {
	case t.busy != nil:
		return errs.Violation("update %d before update %d was acknowledged", u.serial, t.serial)
	case u.serial != t.serial+1:
		return errs.Violation("update %d, where %d is the next", u.serial, t.serial+1)
	case u.generation <= t.generation || u.generation > lastGeneration:
		return errs.Violation("generation %d after generation %d", u.generation, t.generation)
	case u.ordered > u.generation:
		return errs.Violation("generation %d is ordered behind the later %d", u.generation, u.ordered)
	case uint64(u.keep) > uint64(len(t.chunks)):
		return errs.Violation("an update that keeps %d of %d chunks", u.keep, len(t.chunks))
	case int(u.keep) < len(t.chunks) && len(u.chunks) > 0:
		return errs.Violation("an update that takes chunks away and adds others")
	case u.over && (int(u.keep) != len(t.chunks) || len(u.chunks) > 0 || !u.last):
		return errs.Violation("an update that is beyond the room and not alone")
	}
	if err := t.fits(u); err != nil {
		return err
	}
	t.serial, t.busy = u.serial, u
	return nil
}

// fits checks the sizes and the length.
func (t *replica) fits(u *update) error {
	if len(u.chunks) > t.most-int(u.keep) {
		return errs.Peer(errs.OpReceive, peer.ErrTooLarge, fmt.Sprintf("%d chunks, where %d is the most", int(u.keep)+len(u.chunks), t.most),
			"publish memory in larger chunks, or raise the follower's limit")
	}
	var bytes uint64
	for _, c := range t.chunks[:u.keep] {
		bytes += c.size
	}
	before := bytes
	for i, c := range u.chunks {
		switch c := c.size; {
		case c == 0 || c%t.granularity != 0:
			return errs.Peer(errs.OpReceive, handles.ErrSizeMismatch, fmt.Sprintf("chunk %d has %s, which is no multiple of %s", int(u.keep)+i, errs.Bytes(c), errs.Bytes(t.granularity)),
				"no memory of this device has that size: the publisher declared it wrong")
		case c > t.room-bytes:
			return errs.Peer(errs.OpReceive, peer.ErrTooLarge, fmt.Sprintf("chunks of more than %s", errs.Bytes(t.room)), "the publisher was told of that room")
		}
		bytes += c.size
	}
	switch less := t.less(u); {
	case u.over:
		return nil
	case less && (u.length > t.length || u.length > before/t.unit):
		return errs.Violation("an update that takes away and leaves %d of %d elements in %d bytes", u.length, t.length, before)
	case u.last && !less && u.length < t.length:
		return errs.Violation("an update that adds and leaves %d of %d elements", u.length, t.length)
	case u.last && u.length > bytes/t.unit:
		return errs.Violation("an update to %d elements in %d bytes", u.length, bytes)
	}
	return nil
}

// finish ends the update and returns its acknowledgement. failed is the reason why it
// was not carried out, or nil.
func (t *replica) finish(to token, failed error) *done {
	u := t.busy
	t.busy = nil
	d := &done{token: to, serial: u.serial, status: statusOK}
	switch less := t.less(u); {
	case failed != nil:
		d.status, d.reason = statusFailed, failed.Error()
	case u.over:
	default:
		if less || u.last {
			t.length = u.length
		}
		t.chunks = append(t.chunks[:u.keep:u.keep], u.chunks...)
	}
	if failed != nil || u.last {
		t.generation, t.state = u.generation, u.state
	}
	t.bytes = sizeOf(t.chunks)
	d.chunks = uint32(len(t.chunks))
	return d
}
