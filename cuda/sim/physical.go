package sim

import (
	"fmt"
	"iter"

	"github.com/cuvmm/cuvmm/internal/driver"
	"github.com/cuvmm/cuvmm/internal/host"
	"github.com/cuvmm/cuvmm/internal/ledger"
	"github.com/cuvmm/cuvmm/internal/osmem"
)

// PoisonByte fills fresh memory of a machine with [Options.Poison], and what a
// graph allocates for itself at each launch.
const PoisonByte = 0xdb

// pool is the memory of one location: a device, or the host. Its limit is
// exact; the system's memory is only taken when touched.
type pool struct {
	limit     uint64
	used      uint64         // without books
	books     *ledger.Ledger // of a machine that processes share
	index     int            // in the books
	arena     *osmem.Arena   // made at the first allocation
	placeable bool           // host memory: its pages can appear in the window
	free      ranges
	lost      bool // a checkpoint took the process's share of it, and its restore failed
}

func newPool(limit uint64, placeable bool) *pool {
	limit = wholePages(limit)
	p := &pool{limit: limit, placeable: placeable}
	p.free.put(span{0, limit})
	return p
}

func wholePages(n uint64) uint64 { return n / host.PageSize() * host.PageSize() }

// charge counts n bytes of a pool as taken, if so many are free or can be made
// free.
func (m *Machine) charge(p *pool, n uint64) bool {
	m.settle(all)
	if p.acquire(n) {
		return true
	}
	m.makeRoom(p, n-min(n, p.remaining()))
	return p.acquire(n)
}

// open makes the pool's arena.
func (p *pool) open() (err error) {
	if p.arena == nil {
		p.arena, err = osmem.NewArena(p.limit, p.placeable)
	}
	return err
}

// acquire counts n bytes as used, if so many are free.
func (p *pool) acquire(n uint64) bool {
	if p.books != nil {
		return p.books.Acquire(p.index, n)
	}
	if n > p.limit-p.used {
		return false
	}
	p.used += n
	return true
}

// give undoes acquire.
func (p *pool) give(n uint64) {
	if p.lost {
		return
	}
	if p.books != nil {
		p.books.Release(p.index, n)
		return
	}
	p.used -= n
}

// remaining returns how many bytes are free. On a machine that processes share, another one may
// acquire some at any time.
func (p *pool) remaining() uint64 {
	if p.books != nil {
		return p.books.Free(p.index)
	}
	return p.limit - p.used
}

// available is what remains, after reclaiming memory that no process holds any more.
func (m *Machine) available(p *pool) uint64 {
	m.settle(all)
	return p.remaining()
}

// memory is physical memory: pieces of its pool's arena at first, a memory
// file from its first export on. It lives as long as anything refers to it.
type memory struct {
	machine *Machine
	pool    *pool // nil for memory of another process
	size    uint64
	prop    driver.AllocationProp
	pieces  []span // while shared is nil
	piece   *piece // of a slab: small managed memory
	shared  *osmem.Shared
	id      uint64 // in the books, once it is shared there
	bound   uint64 // its number for multicast objects of this machine alone
	team    *team  // of a multicast object, which has no bytes of its own
	refs    int    // handles, mappings, work in progress
	busy    int    // copies in progress, which must not see the bytes move
	history history
}

// newMemory takes size bytes, in whole pages, from a pool. They read zero, or
// poison.
func (m *Machine) newMemory(p *pool, size uint64, prop driver.AllocationProp) (*memory, driver.Result) {
	if size > p.limit {
		return nil, driver.OutOfMemory
	}
	size = roundUp(size, host.PageSize())
	if !m.charge(p, size) {
		return nil, driver.OutOfMemory
	}
	mem := &memory{machine: m, pool: p, size: size, prop: prop, refs: 1}
	var err error
	if p.placeable && prop.RequestedHandleTypes&driver.HandlePosixFD != 0 {
		// The CPU may write host memory behind the machine's back, so it
		// cannot be moved into a file later.
		var s *osmem.Shared
		var id uint64
		if s, id, err = m.newShared(mem); err == nil {
			if err = mem.moveTo(s, id); err != nil {
				_ = s.Close()
			}
		}
	} else {
		if err = p.open(); err == nil {
			mem.pieces = p.free.acquirePieces(size)
		}
	}
	if err != nil {
		p.give(size)
		m.note("%v", err)
		return nil, driver.OutOfMemory
	}
	mem.poison()
	return mem, driver.Success
}

