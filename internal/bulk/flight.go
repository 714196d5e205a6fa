package bulk

import (
	"context"
	"fmt"
	"time"
	"unsafe"

	"github.com/cuvmm/cuvmm/internal/core"
	"github.com/cuvmm/cuvmm/internal/driver"
	"github.com/cuvmm/cuvmm/internal/errs"
	"github.com/cuvmm/cuvmm/internal/host"
)

// direction is the way of a copy.
type direction bool

const (
	toHost   direction = true
	toDevice direction = false
)

// flight is the copies that a goroutine submitted and that have not passed. Several flights
// may use one lane.
type flight struct {
	op    string
	lane  *lane
	dir   direction
	meter *Meter
	turn  int
	// fixed: it stays on one stream, in whose order its staging area is.
	fixed bool
	// reach, if it is not nil, says whether addresses that a caller gave are memory. Others the library mapped.
	reach *reach
	// passed, if it is not nil, is told how much has passed.
	passed func(bytes uint64)
	done   uint64
	// inFlight is how many bytes are marked and have not passed. wait leaves at most so many, if
	// that is not 0.
	inFlight, most uint64
	open           group   // submitted or in batch, and not marked
	batch          batch   // not submitted
	sent           []group // marked, the oldest first
	// unmarked: work was submitted behind which no event could be recorded.
	unmarked bool
}

// group is copies with an event behind them.
type group struct {
	event  driver.Event
	bytes  uint64
	copies int
}

// batch is small copies that one driver call submits: at 64 KiB each, three times as many as by a
// call for each (docs/measurements/bulk.md).
type batch struct {
	dev, mem []driver.Ptr
	sizes    []uint64
	first    unsafe.Pointer // of mem
}

func (b *batch) clear() { *b = batch{dev: b.dev[:0], mem: b.mem[:0], sizes: b.sizes[:0]} }

func (f *flight) stream() *core.Stream { return f.lane.streams[f.turn] }
func (f *flight) ctx() *core.Context   { return f.lane.streams[0].Ctx }
func (f *flight) drv() driver.Driver   { return f.ctx().System().Drv }

// copy submits a copy, or keeps a small one for the batch of its group. Small ones share an event, and
// groups alternate between the streams.
func (f *flight) copy(dev driver.Ptr, mem []byte) error {
	n := uint64(len(mem))
	if n < batchedBytes && f.drv().Has(driver.CallMemcpyBatchAsync) && (f.reach == nil || f.reach.has(Segment{Ptr: dev, Bytes: n})) {
		if len(f.batch.dev) == 0 {
			f.batch.first = unsafe.Pointer(&mem[0])
		}
		f.batch.dev = append(f.batch.dev, dev)
		f.batch.mem = append(f.batch.mem, driver.Ptr(uintptr(unsafe.Pointer(&mem[0]))))
		f.batch.sizes = append(f.batch.sizes, n)
	} else if err := f.submit(dev, unsafe.Pointer(&mem[0]), n); err != nil {
		return err
	}
	f.open.bytes += n
	f.open.copies++
	if f.open.bytes >= pieceBytes/2 || f.open.copies == mostCopies {
		return f.mark()
	}
	return nil
}

func (f *flight) submit(dev driver.Ptr, mem unsafe.Pointer, n uint64) error {
	c, s := f.ctx(), f.stream()
	call, way := driver.CallMemcpyHtoDAsync, "to"
	var r driver.Result
	if f.dir == toHost {
		call, way = driver.CallMemcpyDtoHAsync, "from"
		r = f.drv().MemcpyDtoHAsync(c.Handle, mem, dev, n, s.Handle)
	} else {
		r = f.drv().MemcpyHtoDAsync(c.Handle, dev, mem, n, s.Handle)
	}
	if r != driver.Success {
		return c.CallError(f.op, call, r, fmt.Sprintf("%s %s %#x", errs.Bytes(n), way, uint64(dev)))
	}
	return nil
}

