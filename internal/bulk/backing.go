package bulk

import (
	"context"
	"fmt"
	"math/bits"
	"time"

	"github.com/cuvmm/cuvmm/internal/core"
	"github.com/cuvmm/cuvmm/internal/driver"
	"github.com/cuvmm/cuvmm/internal/errs"
	"github.com/cuvmm/cuvmm/internal/life"
	"github.com/cuvmm/cuvmm/internal/osmem"
)

// mostInFlight is how many groups of copies a backing's operation has in flight: two and a
// half milliseconds of the link's time, which a goroutine may well be off its processor.
const mostInFlight = 32

// mostOut is how many bytes an operation that copies pinned memory to the host has in flight before
// it submits another piece. There, and not on the way to the device, a small copy of another stream waits for
// all that is in flight, twice over: with two pieces 0.17 ms, with 32 of them 5 ms (measured), at
// the same rate.
const mostOut = pieceBytes

// Backing is host memory that keeps the bytes of device memory. It is for one operation at a
// time.
type Backing struct {
	core.Object
	engine *Engine
	bytes  uint64
	slabs  []*slab
	lanes  []*lane // on which work of unknown end may use it
	losses int64   // the System's, when it was reserved
}

// Reserve takes host memory near the device for so many bytes. It fails before any memory is
// taken if the limits of this process do not leave so much: the error wraps a
// *limits.Exceeded. With ahead all of it is pinned when Reserve returns, so that a later Out
// fails only by the device or by its context. Otherwise Out pins, each part ahead of its copy.
// The caller calls Release.
func (e *Engine) Reserve(ctx context.Context, bytes uint64, ahead bool, o Options) (*Backing, error) {
	if bytes == 0 || bytes > 1<<50 {
		return nil, errs.Invalid(o.Op, errs.Bytes(bytes)+" of host memory", "reserve from one byte up to 1 PiB")
	}
	if err := ended(ctx, o.Op); err != nil {
		return nil, err
	}
	losses := e.sys().Losses()
	slabs, err := e.store.get(o.Op, e.node(), slabsOf(bytes))
	if err != nil {
		return nil, err
	}
	b := &Backing{engine: e, bytes: bytes, slabs: slabs, losses: losses}
	e.sys().Track(b, life.KindBacking, bytes)
	if last := len(slabs) - 1; ahead && !b.pinned(0, last) {
		err = b.pin(ctx, o, 0, last, func(int, int) error { return nil })
	}
	if err != nil {
		b.Release()
		return nil, err
	}
	return b, nil
}

// slabsOf returns the classes of the slabs that have n bytes: whole ones, and a last one of the
// smallest class that the rest fits in.
func slabsOf(n uint64) (sizes []uint64) {
	for ; n > slabBytes; n -= slabBytes {
		sizes = append(sizes, slabBytes)
	}
	return append(sizes, max(uint64(1)<<bits.Len64(n-1), osmem.HugePage))
}

// Bytes returns the size.
func (b *Backing) Bytes() uint64 { return b.bytes }

// Pinned returns how many bytes are pinned.
func (b *Backing) Pinned() (bytes uint64) {
	for _, s := range b.slabs {
		if s.ctx != nil {
			bytes += uint64(len(s.mem))
		}
	}
	return bytes
}

// Out copies the segments, one behind the other, to the backing from offset on, and returns
// when all of it is there. It reads device memory only: after an error that memory is as it was,
// and the backing's contents there are undefined. Copies may be in flight then, which fences and
// later operations come behind (core.Stream.Unsettle).
func (b *Backing) Out(ctx context.Context, from []Segment, offset uint64, o Options) error {
	return Out(ctx, []Run{{b, from, offset}}, o)
}

// In is the reverse of Out. After an error the contents of the device memory are undefined, and
// the backing still has its bytes.
func (b *Backing) In(ctx context.Context, to []Segment, offset uint64, o Options) error {
	return In(ctx, []Run{{b, to, offset}}, o)
}

// Run is device memory whose bytes a backing has, one behind the other, from an offset on.
type Run struct {
	Backing  *Backing
	Segments []Segment
	Offset   uint64
}

// Out is Backing.Out of runs of one engine, one behind the other: the link does not idle between
// them. Options.Await and Passed count the bytes of all.
func Out(ctx context.Context, from []Run, o Options) error { return copyRuns(ctx, toHost, from, o) }

// In is the reverse of Out, as Backing.In is.
func In(ctx context.Context, to []Run, o Options) error { return copyRuns(ctx, toDevice, to, o) }

