package bulk

import (
	"context"
	"fmt"
	"slices"
	"sync/atomic"
	"time"

	"github.com/cuvmm/cuvmm/internal/driver"
	"github.com/cuvmm/cuvmm/internal/errs"
	"golang.org/x/sync/errgroup"
)

// Slack is how many bytes of room a piece has besides those that are asked of a reader.
const Slack = 64 << 10

// stepUnit is what pieces are multiples of: whole blocks of files.
const stepUnit = 4 << 10

// leastPiece is the size of the pieces of a short stream of bytes.
const leastPiece = 1 << 20

// Read puts n bytes of a stream of bytes, from offset on, into buf, and returns where in it
// they begin. buf begins at a page and has room for Slack bytes more, so that a reader of a
// file with O_DIRECT can begin and end at whole blocks. It ends soon after ctx does. It is
// called by several goroutines at once, with offsets in about their order.
type Read func(ctx context.Context, buf []byte, offset uint64, n int) (at int, err error)

// Write takes bytes of a stream of bytes, which begin at offset. It is called as Read is; with
// one thread the offsets come in order. It does not retain the piece.
type Write func(ctx context.Context, piece []byte, offset uint64) error

// Fill fills the segments, one behind the other, with a stream of bytes: Options.Threads
// goroutines read pieces of it, each into pinned memory of its own, and copy one while they
// read the next. It returns when all bytes are on the device. After an error the contents
// of the segments are undefined, and copies may be in flight, as after Backing.Out.
func (e *Engine) Fill(ctx context.Context, to []Segment, read Read, o Options) error {
	return e.stream(ctx, toDevice, to, o, func(ctx context.Context, w *worker) error {
		for i := 0; ; i = 1 - i {
			offset, n, ok := w.next()
			if !ok {
				return w.landed(ctx)
			}
			if err := ended(ctx, o.Op); err != nil {
				return err
			}
			if err := w.flights[i].wait(ctx, 0); err != nil {
				return err
			}
			at, err := read(ctx, w.pieces[i], offset, n)
			if err != nil {
				return err
			}
			if at < 0 || at+n > len(w.pieces[i]) {
				return errs.Invalid(o.Op, fmt.Sprintf("a piece of %d bytes that begins at %d of %d", n, at, len(w.pieces[i])), "leave the bytes within the piece")
			}
			if err := w.copy(i, at, n, offset); err != nil {
				return err
			}
		}
	})
}

// Drain is the reverse of Fill: it passes the bytes of the segments to write.
func (e *Engine) Drain(ctx context.Context, from []Segment, write Write, o Options) error {
	return e.stream(ctx, toHost, from, o, func(ctx context.Context, w *worker) error {
		var last func() error // writes the piece before
		for i := 0; ; i = 1 - i {
			offset, n, ok := w.next()
			if err := ended(ctx, o.Op); err != nil {
				return err
			}
			if ok {
				if err := w.copy(i, 0, n, offset); err != nil {
					return err
				}
			}
			if last != nil {
				if err := last(); err != nil {
					return err
				}
			}
			if !ok {
				return nil
			}
			last = func() error {
				if err := w.flights[i].wait(ctx, 0); err != nil {
					return err
				}
				return write(ctx, w.pieces[i][:n], offset)
			}
		}
	})
}

// worker is a goroutine of a stream of bytes, with two pieces: one is copied while the other
// is read or written.
type worker struct {
	*transfer
	// rooms are pinned, and pieces are what of them is read into or written from. What is behind is
	// for the tables of what is distributed.
	rooms, pieces [2][]byte
	staging       [2]driver.Ptr // 0: each segment is copied
	flights       [2]flight
}

// transfer is what the workers of one stream of bytes share.
type transfer struct {
	plan    *plan
	scatter *scatter // nil: each segment is copied
	piece   uint64   // bytes
	// Of the first pieces, as many as early, each has a step more than the one before. Workers that
	// begin with pieces of one length stay in step, and the link idles while all of them read.
	early, step uint64
	taken       atomic.Uint64 // pieces
}

