package bulk

import (
	"errors"
	"fmt"
	"maps"
	"slices"
	"sync/atomic"
	"unsafe"

	"github.com/cuvmm/cuvmm/internal/core"
	"github.com/cuvmm/cuvmm/internal/driver"
	"github.com/cuvmm/cuvmm/internal/errs"
	"github.com/cuvmm/cuvmm/internal/host"
	"github.com/cuvmm/cuvmm/internal/limits"
	"github.com/cuvmm/cuvmm/internal/lock"
	"github.com/cuvmm/cuvmm/internal/osmem"
)

// slabBytes is the size of a slab, the unit in which host memory is pinned and retained: so
// small that the first is pinned soon and the last one's copy takes little, so large that a
// driver call for each is cheap.
const slabBytes = 16 << 20

// slab is host memory of one size class, a power of two of huge pages.
type slab struct {
	mem  []byte
	node int
	// ctx is the context in which the memory is pinned, nil while it is not. Every device can
	// use it.
	ctx *core.Context
	// promised: its pages do not exist yet, so the system does not count them.
	promised bool
}

// promised is how much memory the slabs of this process are that has no pages yet.
var promised atomic.Int64

// pin makes the slab's pages and pins them. A slab that is pinned stays so.
func (s *slab) pin(op string, c *core.Context) error {
	if s.ctx != nil {
		return nil
	}
	if s.promised {
		if err := osmem.Populate(s.mem); err != nil {
			return errs.New(errs.Failure{Op: op, Kind: errs.OutOfMemory, Asked: errs.Bytes(len(s.mem)) + " of host memory", Err: err,
				Hint: "ask for less, or end what else takes memory on this machine"})
		}
		s.fulfil()
	}
	r := c.System().Drv.MemHostRegister(c.Handle, unsafe.Pointer(&s.mem[0]), uint64(len(s.mem)), driver.HostRegisterPortable)
	if r != driver.Success {
		return c.CallError(op, driver.CallMemHostRegister, r, fmt.Sprintf("pin %s of host memory", errs.Bytes(len(s.mem))))
	}
	s.ctx = c
	return nil
}

func (s *slab) fulfil() {
	if s.promised {
		s.promised = false
		promised.Add(-int64(len(s.mem)))
	}
}

// free unpins the slab, which waits for all work of its context, and unmaps it. After an
// error it can be called again.
func (s *slab) free() error {
	if c := s.ctx; c != nil {
		r := c.Teardown(func() driver.Result { return c.System().Drv.MemHostUnregister(c.Handle, unsafe.Pointer(&s.mem[0])) })
		if r != driver.Success {
			return c.CallError("cuda.System.TrimHost", driver.CallMemHostUnregister, r, "idle pinned host memory")
		}
		s.ctx = nil
	}
	s.fulfil()
	return osmem.Free(s.mem)
}

// class is what slabs replace each other by.
type class struct {
	node  int
	bytes uint64
}

// store has a System's engines and their host memory. Memory that was used stays pinned for the
// next use, because pinning is several times slower than copying, and because unpinning stalls
// the launches of all threads.
type store struct {
	mu   lock.Mutex[lock.Leaf]
	idle map[class][]*slab
	// idleBytes are retained up to retain.
	idleBytes, retain uint64
	// kept are slabs that a copy may still use, since its end is not known. They are given
	// back when the System closes.
	kept    []*slab
	engines map[*core.Context]*Engine
}

type storeKey struct{}

func storeOf(s *core.System) *store {
	return core.Attached(s, storeKey{}, func() *store {
		return &store{idle: map[class][]*slab{}, retain: defaultRetain(), engines: map[*core.Context]*Engine{}}
	})
}

func (st *store) engine(ctx *core.Context) *Engine {
	st.mu.Lock()
	defer st.mu.Unlock()
	e := st.engines[ctx]
	if e == nil {
		e = &Engine{ctx: ctx, store: st}
		st.engines[ctx] = e
	}
	return e
}

// readHost is replaced by tests.
var readHost = limits.OfHost

// defaultRetain is half of the memory that the process may have.
func defaultRetain() uint64 {
	h, _ := readHost() // a limit that cannot be read is not known
	if l, ok := h.Lowest(); ok {
		return l.Bytes / 2
	}
	return 1 << 62
}

// Retain sets how many bytes of idle pinned memory the engine's System retains for later
// operations. The default is half of the memory that the process may have. What is more by
// now is given back by the next operation that ends, or by System.TrimHost.
func (e *Engine) Retain(bytes uint64) {
	e.store.mu.Lock()
	defer e.store.mu.Unlock()
	e.store.retain = bytes
}