func copyRuns(ctx context.Context, dir direction, runs []Run, o Options) (err error) {
	var moves []*move
	bytes, pinned := uint64(0), true
	for _, r := range runs {
		m, err := newMove(r, bytes, o)
		if err != nil {
			return err
		}
		if n := m.plan.bytes; n > 0 {
			moves, bytes, pinned = append(moves, m), bytes+n, pinned && m.b.pinned(m.slabs())
		}
	}
	if bytes == 0 {
		return nil
	}
	e := moves[0].b.engine
	l, err := e.lease(o.Op)
	if err != nil {
		return err
	}
	o.Meter.begin(bytes)
	flights := make([]flight, 1)
	if !pinned {
		flights = make([]flight, o.threads())
	}
	for i := range flights {
		flights[i] = flight{op: o.Op, lane: l, dir: dir, meter: o.Meter, turn: i % 2}
	}
	if pinned {
		flights[0].passed = o.Passed
		if dir == toHost {
			flights[0].most = mostOut
		}
	}
	err = l.order(o.Op, o.After)
	for _, m := range moves {
		switch {
		case err != nil:
		case pinned:
			err = m.submit(ctx, &flights[0], 0, m.plan.bytes, pieceBytes, mostInFlight)
		default: // with larger pieces, since each call may wait for a slab to be pinned
			first, last := m.slabs()
			err = m.b.pin(ctx, o, first, last, func(worker, i int) error {
				at := uint64(i) * slabBytes
				return m.submit(ctx, &flights[worker], max(at, m.offset)-m.offset, min(at+slabBytes-m.offset, m.plan.bytes), slabBytes, 1)
			})
		}
	}
	passed, end := true, time.Now().Add(grace)
	for i := range flights {
		if err == nil {
			err = flights[i].wait(ctx, 0)
		}
		passed = flights[i].land(end) && passed
	}
	if !passed {
		for _, m := range moves {
			m.b.lanes = append(m.b.lanes, l)
		}
	}
	e.release(l, passed, func() {})
	return err
}

// move is a run of an operation.
type move struct {
	b      *Backing
	plan   *plan
	offset uint64 // in the backing
	start  uint64 // in the operation
	await  func(bytes uint64) error
}

func newMove(r Run, start uint64, o Options) (*move, error) {
	m := &move{r.Backing, newPlan(r.Segments), r.Offset, start, o.Await}
	if m.offset > m.b.bytes || m.plan.bytes > m.b.bytes-m.offset {
		return nil, errs.New(errs.Failure{Op: o.Op, Kind: errs.OutOfRange,
			Asked: fmt.Sprintf("%s from offset %d of %s of host memory", errs.Bytes(m.plan.bytes), m.offset, errs.Bytes(m.b.bytes)), Hint: "reserve as much as is copied"})
	}
	return m, nil
}

// slabs returns the first and the last slab of a move, which has bytes.
func (m *move) slabs() (first, last int) {
	return int(m.offset / slabBytes), int((m.offset + m.plan.bytes - 1) / slabBytes)
}

// submit copies bytes first to end of the plan, piece by piece, with so many groups of a flight
// in flight. Their slabs are pinned.
func (m *move) submit(ctx context.Context, f *flight, first, end, piece uint64, inFlight int) error {
	for first < end {
		at := m.offset + first
		i, in := at/slabBytes, at%slabBytes
		n := min(piece, slabBytes-in, end-first)
		if m.await != nil {
			if err := m.await(m.start + first + n); err != nil {
				return err
			}
		}
		if err := ended(ctx, f.op); err != nil {
			return err
		}
		mem := m.b.slabs[i].mem[in : in+n]
		err := m.plan.each(first, n, func(dev driver.Ptr, at, n uint64) error {
			if err := f.wait(ctx, inFlight); err != nil {
				return err
			}
			return f.copy(dev, mem[at:at+n])
		})
		if err != nil {
			return err
		}
		first += n
	}
	return f.mark()
}

// Release gives the memory back, once the copies that may use it have passed. It stays pinned
// for the next Reserve, up to the limit that Retain sets. What is more is unpinned, which waits
// for the device's work.
func (b *Backing) Release() {
	if len(b.lanes) > 0 {
		b.engine.sys().Reclaim(behind(b.lanes...), nil, func() error { b.giveBack(); return nil })
		return
	}
	b.giveBack()
	b.engine.store.trimToLimit()
}

// giveBack gives the memory to the store.
func (b *Backing) giveBack() {
	b.engine.giveBack(b.slabs, b.losses)
	b.slabs = nil
	b.Untrack()
}
