package managed

import (
	"fmt"
	"sync"

	"github.com/cuvmm/cuvmm/cuda"
	"github.com/cuvmm/cuvmm/internal/core"
	"github.com/cuvmm/cuvmm/internal/driver"
	"github.com/cuvmm/cuvmm/internal/errs"
	"github.com/cuvmm/cuvmm/internal/life"
)

// memory is a managed allocation, or a view of foreign memory. Several Buffers may share
// it; it is freed with the last of them, or with its Allocator.
type memory struct {
	core.Object
	// life is acquired by every operation on the memory, of any Buffer.
	life life.Life
	sys  *core.System
	dev  *cuda.Device
	ctx  *core.Context
	ptr  driver.Ptr
	size uint64
	kind kind
	from *allocator // nil if New made it

	// host is held while a Host function runs, and for reading while work is submitted
	// that makes the contents undefined.
	host sync.RWMutex
	// accesses are the running Host functions; an allocator's memory shares them.
	accesses *accesses
	// advice is held during changes of advice, so that they can be undone.
	advice sync.Mutex

	// mu guards the fields below. It is held while the memory is freed, which waits.
	mu   sync.Mutex
	refs int
	gone bool
	// unfenced is set if a Buffer was closed without streams while others shared the
	// memory: its work is waited for when the memory is freed.
	unfenced bool
	// freeing receives the result of a free on a separate goroutine.
	freeing chan error
}

// kind is the ownership of memory.
type kind uint8

const (
	owned kind = iota
	viewed
	// hinted memory is not managed (ViewOptions.Hint): operations on it do nothing.
	hinted
)

// retain adds a Buffer.
func (m *memory) retain(op string) error {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.gone {
		return m.closedError(op)
	}
	m.refs++
	return nil
}

func (m *memory) closedError(op string) error {
	if m.from != nil && m.from.closer.Closed() {
		return errs.New(errs.Failure{Op: op, Kind: errs.Closed, Asked: "the buffer's allocator is closed",
			Hint: "an allocator's buffers are closed with it: keep it open while they are used"})
	}
	return errs.ClosedError(op, "buffer")
}

// release removes one Buffer. The last one waits for all work that could use the memory,
// and frees it.
func (m *memory) release(op string) error {
	m.mu.Lock()
	defer m.mu.Unlock()
	if !m.gone && m.refs == 1 {
		if err := m.free(op, true); err != nil {
			return err
		}
	}
	m.refs--
	m.unfenced = true
	return nil
}

// releaseLater is release for the reclaimer, which must not be blocked: the free runs on a
// separate goroutine.
func (m *memory) releaseLater(op string) error {
	if !m.mu.TryLock() {
		return life.ErrAgain // it is being freed
	}
	defer m.mu.Unlock()
	if !m.gone && m.refs == 1 {
		if m.freeing == nil {
			m.freeing = make(chan error, 1)
			m.sys.Go(func() {
				m.mu.Lock()
				defer m.mu.Unlock()
				m.freeing <- m.free(op, m.unfenced)
			})
			return life.ErrAgain
		}
		select {
		case err := <-m.freeing:
			m.freeing = nil
			if err != nil {
				return err
			}
		default:
			return life.ErrAgain
		}
	}
	m.refs--
	return nil
}

// free frees the memory. The caller holds mu.
func (m *memory) free(op string, wait bool) error {
	if m.gone {
		return nil
	}
	m.life.Close()
	m.life.Wait()
	if m.kind == owned {
		if wait {
			if err := m.sys.WaitAll(op); err != nil {
				return err
			}
		}
		free := func() driver.Result { return m.sys.Drv.MemFree(m.ctx.Handle, m.ptr) }
		if r := m.ctx.Teardown(free); r != driver.Success {
			return m.fail(op, driver.CallMemFree, r)
		}
		m.Untrack()
		if m.from != nil {
			m.from.freed(m)
		}
	}
	m.gone = true
	return nil
}

// fail returns the error of a driver call on all of the memory.
func (m *memory) fail(op string, c driver.Call, r driver.Result) error {
	return m.ctx.CallError(op, c, r, fmt.Sprintf("%s of managed memory at %#x on %v", errs.Bytes(m.size), uint64(m.ptr), m.dev))
}