// submitBatch submits the copies that were kept.
func (f *flight) submitBatch() error {
	defer f.batch.clear()
	b := &f.batch
	switch len(b.dev) {
	case 0:
		return nil
	case 1:
		return f.submit(b.dev[0], b.first, b.sizes[0])
	}
	c, dst, src, way := f.ctx(), b.dev, b.mem, "to"
	if f.dir == toHost {
		dst, src, way = b.mem, b.dev, "from"
	}
	r := f.drv().MemcpyBatchAsync(c.Handle, dst, src, b.sizes, inStreamOrder, fromTheFirst, f.stream().Handle)
	if r != driver.Success {
		f.unmarked = true // it may have submitted some
		return c.CallError(f.op, driver.CallMemcpyBatchAsync, r, fmt.Sprintf("%d copies %s %#x and on", len(b.dev), way, uint64(b.dev[0])))
	}
	return nil
}

var (
	inStreamOrder = []driver.CopyAttributes{{Order: driver.CopyInStreamOrder}}
	fromTheFirst  = []uint64{0}
)

// mark records an event behind the copies that have none. The streams are the library's own,
// which no one captures, so the event needs none of the care of core.Stream.Mark.
func (f *flight) mark() error {
	if f.open.copies == 0 {
		return nil
	}
	if err := f.submitBatch(); err != nil {
		return err
	}
	c := f.ctx()
	e, r := c.Event()
	if r != driver.Success {
		f.unmarked = true
		return c.CallError(f.op, driver.CallEventCreate, r, "the end of a copy")
	}
	if r := f.drv().EventRecord(c.Handle, e, f.stream().Handle); r != driver.Success {
		f.unmarked = true
		c.Destroy(e)
		return c.CallError(f.op, driver.CallEventRecord, r, "the end of a copy")
	}
	f.open.event = e
	f.sent = append(f.sent, f.open)
	f.inFlight += f.open.bytes
	if f.open = (group{}); !f.fixed {
		f.turn = 1 - f.turn
	}
	return nil
}

// wait waits until at most n groups are in flight, and f.most bytes. It ends with the context, and
// leaves the rest to land.
func (f *flight) wait(ctx context.Context, n int) error {
	pause := pollPause
	if f.most > 0 {
		pause = shortPollPause
	}
	for len(f.sent) > n || f.most > 0 && f.inFlight > f.most {
		if passed, err := f.poll(); err != nil {
			return err
		} else if passed {
			continue
		}
		if err := ended(ctx, f.op); err != nil {
			return err
		}
		host.Pause(pause)
	}
	return nil
}

// poll asks for the oldest group.
func (f *flight) poll() (passed bool, err error) {
	c, g := f.ctx(), f.sent[0]
	switch r := c.Observe(f.drv().EventQuery(c.Handle, g.event)); r {
	case driver.Success:
		c.Recycle(g.event)
		f.sent = f.sent[1:]
		f.inFlight -= g.bytes
		f.meter.add(g.bytes)
		if f.done += g.bytes; f.passed != nil {
			f.passed(f.done)
		}
		return true, nil
	case driver.NotReady:
		return false, nil
	default:
		return false, c.CallError(f.op, driver.CallEventQuery, r, "a copy")
	}
}

// land waits for all that was submitted until end, after an operation has failed. It reports
// whether nothing is in flight: in a lost context nothing is.
func (f *flight) land(end time.Time) (passed bool) {
	f.passed = nil
	if n := len(f.batch.dev); n > 0 { // an error came before they were submitted
		f.open.copies -= n
		f.batch.clear()
	}
	if f.ctx().Lost() == driver.Success && f.mark() == nil && !f.unmarked {
		for len(f.sent) > 0 && time.Now().Before(end) {
			if passed, err := f.poll(); err != nil {
				break
			} else if !passed {
				host.Pause(pollPause)
			}
		}
	}
	passed = len(f.sent) == 0 && !f.unmarked || f.ctx().Lost() != driver.Success
	for _, g := range f.sent {
		f.ctx().Recycle(g.event) // it may be recorded anew while this record is pending
	}
	f.sent = nil
	return passed
}

// ended returns the error of an operation whose context has ended.
func ended(ctx context.Context, op string) error {
	if ctx.Err() == nil {
		return nil
	}
	return fmt.Errorf("%s: %w", op, context.Cause(ctx))
}