// get returns slabs of those classes: idle ones, which are pinned, and new ones, which are
// not. New memory is counted against the limits before it is taken.
func (st *store) get(op string, node int, sizes []uint64) ([]*slab, error) {
	all := make([]*slab, len(sizes))
	fresh := uint64(0)
	for i, size := range sizes {
		if all[i] = st.pop(class{node, size}); all[i] == nil {
			fresh += size
		}
	}
	if fresh == 0 {
		return all, nil
	}
	mem, err := st.newMemory(op, node, fresh)
	if err != nil {
		st.put(all)
		return nil, err
	}
	for i, size := range sizes {
		if all[i] == nil {
			all[i] = &slab{mem: mem[:size:size], node: node, promised: true}
			mem = mem[size:]
		}
	}
	return all, nil
}

// newMemory maps memory that is not there yet, and promises it.
func (st *store) newMemory(op string, node int, n uint64) (mem []byte, err error) {
	promised.Add(int64(n)) // before the check, so that two do not take the same memory
	defer func() {
		if err != nil {
			promised.Add(-int64(n))
		}
	}()
	if err := st.check(op, n); err != nil {
		return nil, err
	}
	if mem, err = osmem.AllocHuge(n); err != nil {
		return nil, errs.New(errs.Failure{Op: op, Kind: errs.OutOfMemory, Asked: errs.Bytes(n) + " of host memory", Err: err})
	}
	// A node without free memory, or a sandbox without the call, is no reason to fail.
	_ = host.Prefer(mem, node)
	return mem, nil
}

// check compares new memory, which is promised already, with what remains. Slabs that are
// retained are given back first, if that is what it takes.
func (st *store) check(op string, n uint64) error {
	for trimmed := false; ; trimmed = true {
		limited, _ := readHost() // a limit that cannot be read is not known
		for i := range limited {
			limited[i].Used += uint64(promised.Load()) - n
		}
		err := limited.Check(n)
		if err == nil {
			return nil
		}
		if bytes, _ := st.Trim(); bytes == 0 || trimmed {
			var e *limits.Exceeded
			errors.As(err, &e)
			return errs.New(errs.Failure{Op: op, Kind: errs.OutOfMemory, Err: err, Hint: e.Remedy()})
		}
	}
}

// pop returns an idle slab of the class, or nil. One that was pinned in a context which is lost
// by now must not be used.
func (st *store) pop(k class) *slab {
	st.mu.Lock()
	defer st.mu.Unlock()
	for n := len(st.idle[k]); n > 0; n = len(st.idle[k]) {
		s := st.idle[k][n-1]
		st.idle[k] = st.idle[k][:n-1]
		st.idleBytes -= k.bytes
		if s.ctx.Lost() == driver.Success {
			return s
		}
		st.kept = append(st.kept, s)
	}
	return nil
}

// put takes slabs back: no copy uses them. Pinned ones are idle then; those that never were
// are unmapped.
func (st *store) put(slabs []*slab) {
	for _, s := range slabs {
		if s == nil {
			continue
		}
		if s.ctx == nil {
			_ = s.free() // only its unmapping, which does not fail
			continue
		}
		st.mu.Lock()
		k := class{s.node, uint64(len(s.mem))}
		st.idle[k] = append(st.idle[k], s)
		st.idleBytes += uint64(len(s.mem))
		st.mu.Unlock()
	}
}

// keep takes slabs that may be in use by work of unknown end, if they were pinned.
func (st *store) keep(slabs []*slab) {
	for _, s := range slabs {
		if s.ctx == nil {
			st.put([]*slab{s})
			continue
		}
		st.mu.Lock()
		st.kept = append(st.kept, s)
		st.mu.Unlock()
	}
}

// Idle returns how many bytes of idle slabs are pinned.
func (st *store) Idle() int {
	st.mu.Lock()
	defer st.mu.Unlock()
	return int(st.idleBytes)
}

// Trim frees the idle slabs.
func (st *store) Trim() (bytes int, err error) { return st.trimTo(0) }

// trimToLimit frees idle slabs beyond the limit. What the driver does not take stays idle.
func (st *store) trimToLimit() {
	st.mu.Lock()
	retain := st.retain
	st.mu.Unlock()
	_, _ = st.trimTo(retain)
}

// trimTo frees idle slabs until at most so many bytes are idle, or the driver refuses one.
func (st *store) trimTo(most uint64) (bytes int, err error) {
	for {
		s := st.popAny(most)
		if s == nil {
			return bytes, nil
		}
		if err := s.free(); err != nil {
			st.put([]*slab{s})
			return bytes, err
		}
		bytes += len(s.mem)
	}
}

func (st *store) popAny(most uint64) *slab {
	st.mu.Lock()
	defer st.mu.Unlock()
	if st.idleBytes <= most {
		return nil
	}
	for k, list := range st.idle {
		if n := len(list); n > 0 {
			st.idle[k] = list[:n-1]
			st.idleBytes -= k.bytes
			return list[n-1]
		}
	}
	return nil
}

// Close frees everything. Nothing is in use.
func (st *store) Close() error {
	st.mu.Lock()
	kept, engines := st.kept, slices.Collect(maps.Values(st.engines))
	st.kept = nil
	st.mu.Unlock()
	for _, e := range engines {
		if err := e.close(); err != nil {
			return err
		}
	}
	st.put(kept)
	_, err := st.Trim()
	return err
}
