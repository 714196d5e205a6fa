package vmm

import (
	"unsafe"

	"github.com/cuvmm/cuvmm/internal/driver"
	"github.com/cuvmm/cuvmm/internal/errs"
	"github.com/cuvmm/cuvmm/internal/memspec"
	"github.com/cuvmm/cuvmm/internal/vrange"
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
	defer m.m.closer.Release()
	if f == nil {
		return errs.NoFunction(op)
	}
	in := m.m
	v, err := in.View(op, &m.m.closer.Life)
	if err != nil {
		return err
	}
	return in.Range.Views.Run(v, func() error { return f(hostBytes(in.Ptr(), in.Memory.Size)) })
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
		return s.buf.errClosed(op)
	}
	defer s.buf.closer.Release()
	v, err := s.look(op)
	if err != nil {
		return err
	}
	return s.buf.res.Views.Run(v, func() error {
		if s.len == 0 {
			return f(nil)
		}
		data := hostBytes(driver.Ptr(s.Ptr()), uint64(s.Size()))
		return f(unsafe.Slice((*T)(unsafe.Pointer(&data[0])), s.len))
	})
}

// look registers a Host function that uses the slice's memory.
func (s Slice[T]) look(op string) (*vrange.View, error) {
	s.buf.mu.RLock()
	defer s.buf.mu.RUnlock()
	if s.buf.closer.Closed() { // its Close saw no function
		return nil, s.buf.errClosed(op)
	}
	if err := s.buf.checkStill(op, hosting, s.off, uint64(s.Size()), int(sizeOf[T]())); err != nil {
		return nil, err
	}
	if err := memspec.CheckHost(op, s.buf.prop.Location, s.buf.access.Mode(s.buf.prop.Location)); err != nil {
		return nil, err
	}
	return s.buf.res.Views.Open(s.off, uint64(s.Size())), nil
}

// hostBytes returns n bytes at an address as a slice. The driver owns the memory, not Go.
func hostBytes(p driver.Ptr, n uint64) []byte {
	address := uintptr(p)
	return unsafe.Slice(*(**byte)(unsafe.Pointer(&address)), n)
}