// poison fills the memory with PoisonByte if the options ask for it: a program must
// not rely on its contents.
func (mem *memory) poison() {
	if mem.machine.options.Poison {
		for b := range mem.runs(0, mem.size) {
			fill(b, PoisonByte)
		}
	}
}

// runs are the bytes [off, off+n) in as many contiguous pieces as there are.
func (mem *memory) runs(off, n uint64) iter.Seq[[]byte] {
	return func(yield func([]byte) bool) {
		switch {
		case n == 0:
			return
		case mem.shared != nil:
			yield(mem.shared.Bytes()[off : off+n])
			return
		case mem.piece != nil:
			yield(mem.piece.bytes[off : off+n])
			return
		}
		for at := range mem.arenaSpans(off, n) {
			for at.size() > 0 {
				b := mem.pool.arena.Run(at.lo, at.size())
				if !yield(b) {
					return
				}
				at.lo += uint64(len(b))
			}
		}
	}
}

// arenaSpans are the bytes [off, off+n) as offsets in the pool's arena.
func (mem *memory) arenaSpans(off, n uint64) iter.Seq[span] {
	return func(yield func(span) bool) {
		for _, piece := range mem.pieces {
			if n == 0 {
				return
			}
			if off >= piece.size() {
				off -= piece.size()
				continue
			}
			lo := piece.lo + off
			part := min(n, piece.hi-lo)
			if !yield(span{lo, lo + part}) {
				return
			}
			off, n = 0, n-part
		}
	}
}

// place makes the memory's pages appear at p, for the CPU. Host memory only.
func (mem *memory) place(p uint64, access osmem.Access) error {
	if mem.shared != nil {
		return mem.shared.Place(p, 0, mem.size, access)
	}
	for at := range mem.arenaSpans(0, mem.size) {
		if err := mem.pool.arena.Place(p, at.lo, at.size(), access); err != nil {
			return err
		}
		p += at.size()
	}
	return nil
}

// onHost reports whether the CPU can be given access at mapped addresses.
func (mem *memory) onHost() bool {
	return mem.team == nil && mem.prop.Location.Type != driver.LocationDevice
}

// drop releases one reference.
func (mem *memory) drop() {
	mem.refs--
	if mem.refs > 0 || mem.machine.dismantled {
		return
	}
	mem.machine.freedWhileBound(mem)
	if mem.team != nil {
		mem.team.end()
	}
	switch p := mem.pool; {
	case mem.team != nil && mem.shared == nil:
	case mem.id != 0:
		mem.machine.forgetShared(mem)
		_ = mem.shared.Close()
		mem.machine.books.Drop(mem.id)
	case p == nil:
		mem.machine.forgetShared(mem)
		_ = mem.shared.Close()
	case mem.shared != nil:
		mem.machine.held = append(mem.machine.held, held{file: mem.shared, mem: mem})
		mem.machine.settle(all)
	case mem.piece != nil:
		mem.piece.free()
		p.give(mem.size)
	default:
		p.discard(mem.pieces)
		p.give(mem.size)
	}
}

// discard makes pieces of the backing memory free.
func (p *pool) discard(pieces []span) {
	for _, piece := range pieces {
		if err := p.arena.Discard(piece.lo, piece.size()); err != nil {
			panic(fmt.Sprintf("sim: the system does not take memory back: %v", err))
		}
		p.free.put(piece)
	}
}

// unmap closes the memory's file, whatever still refers to it. It is idempotent.
func (mem *memory) unmap() {
	if mem.team != nil {
		mem.team.closeFiles(func(uint64) bool { return true })
	}
	if mem.shared != nil {
		_ = mem.shared.Close()
	}
}

func fill(b []byte, v byte) {
	if len(b) == 0 {
		return
	}
	b[0] = v
	for n := 1; n < len(b); n *= 2 {
		copy(b[n:], b[:n])
	}
}
