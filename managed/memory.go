package managed

import (
	"fmt"
	"sync"
	"sync/atomic"

	"github.com/cuvmm/cuvmm/cuda"
	"github.com/cuvmm/cuvmm/internal/core"
	"github.com/cuvmm/cuvmm/internal/driver"
	"github.com/cuvmm/cuvmm/internal/errs"
	"github.com/cuvmm/cuvmm/internal/life"
)

// memory is a managed allocation, or somebody else's that is looked at. Several
// Buffers may have it; it goes with the last of them, or with its Allocator.
type memory struct {
	core.Object
	// life is held by every operation on the memory, whichever Buffer it comes
	// from.
	life life.Life
	sys  *core.System
	dev  *cuda.Device
	ctx  *core.Context
	ptr  driver.Ptr
	size uint64
	kind kind
	from *allocator // nil where New made it

	// host is held while the CPU works on the memory, and for reading while
	// something is submitted that leaves its contents undefined.
	host sync.RWMutex
	// hostBy is the goroutine on which a function of Host runs, 0 for none.
	hostBy atomic.Uint64
	// advice is held over changes of advice, so that they can be undone.
	advice sync.Mutex

	// mu guards what follows. It is held while the memory is freed, which waits.
	mu   sync.Mutex
	refs int
	gone bool
	// unfenced: a Buffer was closed without streams while others had the memory,
	// so its work is waited for when the memory goes.
	unfenced bool
	// freeing answers what a free on a goroutine of its own came to.
	freeing chan error
}

// kind says whose memory it is.
type kind uint8

const (
	owned kind = iota
	viewed
	// hinted memory is not managed: operations on it do nothing.
	hinted
)

// retain is for one Buffer more.
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
			Hint: "an allocator's buffers end with it: keep it open while they are used"})
	}
	return errs.ClosedError(op, "buffer")
}

// drop ends one Buffer. The last one waits for all work that could use the
// memory, and frees it.
func (m *memory) drop(op string) error {
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

// dropLater is drop for the reclaimer, which must not be held up: the free runs
// on a goroutine of its own.
func (m *memory) dropLater(op string) error {
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

// free gives the memory back. The caller holds mu.
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

// fail is the error of a driver call on the whole of the memory.
func (m *memory) fail(op string, c driver.Call, r driver.Result) error {
	return m.ctx.CallError(op, c, r, fmt.Sprintf("%s of managed memory at %#x on %v", errs.Bytes(m.size), uint64(m.ptr), m.dev))
}
