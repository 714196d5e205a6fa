package managed

import (
	"fmt"
	"sync"
	"unsafe"

	"github.com/cuvmm/cuvmm/cuda"
	"github.com/cuvmm/cuvmm/internal/core"
	"github.com/cuvmm/cuvmm/internal/driver"
	"github.com/cuvmm/cuvmm/internal/errs"
	"github.com/cuvmm/cuvmm/internal/life"
)

// Host waits for the stream's work and calls f with the range as a Go slice, which is the
// memory itself. Without a stream it waits for all known work, on every device, as Close
// does. If any device has no concurrent managed access it always waits for all work.
//
// While f runs, Close of the buffer and of its allocator, another Host on the memory and
// Discard return ErrInUse. f must not keep the slice. Other goroutines are not prevented from launching work on the memory.
// While the stream, or without a stream any known one, captures a graph, Host returns
// ErrCapturing, since captured work cannot be waited for.
func (r Range) Host(on *cuda.Stream, f func(data []byte) error) error {
	return r.host("managed.Range.Host", on, f)
}

func (r Range) host(op string, on *cuda.Stream, f func(data []byte) error) error {
	if err := r.acquire(op); err != nil {
		return err
	}
	defer r.release()
	if f == nil {
		return errs.NoFunction(op)
	}
	m := r.h.m
	if m.kind == hinted {
		return errs.New(errs.Failure{Op: op, Kind: errs.NotSupported, Asked: r.asked("the CPU at memory that is not managed,"),
			Hint: "copy it"})
	}
	if err := m.mayWait(op, on); err != nil {
		return err
	}
	if err := m.accesses.begin(op, r.h); err != nil {
		return err
	}
	defer m.accesses.end(m)
	m.host.Lock()
	defer m.host.Unlock()
	if err := m.wait(op, on); err != nil {
		return err
	}
	if err := r.touch(op, true); err != nil {
		return err
	}
	return f(r.bytes())
}

// accesses are the running Host functions on one memory, or on all memory of an allocator:
// the handle that each uses. Its lock is a leaf.
type accesses struct {
	mu sync.Mutex
	by map[*memory]*handle
}

func errLook(op string) error {
	return errs.New(errs.Failure{Op: op, Kind: errs.InUse, Asked: "memory that a Host function uses", Hint: "let the function return first"})
}

// begin registers a function, unless another runs on the memory or a Close has begun.
func (l *accesses) begin(op string, h *handle) error {
	l.mu.Lock()
	defer l.mu.Unlock()
	switch {
	case l.by[h.m] != nil:
		return errLook(op)
	case h.closer.Closed():
		return errs.ClosedError(op, "buffer")
	case h.m.from != nil && h.m.from.closer.Closed():
		return h.m.closedError(op)
	case l.by == nil:
		l.by = map[*memory]*handle{}
	}
	l.by[h.m] = h
	return nil
}

func (l *accesses) end(m *memory) {
	l.mu.Lock()
	defer l.mu.Unlock()
	delete(l.by, m)
}

// shut closes the life of a handle, or of an allocator if there is none, unless a function
// uses it.
func (l *accesses) shut(op string, h *handle, of *life.Life) error {
	l.mu.Lock()
	defer l.mu.Unlock()
	for _, by := range l.by {
		if h == nil || by == h {
			return errLook(op)
		}
	}
	of.Close()
	return nil
}

// Bytes returns the range as a Go slice, which is the memory itself. It waits for nothing:
// the caller synchronizes with the GPU's work, including all work of a device without
// concurrent managed access. Accessing the slice after the memory was freed (by Close of
// the last Buffer, or of the allocator) crashes the process with a fault that cannot be
// recovered, or corrupts other memory. The software driver does not see accesses through
// the slice: in its accounting the pages do not move.
func (r Range) Bytes() ([]byte, error) {
	const op = "managed.Range.Bytes"
	if err := r.acquire(op); err != nil {
		return nil, err
	}
	defer r.release()
	if r.h.m.kind == hinted {
		return nil, errs.New(errs.Failure{Op: op, Kind: errs.NotSupported, Asked: r.asked("the CPU at memory that is not managed,"),
			Hint: "copy it"})
	}
	if err := r.touch(op, false); err != nil {
		return nil, err
	}
	return r.bytes(), nil
}

// mayWait refuses to wait for work that is being captured.
func (m *memory) mayWait(op string, on *cuda.Stream) error {
	if on != nil {
		st := core.StreamOf(on)
		if err := st.Use(op, m.sys); err != nil {
			return err
		}
		defer st.Release()
		return notCapturing(op, st)
	}
	st, r := m.sys.CapturingStream()
	switch {
	case r != driver.Success:
		return st.Ctx.CallError(op, driver.CallStreamIsCapturing, r, fmt.Sprintf("stream %#x", uintptr(st.Handle)))
	case st != nil:
		return core.CapturingError(op, st)
	}
	return nil
}

// wait waits for the stream, or for all work.
func (m *memory) wait(op string, on *cuda.Stream) error {
	if on != nil {
		if err := on.Synchronize(); err != nil {
			return fmt.Errorf("%s: %w", op, err)
		}
		if m.allConcurrent(op) == nil {
			return nil
		}
	}
	return m.sys.WaitAll(op)
}

// touch reports the CPU's access to a driver that cannot observe it.
func (r Range) touch(op string, write bool) error {
	m := r.h.m
	d, ok := m.sys.Drv.(driver.HostTouched)
	if !ok {
		return nil
	}
	f := errs.Failure{Op: op, Asked: r.asked("the CPU at memory")}
	switch res := d.HostTouch(driver.Ptr(r.Ptr()), r.n, write); res {
	case driver.Success:
		return nil
	case driver.NotSupported:
		f.Kind, f.Hint = errs.NotSupported, "the software driver has memory that the CPU reaches on Linux alone"
	case driver.IllegalState:
		f.Kind, f.Hint = errs.InUse, "the device has no concurrent managed access and works: on a real one the process would crash here; wait for the device"
	case driver.OutOfMemory:
		f.Kind, f.Hint = errs.OutOfMemory, "the host has no room for the pages"
	default:
		f.Asked += fmt.Sprintf(": %v", res)
	}
	return errs.New(f)
}

// bytes returns the range's memory, which the driver owns, not Go.
func (r Range) bytes() []byte {
	address := uintptr(r.Ptr())
	return unsafe.Slice(*(**byte)(unsafe.Pointer(&address)), r.n)
}
