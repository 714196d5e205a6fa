package cuda

import (
	"fmt"
	"slices"
	"unsafe"

	"github.com/cuvmm/cuvmm/internal/core"
	"github.com/cuvmm/cuvmm/internal/driver"
	"github.com/cuvmm/cuvmm/internal/errs"
	"github.com/cuvmm/cuvmm/internal/lock"
)

// Staging goes through slots of this size, and a stream uses at most so many.
// A slot is large enough that the submission costs little beside the copy, and
// there are enough of them that filling one overlaps with the copies of others.
const (
	slotBytes = 1 << 20
	slotCount = 8
)

// ring is a stream's pinned memory for copies from and to Go memory: the
// driver must never keep a pointer to Go's. Each stream has its own, so that a
// stream that stands still holds up no other. Slots are made on demand, and return to
// the pool when the stream closes.
type ring struct {
	stream *core.Stream
	// home is the context of the stream's Device, in which its pinned memory is
	// made: it lives as long as the System, and a borrowed stream's may not.
	home *core.Context
	pool *pinnedPool

	mu    lock.Mutex[lock.Staging]
	slots []*slot
	next  int
}

type slot struct {
	block pinnedBlock
	event driver.Event
	busy  bool // the event was recorded and not waited for
	// unmarked: a copy was submitted, and the event could not be recorded behind it.
	unmarked bool
	held     bool // a download has not emptied it yet
	used     int  // bytes of it that are taken
}

// upload fills slots and submits a copy for each; small uploads share one.
func (r *ring) upload(op string, dst driver.Ptr, src []byte, g core.Guard) (err error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	all := len(src)
	defer func() {
		if err != nil && len(src) < all {
			r.stream.Unsettle() // the pieces before the one that failed
		}
	}()
	for len(src) > 0 {
		sl, err := r.slotFor(op, len(src))
		if err != nil {
			return err
		}
		to := unsafe.Add(sl.block.mem, sl.used)
		n := copy(unsafe.Slice((*byte)(to), slotBytes-sl.used), src)
		if err := r.submit(op, sl, g, func() error {
			res := r.sys().Drv.MemcpyHtoDAsync(r.stream.Ctx.Handle, dst, to, uint64(n), r.stream.Handle)
			if res != driver.Success {
				return r.stream.Ctx.CallError(op, driver.CallMemcpyHtoDAsync, res, r.asked(len(src), "to", dst))
			}
			sl.used += n
			return nil
		}); err != nil {
			return err
		}
		dst, src = dst+driver.Ptr(n), src[n:]
	}
	return nil
}

// asked describes a copy.
func (r *ring) asked(n int, way string, p driver.Ptr) string {
	return fmt.Sprintf("%s %s %#x on stream %#x", errs.Bytes(n), way, uint64(p), uintptr(r.stream.Handle))
}

// submit puts a copy on the stream, and the slot's event behind it. No capture of
// this library begins in between; one that has begun refuses the copy.
func (r *ring) submit(op string, sl *slot, g core.Guard, copied func() error) error {
	if g != nil {
		if err := g.Enter(); err != nil {
			return err
		}
		defer g.Leave()
	}
	return r.stream.Uncaptured(op, func() error {
		if err := copied(); err != nil {
			return err
		}
		return r.record(op, sl)
	})
}

// piece is a part of a download that is on its way into a slot.
type piece struct {
	slot *slot
	to   []byte
}

// empty waits for a piece and copies it to where it belongs.
func (r *ring) empty(op string, p piece) error {
	if err := r.wait(op, p.slot); err != nil {
		return err
	}
	copy(p.to, unsafe.Slice((*byte)(p.slot.block.mem), len(p.to)))
	p.slot.held = false
	return nil
}

// download submits copies into several slots and empties them in order.
func (r *ring) download(op string, dst []byte, src driver.Ptr, g core.Guard) error {
	r.mu.Lock()
	defer r.mu.Unlock()
	var pieces []piece
	defer func() { // after a failure halfway no copy is left on the stream, or it stays known
		for _, p := range pieces {
			if r.wait(op, p.slot) != nil {
				r.stream.Unsettle()
			}
			p.slot.held = false
		}
	}()
	emptyFirst := func() error {
		err := r.empty(op, pieces[0])
		if err == nil {
			pieces = pieces[1:]
		}
		return err
	}
	for len(dst) > 0 {
		if len(pieces) == slotCount {
			if err := emptyFirst(); err != nil {
				return err
			}
		}
		sl, err := r.fresh(op)
		if err != nil && len(pieces) > 0 { // all slots are this copy's
			if err := emptyFirst(); err != nil {
				return err
			}
			continue
		}
		if err != nil {
			return err
		}
		n := min(len(dst), slotBytes)
		sl.used, sl.held = slotBytes, true
		pieces = append(pieces, piece{sl, dst[:n]})
		if err := r.submit(op, sl, g, func() error {
			res := r.sys().Drv.MemcpyDtoHAsync(r.stream.Ctx.Handle, sl.block.mem, src, uint64(n), r.stream.Handle)
			if res != driver.Success {
				return r.stream.Ctx.CallError(op, driver.CallMemcpyDtoHAsync, res, r.asked(len(dst), "from", src))
			}
			return nil
		}); err != nil {
			return err
		}
		dst, src = dst[n:], src+driver.Ptr(n)
	}
	for len(pieces) > 0 {
		if err := emptyFirst(); err != nil {
			return err
		}
	}
	return nil
}

