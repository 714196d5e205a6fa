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
	// passed, if it is not nil, is told how much has passed.
	passed func(bytes uint64)
	done   uint64
	// inFlight is how many bytes are marked and have not passed. wait leaves at most so many, if
	// that is not 0.
	inFlight, most uint64
	open           group   // submitted, and not marked
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

func (f *flight) stream() *core.Stream { return f.lane.streams[f.turn] }
func (f *flight) ctx() *core.Context   { return f.lane.streams[0].Ctx }
func (f *flight) drv() driver.Driver   { return f.ctx().System().Drv }

// copy submits a copy. Small ones share an event, larger ones alternate between the streams.
func (f *flight) copy(dev driver.Ptr, mem []byte) error {
	c, s, p := f.ctx(), f.stream(), unsafe.Pointer(&mem[0])
	call, way := driver.CallMemcpyHtoDAsync, "to"
	var r driver.Result
	if f.dir == toHost {
		call, way = driver.CallMemcpyDtoHAsync, "from"
		r = f.drv().MemcpyDtoHAsync(c.Handle, p, dev, uint64(len(mem)), s.Handle)
	} else {
		r = f.drv().MemcpyHtoDAsync(c.Handle, dev, p, uint64(len(mem)), s.Handle)
	}
	if r != driver.Success {
		return c.CallError(f.op, call, r, fmt.Sprintf("%s %s %#x", errs.Bytes(len(mem)), way, uint64(dev)))
	}
	f.open.bytes += uint64(len(mem))
	f.open.copies++
	if f.open.bytes >= pieceBytes/2 || f.open.copies == mostCopies {
		return f.mark()
	}
	return nil
}

// mark records an event behind the copies that have none. The streams are the library's own,
// which no one captures, so the event needs none of the care of core.Stream.Mark.
func (f *flight) mark() error {
	if f.open.copies == 0 {
		return nil
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