// divide decides the sizes of the pieces for so many threads at most, and returns how many workers
// there are, and how much room each piece has. A short stream has smaller pieces and fewer workers.
func (t *transfer) divide(threads uint64) (workers, room uint64) {
	room, table := uint64(leastPiece), uint64(0)
	if t.scatter != nil {
		room, table = scatterRoom, t.scatter.table
	}
	for t.scatter == nil && room < pieceBytes && threads*2*(room-Slack) < t.plan.bytes {
		room *= 2
	}
	t.piece = room - Slack - table
	workers = min(threads, (t.plan.bytes+t.piece-1)/t.piece)
	t.early = min(workers, t.piece/stepUnit)
	t.step = t.piece / t.early / stepUnit * stepUnit
	return workers, room
}

// next returns the next piece of the stream.
func (t *transfer) next() (offset uint64, n int, ok bool) {
	i := t.taken.Add(1) - 1
	before := min(i, t.early)
	offset, size := t.step*before*(before+1)/2+(i-before)*t.piece, t.piece
	if i < t.early {
		size = t.step * (i + 1)
	}
	if offset >= t.plan.bytes {
		return 0, 0, false
	}
	return offset, int(min(size, t.plan.bytes-offset)), true
}

// copy submits the copies of n bytes of a piece, from byte at of its room on: as many as it has
// segments, or one and a kernel.
func (w *worker) copy(i, at, n int, offset uint64) error {
	if w.staging[i] != 0 {
		return w.distribute(i, at, n, offset)
	}
	f, mem := &w.flights[i], w.rooms[i][at:at+n]
	err := w.plan.each(offset, uint64(len(mem)), func(dev driver.Ptr, at, n uint64) error {
		return f.copy(dev, mem[at:at+n])
	})
	if err != nil {
		return err
	}
	return f.mark()
}

// landed waits for the copies of both pieces.
func (w *worker) landed(ctx context.Context) error {
	for i := range w.flights {
		if err := w.flights[i].wait(ctx, 0); err != nil {
			return err
		}
	}
	return nil
}

// stream runs the workers of a stream of bytes.
func (e *Engine) stream(ctx context.Context, dir direction, segments []Segment, o Options, work func(context.Context, *worker) error) (err error) {
	t := &transfer{plan: newPlan(segments)}
	if t.plan.bytes == 0 {
		return nil
	}
	least := driver.AccessRead
	if dir == toDevice {
		least, t.scatter = driver.AccessReadWrite, e.scatterOf(t.plan)
	}
	threads, room := t.divide(uint64(o.threads()))

	losses := e.sys().Losses()
	slabs, err := e.store.get(o.Op, e.node(), slices.Repeat([]uint64{2 * room}, int(threads)))
	if err != nil {
		return err
	}
	l, err := e.lease(o.Op)
	if err != nil {
		e.store.put(slabs)
		return err
	}
	o.Meter.begin(t.plan.bytes)
	workers := make([]*worker, threads)
	for i := range workers {
		w, reach := &worker{transfer: t}, e.reach(least)
		for j := range w.pieces {
			w.rooms[j] = slabs[i].mem[uint64(j)*room:][:room:room]
			w.pieces[j] = w.rooms[j][:t.piece+Slack]
			w.flights[j] = flight{op: o.Op, lane: l, dir: dir, meter: o.Meter, turn: (i + j) % 2, reach: reach}
		}
		workers[i] = w
	}
	if err = l.order(o.Op, o.After); err == nil {
		g, ctx := errgroup.WithContext(ctx)
		for i, w := range workers {
			g.Go(func() error {
				if err := slabs[i].pin(o.Op, e.ctx); err != nil {
					return err
				}
				w.stage(room)
				return work(ctx, w)
			})
		}
		err = g.Wait()
	}
	passed, end := true, time.Now().Add(grace)
	for _, w := range workers {
		for j := range w.flights {
			passed = w.flights[j].land(end) && passed
		}
		w.unstage()
	}
	e.release(l, passed, func() { e.giveBack(slabs, losses) })
	e.store.trimToLimit()
	return err
}

// giveBack gives slabs to the store. After a loss no wait for the lost context has succeeded,
// so its copies may still use them.
func (e *Engine) giveBack(slabs []*slab, losses int64) {
	if e.sys().Losses() != losses {
		e.store.keep(slabs)
		return
	}
	e.store.put(slabs)
}

// node is the NUMA node that is nearest to the device.
func (e *Engine) node() int { return int(e.sys().Attribute(e.ctx.Device, driver.AttrHostNUMAID)) }
