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
	losses := e.sys().Losses()
	slabs, err := e.store.get(o.Op, e.node(), slabsOf(bytes))
	if err != nil {
		return nil, err
	}
	b := &Backing{engine: e, bytes: bytes, slabs: slabs, losses: losses}
	e.sys().Track(b, life.KindBacking, bytes)
	if ahead {
		p := b.pin(ctx, o, 0, bytes)
		for i := range slabs {
			if err == nil {
				err = p.wait(i)
			}
		}
		p.end()
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
	return b.move(ctx, toHost, from, offset, o)
}

// In is the reverse of Out. After an error the contents of the device memory are undefined, and
// the backing still has its bytes.
func (b *Backing) In(ctx context.Context, to []Segment, offset uint64, o Options) error {
	return b.move(ctx, toDevice, to, offset, o)
}

func (b *Backing) move(ctx context.Context, dir direction, segments []Segment, offset uint64, o Options) (err error) {
	p := newPlan(segments)
	if offset > b.bytes || p.bytes > b.bytes-offset {
		return errs.New(errs.Failure{Op: o.Op, Kind: errs.OutOfRange,
			Asked: fmt.Sprintf("%s from offset %d of %s of host memory", errs.Bytes(p.bytes), offset, errs.Bytes(b.bytes)), Hint: "reserve as much as is copied"})
	}
	if p.bytes == 0 {
		return nil
	}
	l, err := b.engine.lease(o.Op)
	if err != nil {
		return err
	}
	o.Meter.begin(p.bytes)
	f := &flight{op: o.Op, lane: l, dir: dir, meter: o.Meter}
	pins := b.pin(ctx, o, offset, p.bytes)
	err = l.order(o.Op, o.After)
	if err == nil {
		err = b.submit(ctx, f, p, offset, pins)
	}
	pins.end()
	passed := f.land(time.Now().Add(grace))
	if !passed {
		b.lanes = append(b.lanes, l)
	}
	b.engine.release(l, passed, func() {})
	return err
}

// submit copies piece by piece, each behind the pinning of its slab, and waits for the last.
func (b *Backing) submit(ctx context.Context, f *flight, p *plan, offset uint64, pins *pinning) error {
	for done := uint64(0); done < p.bytes; {
		at := offset + done
		i, in := at/slabBytes, at%slabBytes
		n := min(pieceBytes, slabBytes-in, p.bytes-done)
		if err := ended(ctx, f.op); err != nil {
			return err
		}
		if err := pins.wait(int(i)); err != nil {
			return err
		}
		mem := b.slabs[i].mem[in : in+n]
		err := p.each(done, n, func(dev driver.Ptr, at, n uint64) error {
			if err := f.wait(ctx, mostInFlight); err != nil {
				return err
			}
			return f.copy(dev, mem[at:at+n])
		})
		if err != nil {
			return err
		}
		done += n
	}
	if err := f.mark(); err != nil {
		return err
	}
	return f.wait(ctx, 0)
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