// slotFor returns the slot that uploads fill now, or the next if that is full, or too small for
// an upload that would fit a whole one.
func (r *ring) slotFor(op string, n int) (*slot, error) {
	if len(r.slots) > 0 {
		sl := r.slots[(r.next+len(r.slots)-1)%len(r.slots)]
		if left := slotBytes - sl.used; left >= min(n, slotBytes) {
			return sl, nil
		}
	}
	return r.fresh(op)
}

// fresh returns the next slot, empty: one that the stream has passed, a new one, or the oldest
// after waiting for it.
func (r *ring) fresh(op string) (*slot, error) {
	if len(r.slots) < slotCount && (len(r.slots) == 0 || !r.passed(r.slots[r.next])) {
		sl, err := r.add(op)
		if err == nil || len(r.slots) == 0 || r.slots[r.next].held {
			return sl, err
		}
		// Without more memory it goes on with what there is.
	}
	sl := r.slots[r.next]
	r.next = (r.next + 1) % len(r.slots)
	if err := r.wait(op, sl); err != nil {
		return nil, err
	}
	sl.used = 0
	return sl, nil
}

// add makes a slot and puts it where it is the newest.
func (r *ring) add(op string) (*slot, error) {
	block, err := r.pool.get(op, r.home, slotBytes)
	if err != nil {
		return nil, err
	}
	e, res := r.stream.Ctx.Event()
	if res != driver.Success {
		r.pool.put(block)
		return nil, r.stream.Ctx.CallError(op, driver.CallEventCreate, res, "")
	}
	sl := &slot{block: block, event: e}
	r.slots = append(r.slots[:r.next], append([]*slot{sl}, r.slots[r.next:]...)...)
	r.next = (r.next + 1) % len(r.slots)
	return sl, nil
}

// record marks the end of a slot's submitted copies. After an error their end is unknown, and
// the stream counts as unsettled.
func (r *ring) record(op string, sl *slot) error {
	ctx := r.stream.Ctx
	recorded := r.sys().Drv.EventRecord(ctx.Handle, sl.event, r.stream.Handle)
	capturing, asked := r.stream.Capturing()
	sl.busy = recorded == driver.Success && asked == driver.Success && !capturing
	sl.unmarked = !sl.busy
	if sl.busy {
		return nil
	}
	r.stream.Unsettle()
	if capturing || asked != driver.Success {
		r.lose(sl)
	}
	switch {
	case recorded != driver.Success:
		return ctx.CallError(op, driver.CallEventRecord, recorded, "")
	case asked != driver.Success:
		return ctx.CallError(op, driver.CallStreamIsCapturing, asked, "the end of a staged copy")
	}
	return errs.New(errs.Failure{Op: op, Kind: errs.Capturing,
		Asked: fmt.Sprintf("a capture began on stream %#x during a copy, which may be in the graph now", uintptr(r.stream.Handle)),
		Hint:  "throw the graph away, and let one goroutine at a time use a stream that is to capture"})
}

// lose takes a slot out of the ring for good, because its copy may be in the graph of a
// capture that another goroutine has begun: its memory is never used again, and its event
// never queried, which would end the capture.
func (r *ring) lose(sl *slot) {
	sl.unmarked = false
	r.stream.Ctx.Destroy(sl.event)
	r.pool.keep(sl.block)
	i := slices.Index(r.slots, sl)
	r.slots = slices.Delete(r.slots, i, i+1)
	if i < r.next {
		r.next--
	}
	if r.next == len(r.slots) {
		r.next = 0
	}
}

func (r *ring) passed(sl *slot) bool {
	if sl.held || sl.unmarked {
		return false
	}
	if sl.busy && r.stream.Ctx.Observe(r.sys().Drv.EventQuery(r.stream.Ctx.Handle, sl.event)) == driver.Success {
		sl.busy = false
	}
	return !sl.busy
}

// wait waits for a slot's copies. If the event is not behind them, it is recorded first.
func (r *ring) wait(op string, sl *slot) error {
	if sl.unmarked {
		if err := r.stream.Uncaptured(op, func() error { return r.record(op, sl) }); err != nil {
			return err
		}
	}
	if !sl.busy {
		return nil
	}
	if res := r.sys().Drv.EventSynchronize(r.stream.Ctx.Handle, sl.event); res != driver.Success {
		return r.stream.Ctx.CallError(op, driver.CallEventSynchronize, res, "a staged copy")
	}
	sl.busy = false
	return nil
}

// close gives the slots back. The stream's work has ended.
func (r *ring) close() {
	r.mu.Lock()
	defer r.mu.Unlock()
	lost := r.stream.Ctx.Lost() != driver.Success
	for _, sl := range r.slots {
		r.stream.Ctx.Recycle(sl.event)
		if lost { // its work was not waited for
			r.pool.keep(sl.block)
			continue
		}
		r.pool.put(sl.block)
	}
	r.slots, r.next = nil, 0
}

func (r *ring) sys() *core.System { return r.stream.Ctx.System() }
