package pool

import (
	"cmp"
	"errors"
	"fmt"
	"slices"
	"strings"

	"github.com/cuvmm/cuvmm/cuda"
	"github.com/cuvmm/cuvmm/internal/budget"
	"github.com/cuvmm/cuvmm/internal/core"
	"github.com/cuvmm/cuvmm/internal/driver"
	"github.com/cuvmm/cuvmm/internal/errs"
)

// shortage is why no chunk could be had.
type shortage struct {
	kind   errs.Kind
	size   uint64 // of the chunk, or of the address range
	call   driver.Call
	result driver.Result
	err    error
}

func (s *shortage) Error() string { return "no memory" }

func (s *shortage) Unwrap() error { return s.err }

func addressShortage(err error, size uint64) error {
	if errors.Is(err, cuda.ErrOutOfAddressSpace) {
		return &shortage{kind: errs.OutOfAddressSpace, size: size, err: err}
	}
	return err
}

func join(err error, more ...error) error {
	for _, m := range more {
		if m != nil {
			return errors.Join(append([]error{err}, more...)...)
		}
	}
	return err
}

// Exhausted describes a request that is about to be refused, for Options.OnExhausted. The
// function may free blocks, of this pool and of others, and may call anything. If it returns
// true the request is tried again. The request waits for it, and no lock is held. A panic,
// or runtime.Goexit, is logged and counts as false. A request larger than the device's memory is refused without it.
type Exhausted struct {
	Bytes int
	Tag   Tag
	// Reason is cuda.ErrOutOfMemory, cuda.ErrOutOfAddressSpace or
	// cuda.ErrBudget.
	Reason error
	// Limit is the pool's limit in bytes, or 0. A request of more can only be served if
	// the function raises it (Pool.SetLimit), whatever it frees.
	Limit int
	// Reserved is the pool's physical memory, and Requested the size of its live
	// blocks, in bytes.
	Reserved, Requested int
}

// short is the refusal of the pool's budget, or nil if that is not the reason.
func (s *shortage) short() *budget.Shortage {
	var b *budget.Shortage
	errors.As(s.err, &b)
	return b
}

func (s *shortage) reason() error {
	switch s.kind {
	case errs.Budget:
		return cuda.ErrBudget
	case errs.OutOfAddressSpace:
		return cuda.ErrOutOfAddressSpace
	}
	return cuda.ErrOutOfMemory
}

// holders is how many tags a refusal names.
const holders = 3

// refusal is the error of a request that found no memory.
func (p *Pool) refusal(sh *shard, w *want, s *shortage) error {
	st := p.Stats()
	f := errs.Failure{Op: allocOp, Object: p.object.Called(), Kind: s.kind, Call: s.call, Result: s.result, Err: s.err}
	f.Asked = fmt.Sprintf("%s for stream %#x on %s; the pool has %s, of which %s are requested by live blocks",
		errs.Bytes(w.bytes), uintptr(sh.stream.Handle), p.where(), errs.Bytes(st.Reserved), errs.Bytes(st.Requested))
	if st.Waiting > 0 {
		f.Asked += ", with " + errs.Count(st.Waiting, "freed block") + " still waiting for other streams"
	}
	if tags := p.largest(&st); tags != "" {
		f.Asked += "; the largest holders: " + tags
	}
	lost := p.lost()
	switch {
	case lost != driver.Success:
		f.Kind, f.Result, f.Hint = errs.DeviceLost, lost, "restart the process; closing the pool drops what lies on the device"
	case s.short() != nil:
		b := s.short().Failure(allocOp)
		f.Asked += "; " + b.Asked
		f.Hint = "free blocks; " + b.Hint
	case s.kind == errs.Budget:
		f.Asked += fmt.Sprintf("; the limit is %s", errs.Bytes(st.Limit))
		f.Hint = "free blocks, or raise the limit with Pool.SetLimit"
		if w.kind == mid && uint64(st.Limit) < s.size {
			f.Hint = p.chunkHint("raise the limit with Pool.SetLimit")
		}
	case s.kind == errs.OutOfAddressSpace:
		f.Hint = "memory is not what ran out: close reservations, or other pools"
	case p.home == nil:
		f.Hint = "free blocks, or host memory that other programs hold"
	default:
		var lack core.Lack
		var withheld string
		if p.sys.HasContext(p.on[0]) { // asking would make one, which takes memory
			if free, total, err := p.home.MemoryInfo(); err == nil {
				f.Asked += fmt.Sprintf("; the device has %s free of %s", errs.Bytes(free), errs.Bytes(total))
				if w.kind == mid && w.size <= uint64(free) && uint64(free) < p.chunk {
					f.Hint = p.chunkHint("use a smaller Options.Chunk")
				}
				withheld = p.sys.Withheld(s.size, free)
				lack = core.Lack{Bytes: p.lacks(w), Free: uint64(free), Total: uint64(total)}
			}
		}
		f.Hint = cmp.Or(withheld, f.Hint, p.sys.Missing(p.on[0], lack), "free blocks, or what others hold of the device's memory")
	}
	return errs.New(f)
}

func (p *Pool) chunkHint(remedy string) string {
	return fmt.Sprintf("such requests are served in chunks of %s: %s", errs.Bytes(p.chunk), remedy)
}

// fewBlocks are how many live blocks a refusal goes through at most.
const fewBlocks = 1000

// largest names the tags that hold most: from the statistics, or, in a pool without
// them, if it has few blocks.
func (p *Pool) largest(st *Stats) string {
	type holder struct {
		tag    Tag
		blocks int
		bytes  int
	}
	var by []holder
	add := func(tag Tag, blocks, bytes int) {
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
				add(t.Tag, t.Blocks, t.Requested)
			}
		}
	case st.Blocks <= fewBlocks:
		p.each(func(h *header) { add(h.tag, 1, int(h.asked())) })
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
		names = append(names, fmt.Sprintf("%s %s in %d", name, errs.Bytes(h.bytes), h.blocks))
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
