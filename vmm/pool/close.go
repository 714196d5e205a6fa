package pool

import (
	"fmt"
	"slices"
	"strings"

	"github.com/cuvmm/cuvmm/cuda"
	"github.com/cuvmm/cuvmm/internal/errs"
)

const closeOp = "pool.Close"

// Close waits for the streams that blocks were freed on, or that frees named, and gives
// all memory back to the driver. While blocks are live, or graphs keep an arena, it
// changes nothing and returns cuda.ErrInUse, which names the blocks; while one of the
// streams captures it returns cuda.ErrCapturing. After another error it may be called
// again. Close is idempotent.
func (p *Pool) Close() error {
	if err := p.made(closeOp); err != nil {
		return err
	}
	return p.closer.Close(p.close)
}

// Released returns the end of the pool's closing: then all of its memory is back.
func (p *Pool) Released() cuda.Completion { return p.closer.Completion() }

func (p *Pool) close() error {
	defer p.aside(false)()
	p.misses.Lock()
	defer p.misses.Unlock()
	if err := p.shut(); err != nil {
		return err
	}
	for _, sh := range p.all() {
		if err := sh.clock.Await(closeOp); err != nil {
			p.open()
			return err
		}
	}
	p.pressing.Lock()
	defer p.pressing.Unlock()
	p.status.Closed() // before the addresses are those of others
	if err := p.giveBack(); err != nil {
		return err
	}
	p.status.Closed() // what a Suspension kept goes with the last mappings
	return nil
}

// shut ends allocation, if nothing is live.
func (p *Pool) shut() error {
	p.mu.Lock()
	arenas := p.arenas
	p.closed = true
	var live uint64
	for _, sh := range p.shards {
		sh.mu.Lock()
		sh.closed = true
		live += sh.live
		sh.mu.Unlock()
	}
	p.mu.Unlock()
	if live == 0 && arenas == 0 {
		return nil
	}
	p.open()
	f := errs.Failure{Op: closeOp, Object: p.object.Called(), Kind: errs.InUse, Hint: "free the blocks first, and close the graphs that were captured: after CloseAfter wait for their Released"}
	var what []string
	if live > 0 {
		what = append(what, errs.Count(live, "live block")+": "+p.some())
	}
	if arenas > 0 {
		what = append(what, errs.Count(arenas, "arena")+" of captures")
	}
	f.Asked = strings.Join(what, ", and ")
	return errs.New(f)
}

// shown is how many live blocks an error names.
const shown = 5

func (p *Pool) some() string {
	var names []string
	all := p.liveBlocks()
	for _, l := range all[:min(len(all), shown)] {
		names = append(names, l.String())
	}
	if n := len(all) - shown; n > 0 {
		names = append(names, fmt.Sprintf("and %d more", n))
	}
	return strings.Join(names, ", ")
}

func (p *Pool) open() {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.closed = false
	for _, sh := range p.shards {
		sh.mu.Lock()
		sh.closed = sh.sleep != nil
		sh.mu.Unlock()
	}
}

// giveBack unmaps and releases everything. Nothing is live, and nothing runs.
func (p *Pool) giveBack() error {
	for _, sh := range p.all() {
		sh.settle()
	}
	if err := p.unmapAll(closeOp); err != nil {
		return err
	}
	if _, err := p.trim(closeOp, maxBytes); err != nil {
		return err
	}
	p.mu.Lock()
	regions := slices.Concat(p.regions[:]...)
	p.mu.Unlock()
	for _, r := range regions {
		if err := r.res.Close(); err != nil {
			return err
		}
		for i := range r.chunks {
			if c := r.chunks[i].Swap(nil); c != nil && isGone(c.handle) { // or another place has it yet
				p.gave(c.handle.Size)
			}
		}
		p.mu.Lock()
		p.forgetLocked(r)
		p.mu.Unlock()
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	p.upkeep.Stop()
	p.keeper.Remove()
	p.unbudget()
	p.object.Untrack()
	p.hide()
	for _, sh := range p.shards {
		if sh.stream.Locals.Get(p.local) == sh {
			sh.stream.Locals.Set(p.local, nil)
		}
	}
	p.sys.FreeStreamKey(p.local)
	return nil
}
