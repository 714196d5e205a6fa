package pool

import (
	"fmt"
	"slices"

	"github.com/cuvmm/cuvmm/cuda"
	"github.com/cuvmm/cuvmm/internal/core"
	"github.com/cuvmm/cuvmm/internal/driver"
	"github.com/cuvmm/cuvmm/internal/epoch"
	"github.com/cuvmm/cuvmm/internal/errs"
	"github.com/cuvmm/cuvmm/internal/life"
)

// Arena is memory that several captures share. By naming it in CaptureOptions the caller
// asserts that their graphs never run at the same time: memory that one capture freed or
// left free serves the next. The memory returns to the pool when the arena is closed and
// the last of the graphs is gone.
type Arena struct {
	pool   *Pool
	a      *arena // nil once it is closed; guarded by the pool's lock
	ending *life.Ending
}

// arena is the memory of captures. All fields are guarded by the pool's lock.
//
// The memory in it belongs to shards of the arena's own, one for each stream that
// took part. While one of its captures runs, a stream reuses what it freed in
// that capture at once, since the graph keeps the stream's order; what another
// stream freed in it is out of use until the capture has ended, since the graph
// orders nothing else. What is freed outside of the capture that it was
// allocated in, is free when its stream has passed.
//
//	none ──capture──► running ⇄ idle ──last graph gone, and the Arena closed──► retired
//
// Once it is retired, its shards belong to the pool like those of closed streams: other
// shards can take what is free in them, and live blocks are freed as usual.
type arena struct {
	pool    *Pool
	shards  []*shard
	holds   int // captures and graphs, and the user's Arena
	running *Capture
	serial  uint32
	ending  life.Ending
}

// NewArena returns an arena for captures whose graphs never run at the same time. It keeps
// its memory until the caller closes it.
func (p *Pool) NewArena() (*Arena, error) {
	if err := p.lockOpen("pool.NewArena"); err != nil {
		return nil, err
	}
	defer p.mu.Unlock()
	a := p.newArena()
	return &Arena{p, a, &a.ending}, nil
}

func (p *Pool) newArena() *arena {
	p.arenas++
	return &arena{pool: p, holds: 1}
}

// Close returns the arena's memory to the pool once the last graph that was captured in
// it is gone. No further capture can use the arena. Close is idempotent.
func (a *Arena) Close() error {
	if err := a.made("pool.Arena.Close"); err != nil {
		return err
	}
	p := a.pool
	p.mu.Lock()
	in := a.a
	a.a = nil
	p.mu.Unlock()
	if in != nil {
		in.release()
		p.verify()
	}
	return nil
}

// Released returns the end of the arena's closing: it is closed, the last graph that was
// captured in it is gone, and its memory is the pool's again. It can be obtained at any
// time.
func (a *Arena) Released() cuda.Completion {
	return a.ending.Completion()
}

// made refuses an arena that NewArena did not make.
func (a *Arena) made(op string) error {
	if a == nil || a.pool == nil {
		return errs.Invalid(op, "a nil or zero arena", "make it with Pool.NewArena")
	}
	return nil
}

// release lets go of the arena; the last one retires it.
func (a *arena) release() {
	p := a.pool
	p.mu.Lock()
	if a.holds--; a.holds != 0 {
		p.mu.Unlock()
		return
	}
	p.arenas--
	shards := a.shards
	a.shards = nil
	for _, sh := range shards {
		// Every graph has passed, and what was freed outside of them waits in
		// the shard's list.
		sh.mu.Lock()
		sh.arena, sh.serial = nil, 0
		sh.clock.SetManual(false)
		sh.clock.Pass(sh.clock.End())
		sh.offerLocked()
		sh.mu.Unlock()
	}
	p.pruneLocked()
	p.mu.Unlock()
	a.ending.End(nil)
}

// shard is the arena's shard of a stream. The caller holds the pool's lock.
func (a *arena) shard(st *core.Stream) *shard {
	for _, sh := range a.shards {
		if sh.stream == st {
			return sh
		}
	}
	sh := a.pool.newShard(st, a)
	sh.serial = a.serial
	a.shards = append(a.shards, sh)
	a.pool.shards = append(a.pool.shards, sh)
	return sh
}

// uses returns where the arena's memory lies, one span for each region.
func (a *arena) uses() (all []cuda.Span) {
	p := a.pool
	p.mu.Lock()
	defer p.mu.Unlock()
	for _, pl := range *p.places.Load() {
		var from, to driver.Ptr
		pl.reg.filled(func(at int, c *chunk) {
			if sh := c.shard.Load(); slices.Contains(a.shards, sh) {
				if from == 0 {
					from = pl.reg.at(at)
				}
				to = pl.reg.at(at + 1)
			}
		})
		if from < to {
			all = append(all, cuda.Span{At: cuda.Ptr(from), Bytes: int(to - from)})
		}
	}
	return all
}

// begin makes a capture the running one, and seals what is free: all of the
// arena's streams may have it. The caller holds the pool's lock.
func (a *arena) begin(op string, c *Capture) error {
	if a.running != nil {
		return errs.New(errs.Failure{Op: op, Kind: errs.InUse,
			Asked: fmt.Sprintf("an arena whose capture %d still runs", a.running.id),
			Hint:  "captures that run at the same time need an arena each"})
	}
	a.serial++
	a.running = c
	a.holds++
	for _, sh := range a.shards {
		sh.mu.Lock()
		sh.sealed = sh.clock.End()
		sh.serial = a.serial
		sh.mu.Unlock()
	}
	return nil
}

// freeCaptured frees a block of an arena. In the capture that it was allocated in, its
// stream has it back at once; what other streams of the capture use waits for the end.
// Outside of the capture it waits for its own stream, too, since the next capture is not
// ordered behind that.
func (p *Pool) freeCaptured(b Block, used ...epoch.Point) error {
	err := p.freeOfArena(b, used)
	p.verify()
	return err
}

func (p *Pool) freeOfArena(b Block, used []epoch.Point) error {
	h, sh := b.h, b.h.home.shard
	if e := h.home.ext; e != nil && e.node != nil {
		if err := sh.retireOnce(b, used); err != nil {
			return err
		}
		return e.node.free(h, len(used) > 0)
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	var c *Capture
	sh.mu.Lock()
	if a := sh.arena; a != nil && a.running != nil && a.serial == h.capture {
		c = a.running
	}
	sh.mu.Unlock()
	until := used
	if c == nil && !sh.stream.Gone() {
		own := p.attachLocked(sh.stream)
		own.mu.Lock()
		until = append(until, epoch.Point{Clock: &own.clock, Epoch: own.clock.Touch()})
		own.mu.Unlock()
	}
	// Stale and waiting, or free, in one step: a Check meets nothing in between.
	sh.mu.Lock()
	defer sh.mu.Unlock()
	if h.gen != b.gen {
		return p.stale(b)
	}
	sh.retireLocked(h, used)
	if len(until) == 0 {
		sh.putLocked(h, sh.clock.Now())
	} else {
		sh.keepWaitingLocked(waiting{h: h, epoch: sh.clock.Now(), until: until, capture: c})
	}
	return nil
}

// retireOnce is retire, unless the block is stale.
func (sh *shard) retireOnce(b Block, used []epoch.Point) error {
	sh.mu.Lock()
	defer sh.mu.Unlock()
	if b.h.gen != b.gen {
		return sh.pool.stale(b)
	}
	sh.retireLocked(b.h, used)
	return nil
}
