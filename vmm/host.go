package vmm

import (
	"fmt"
	"unsafe"

	"github.com/cuvmm/cuvmm/cuda"
	"github.com/cuvmm/cuvmm/internal/driver"
	"github.com/cuvmm/cuvmm/internal/errs"
)

// Host calls f with the mapping's memory as a Go slice. The memory must be on the
// host, and the host must have read-write access (SetAccess with the memory's own
// location). The slice is the memory itself: f must not keep it, and the caller must
// have waited for the GPU's work on it.
//
// Until f returns, operations that take the memory or the host's access away return
// ErrInUse, except CloseAfter and ClipAfter, which take effect after f has returned. All
// other operations are allowed, in f and concurrently.
func (m *Mapping) Host(f func(data []byte) error) error {
	const op = "vmm.Mapping.Host"
	if err := m.acquire(op); err != nil {
		return err
	}
	defer m.closer.Release()
	if f == nil {
		return errs.NoFunction(op)
	}
	in := m.m
	v, err := m.look(op)
	if err != nil {
		return err
	}
	return in.res.views.run(v, func() error { return f(hostBytes(in.ptr(), in.phys.Size)) })
}

// look registers a Host function that uses the mapping's memory.
func (m *Mapping) look(op string) (*view, error) {
	in := m.m
	in.res.mu.Lock()
	defer in.res.mu.Unlock()
	// Its Close, or that of the range, saw no function.
	if m.closer.Closed() || in.res.closer.Closed() {
		return nil, errs.ClosedError(op, "mapping")
	}
	mode := in.access.mode(in.phys.Asked.Location)
	if len(in.unsure) > 0 {
		mode = driver.AccessNone
	}
	if err := checkHost(op, in.phys.Asked.Location, mode); err != nil {
		return nil, err
	}
	return in.res.views.open(in.off, in.phys.Size), nil
}

// Host calls f with the slice's elements as a Go slice, for a buffer whose memory is on
// the host. The rules are those of Mapping.Host. Meanwhile the buffer can grow and be
// copied from and to, also by f.
func (s Slice[T]) Host(f func(data []T) error) error {
	const op = "vmm.Slice.Host"
	if s.buf == nil {
		return errZeroSlice(op)
	}
	if f == nil {
		return errs.NoFunction(op)
	}
	if !s.buf.closer.Acquire() {
		return errs.ClosedError(op, "buffer")
	}
	defer s.buf.closer.Release()
	v, err := s.look(op)
	if err != nil {
		return err
	}
	return s.buf.res.views.run(v, func() error {
		if s.len == 0 {
			return f(nil)
		}
		data := hostBytes(driver.Ptr(s.Ptr()), uint64(s.Size()))
		return f(unsafe.Slice((*T)(unsafe.Pointer(&data[0])), s.len))
	})
}

// look registers a Host function that uses the slice's memory.
func (s Slice[T]) look(op string) (*view, error) {
	s.buf.mu.RLock()
	defer s.buf.mu.RUnlock()
	if s.buf.closer.Closed() { // its Close saw no function
		return nil, errs.ClosedError(op, "buffer")
	}
	if err := s.buf.checkStill(op, s.off, uint64(s.Size()), int(sizeOf[T]())); err != nil {
		return nil, err
	}
	if err := checkHost(op, s.buf.prop.Location, s.buf.access.mode(s.buf.prop.Location)); err != nil {
		return nil, err
	}
	return s.buf.res.views.open(s.off, uint64(s.Size())), nil
}

// checkHost refuses memory that the host cannot access: the access would crash the
// process.
func checkHost(op string, memory driver.Location, mode driver.AccessFlags) error {
	if memory.Type != driver.LocationHost && memory.Type != driver.LocationHostNUMA {
		return errs.New(errs.Failure{Op: op, Kind: errs.NotSupported,
			Asked: fmt.Sprintf("the CPU on memory of device %d", memory.ID),
			Hint:  "copy it, or create the memory on the host (cuda.OnHost, cuda.OnHostNUMA)"})
	}
	if mode != driver.AccessReadWrite {
		loc := cuda.Location{Type: cuda.LocationType(memory.Type), ID: int(memory.ID)}
		return errs.New(errs.Failure{Op: op, Kind: errs.NotPermitted,
			Asked: fmt.Sprintf("the CPU has %v to memory on %v", AccessMode(mode), loc),
			Hint:  fmt.Sprintf("grant %v read-write access with SetAccess", loc)})
	}
	return nil
}

// hostBytes returns n bytes at an address as a slice. The driver owns the memory, not Go.
func hostBytes(p driver.Ptr, n uint64) []byte {
	address := uintptr(p)
	return unsafe.Slice(*(**byte)(unsafe.Pointer(&address)), n)
}
