package cuda

import (
	"fmt"
	"math/bits"
	"unsafe"

	"github.com/cuvmm/cuvmm/internal/core"
	"github.com/cuvmm/cuvmm/internal/driver"
	"github.com/cuvmm/cuvmm/internal/errs"
	"github.com/cuvmm/cuvmm/internal/lock"
)

// smallestPinned is the smallest block of pinned memory to allocate: the driver rounds to
// pages anyway.
const smallestPinned = 4096

// pinnedBlock is pinned host memory in the pool's hands or in a user's.
type pinnedBlock struct {
	mem  unsafe.Pointer
	size int
	ctx  *core.Context
}

// pinnedPool keeps pinned memory that was returned, since both pinning and unpinning
// are slow, and unpinning stalls the launches of all threads until the context's work
// is done. It releases memory only in System.Close and System.TrimHost. Blocks are
// portable: every device can use them.
type pinnedPool struct {
	mu   lock.Mutex[lock.Leaf]
	free map[int][]pinnedBlock
	kept []pinnedBlock
}

// pinnedClass rounds a size up so that at most an eighth is wasted and blocks
// of nearby sizes replace each other.
func pinnedClass(n int) int {
	n = max(n, smallestPinned)
	step := max(1<<(bits.Len(uint(n-1))-1)/8, smallestPinned)
	return (n + step - 1) / step * step
}

func (p *pinnedPool) get(op string, c *core.Context, n int) (pinnedBlock, error) {
	class := pinnedClass(n)
	if b, ok := p.idleBlock(class); ok {
		return b, nil
	}
	mem, r := c.System().Drv.MemHostAlloc(c.Handle, uint64(class), driver.HostAllocPortable)
	if r != driver.Success {
		c.Observe(r)
		return pinnedBlock{}, errs.New(errs.Failure{Op: op, Call: driver.CallMemHostAlloc, Result: r,
			Asked: fmt.Sprintf("%s of pinned host memory", errs.Bytes(class)),
			Hint:  "ask for less, or close host buffers and call System.TrimHost"})
	}
	return pinnedBlock{mem, class, c}, nil
}

// idleBlock takes an idle block. A block that was pinned by a context which is lost now
// must not be used.
func (p *pinnedPool) idleBlock(class int) (pinnedBlock, bool) {
	p.mu.Lock()
	defer p.mu.Unlock()
	for list := p.free[class]; len(list) > 0; list = p.free[class] {
		b := list[len(list)-1]
		p.free[class] = list[:len(list)-1]
		if b.ctx.Lost() == driver.Success {
			return b, true
		}
		p.kept = append(p.kept, b)
	}
	return pinnedBlock{}, false
}

func (p *pinnedPool) put(b pinnedBlock) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.free == nil {
		p.free = map[int][]pinnedBlock{}
	}
	p.free[b.size] = append(p.free[b.size], b)
}

// giveBack puts a block that was in use since there had been so many losses. If a
// context was lost meanwhile its work was not waited for, and may still copy from or to
// the block.
func (p *pinnedPool) giveBack(b pinnedBlock, losses int64) {
	if b.ctx.System().Losses() != losses {
		p.keep(b)
		return
	}
	p.put(b)
}

// keep takes a block that must never be used again, since work whose end is unknown may
// still copy from or to it. It is released when the System closes.
func (p *pinnedPool) keep(b pinnedBlock) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.kept = append(p.kept, b)
}

// close releases every block. None is in use any more.
func (p *pinnedPool) close(sys *core.System) driver.Result {
	p.mu.Lock()
	kept := p.kept
	p.kept = nil
	p.mu.Unlock()
	for _, b := range kept {
		p.put(b)
	}
	_, r := p.trim(sys)
	return r
}

// trim releases idle blocks and returns how many bytes those were. A block that the
// driver does not release stays idle.
func (p *pinnedPool) trim(sys *core.System) (bytes int, r driver.Result) {
	p.mu.Lock()
	free := p.free
	p.free = nil
	p.mu.Unlock()
	for _, list := range free {
		for _, b := range list {
			free := func() driver.Result { return sys.Drv.MemFreeHost(b.ctx.Handle, b.mem) }
			if res := b.ctx.Teardown(free); res != driver.Success {
				r = res
				p.put(b)
				continue
			}
			bytes += b.size
		}
	}
	return bytes, r
}

// idle returns how many bytes of blocks are idle.
func (p *pinnedPool) idle() (bytes int) {
	p.mu.Lock()
	defer p.mu.Unlock()
	for size, list := range p.free {
		bytes += size * len(list)
	}
	return bytes
}

// TrimHost releases idle pinned host memory to the operating system: what no HostBuffer
// uses, and what large copies retain for the next ones. It returns how many bytes it
// released. The driver waits for all running work meanwhile, and stalls launches: call it
// when nothing is urgent.
func (s *System) TrimHost() int {
	bytes, _ := s.pinned.trim(s.core)
	retained, _ := s.core.TrimAttached()
	return bytes + retained
}
