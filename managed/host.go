package managed

import (
	"fmt"
	"unsafe"

	"github.com/cuvmm/cuvmm/cuda"
	"github.com/cuvmm/cuvmm/internal/core"
	"github.com/cuvmm/cuvmm/internal/driver"
	"github.com/cuvmm/cuvmm/internal/errs"
)

// Host waits for the stream's work and gives f the range as a Go slice, which is
// the memory itself. Without a stream it waits for all work that it knows of, on
// every device, as Close does. Where a device has no concurrent managed access it
// waits for all work in either case.
//
// The buffer stays open while f runs, and no other Host works on the memory: it
// waits, as Close does; called by f itself both are ErrInUse, as Discard is from
// anywhere. f must not keep the slice. Nothing keeps other goroutines from
// launching work on the memory. While the stream captures a
// graph, or without a stream any that is known, it is ErrCapturing, since work
// that is captured cannot be waited for.
func (r Range) Host(on *cuda.Stream, f func(data []byte) error) error {
	const op = "managed.Range.Host"
	if f == nil {
		return errNoFunction(op)
	}
	return r.host(op, on, f)
}

func errNoFunction(op string) error {
	return errs.Invalid(op, "no function", "pass the function that works on the memory")
}

func (r Range) host(op string, on *cuda.Stream, f func(data []byte) error) error {
	if err := r.acquire(op); err != nil {
		return err
	}
	defer r.release()
	m := r.h.m
	if m.kind == hinted {
		return errs.New(errs.Failure{Op: op, Kind: errs.NotSupported, Asked: r.asked("the CPU at memory that is not managed,"),
			Hint: "copy it"})
	}
	if err := m.mayWait(op, on); err != nil {
		return err
	}
	if err := m.notInside(op); err != nil {
		return err
	}
	m.host.Lock()
	defer m.host.Unlock()
	if err := m.wait(op, on); err != nil {
		return err
	}
	if err := r.touch(op, true); err != nil {
		return err
	}
	m.hostBy.Store(core.Goroutine())
	defer m.hostBy.Store(0)
	return f(r.bytes())
}

// notInside refuses what would wait for a function of Host when it is that
// function which calls.
func (m *memory) notInside(op string) error {
	if by := m.hostBy.Load(); by == 0 || by != core.Goroutine() {
		return nil
	}
	return errs.New(errs.Failure{Op: op, Kind: errs.InUse, Asked: "a function works on the memory (Host), and calls this",
		Hint: "let the function return first"})
}

// Bytes is the range as a Go slice, without waiting for anything: the GPU's work
// on it is the caller's concern, as is that of a device without concurrent
// managed access. The slice is the memory itself. Whoever touches it after the
// memory was freed (by Close of the last Buffer, or of the allocator) crashes the
// process with a fault that cannot be recovered from, or writes into whatever
// lies there then. The software driver does not see what is done through the
// slice, so its pages stay where they are accounted.
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

// mayWait refuses to wait for what a capture keeps from ending.
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

// wait waits for the stream, or for everything.
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

// touch tells a driver that cannot see it that the CPU touches the memory.
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

// bytes is memory at an address that is the driver's, not Go's.
func (r Range) bytes() []byte {
	address := uintptr(r.Ptr())
	return unsafe.Slice(*(**byte)(unsafe.Pointer(&address)), r.n)
}
