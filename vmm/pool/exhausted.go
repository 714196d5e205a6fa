package pool

import (
	"cmp"
	"fmt"
	"slices"
	"strings"

	"github.com/cuvmm/cuvmm/cuda"
	"github.com/cuvmm/cuvmm/internal/core"
	"github.com/cuvmm/cuvmm/internal/driver"
)

// Exhausted is what Options.OnExhausted is told of a request that would be
// refused: everything else was tried. The function may free blocks, of this
// pool and of others, and may call anything; true has the request tried again.
// It runs on the goroutine that allocates, and no lock is held.
type Exhausted struct {
	Bytes int
	Tag   Tag
	// Reason is cuda.ErrOutOfMemory, cuda.ErrOutOfAddressSpace or
	// cuda.ErrBudget.
	Reason error
	// Reserved and Requested are of the pool: the physical memory that it has,
	// and what its live blocks were asked for.
	Reserved, Requested uint64
}

// ask calls the user's function without a lock.
func (p *Pool) ask(w *want, s *shortage) bool {
	p.slow.Unlock()
	defer p.slow.Lock()
	st := p.Stats()
	return p.o.OnExhausted(Exhausted{Bytes: int(w.bytes), Tag: w.tag, Reason: s.reason(), Reserved: st.Reserved, Requested: st.Requested})
}

func (s *shortage) reason() error {
	switch s.kind {
	case core.Budget:
		return cuda.ErrBudget
	case core.OutOfAddressSpace:
		return cuda.ErrOutOfAddressSpace
	}
	return cuda.ErrOutOfMemory
}

// holders is how many tags a refusal names.
const holders = 3

// refusal is the error of a request that found no memory.
func (p *Pool) refusal(sh *shard, w *want, s *shortage) error {
	st := p.Stats()
	f := core.Failure{Op: allocOp, Kind: s.kind, Call: s.call, Result: s.result, Err: s.err}
	f.Asked = fmt.Sprintf("%s for stream %#x on %v; the pool has %s, of which live blocks were asked for %s",
		core.Bytes(w.bytes), uintptr(sh.stream.Handle), p.dev, core.Bytes(st.Reserved), core.Bytes(st.Requested))
	if st.Waiting > 0 {
		f.Asked += ", with " + core.Count(st.Waiting, "freed block") + " still waiting for other streams"
	}
	if who := p.largest(&st); who != "" {
		f.Asked += "; the largest holders: " + who
	}
	lost := p.lost()
	switch {
	case lost != driver.Success:
		f.Kind, f.Result, f.Hint = core.DeviceLost, lost, "restart the process; closing the pool drops what lies on the device"
	case s.kind == core.Budget:
		f.Asked += fmt.Sprintf("; the limit is %s", core.Bytes(st.Limit))
		f.Hint = "free blocks, or raise the limit with Pool.SetLimit"
		if w.kind == mid && st.Limit < s.size {
			f.Hint = fmt.Sprintf("such requests are served in chunks of %s: raise the limit with Pool.SetLimit", core.Bytes(p.chunk))
		}
	case s.kind == core.OutOfAddressSpace:
		f.Hint = "memory is not what ran out: close reservations, or other pools"
	default:
		f.Hint = "free blocks, or what others hold of the device's memory"
		if free, total, err := p.dev.MemoryInfo(); err == nil {
			f.Asked += fmt.Sprintf("; the device has %s free of %s", core.Bytes(free), core.Bytes(total))
			f.Hint = cmp.Or(p.sys.Withheld(s.size, free), f.Hint)
		}
	}
	return core.Error(f)
}

// fewBlocks are how many live blocks a refusal goes through at most.
const fewBlocks = 1000

// largest names those who hold most, by tag: from the statistics, or, of a pool
// without them, as long as it has few blocks.
func (p *Pool) largest(st *Stats) string {
	type holder struct {
		tag    Tag
		blocks int
		bytes  uint64
	}
	var by []holder
	add := func(tag Tag, blocks int, bytes uint64) {
		at := slices.IndexFunc(by, func(o holder) bool { return o.tag == tag })
		if at < 0 {
			at = len(by)
			by = append(by, holder{tag: tag})
		}
		by[at].blocks += blocks
		by[at].bytes += bytes
	}
	switch {
	case p.o.Statistics:
		for _, t := range st.Tags {
			if t.Blocks > 0 {
				add(t.Tag, int(t.Blocks), t.Requested)
			}
		}
	case st.Blocks <= fewBlocks:
		p.each(func(h *header) { add(h.tag, 1, h.asked()) })
	default:
		return "not counted without Options.Statistics"
	}
	slices.SortFunc(by, func(a, b holder) int {
		if a.bytes > b.bytes {
			return -1
		}
		return 1
	})
	var names []string
	for _, h := range by[:min(len(by), holders)] {
		name := "without a tag"
		if h.tag != 0 {
			name = fmt.Sprintf("%q", h.tag)
		}
		names = append(names, fmt.Sprintf("%s %s in %d", name, core.Bytes(h.bytes), h.blocks))
	}
	return strings.Join(names, ", ")
}

// each calls f for every live block, with its shard's lock held.
func (p *Pool) each(f func(h *header)) {
	for _, pl := range *p.places.Load() {
		pl.each(p, f)
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	for _, e := range p.nodes {
		e.home.shard.mu.Lock()
		if e.live() {
			f(&e.header)
		}
		e.home.shard.mu.Unlock()
	}
}
