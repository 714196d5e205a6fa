package vmm

import (
	"fmt"
	"unsafe"

	"github.com/cuvmm/cuvmm/cuda"
	"github.com/cuvmm/cuvmm/internal/core"
	"github.com/cuvmm/cuvmm/internal/driver"
)

// Host gives f the mapping's memory as a Go slice, for memory that lies on the
// host and that the host was granted read-write access to (SetAccess with the
// memory's own location). The slice is the memory itself: it must not be kept
// after f returns, and the GPU's work on it must have been waited for. The
// mapping stays open while f runs.
func (m *Mapping) Host(f func(data []byte) error) error {
	const op = "vmm.Mapping.Host"
	if !m.closer.Hold() {
		return core.ClosedError(op, "mapping")
	}
	defer m.closer.Drop()
	in := m.m
	in.res.mu.Lock()
	access := in.access
	if len(in.unsure) > 0 {
		access = nil
	}
	in.res.mu.Unlock()
	err := checkHost(op, in.phys.Asked.Location, access)
	if err != nil {
		return err
	}
	return f(hostBytes(in.ptr(), in.phys.Size))
}

// Host gives f the slice's elements as a Go slice, for a buffer whose memory
// lies on the host: the rules are those of Mapping.Host. The buffer takes
// nothing away while f runs, and does not grow: f must not use the buffer, nor
// slices of it, or it waits for itself.
func (s Slice[T]) Host(f func(data []T) error) error {
	const op = "vmm.Slice.Host"
	if s.buf == nil {
		return errZeroSlice(op)
	}
	s.buf.mu.RLock()
	defer s.buf.mu.RUnlock()
	if !s.buf.closer.Hold() {
		return core.ClosedError(op, "buffer")
	}
	defer s.buf.closer.Drop()
	if err := s.buf.checkStill(op, s.off, uint64(s.Size())); err != nil {
		return err
	}
	if err := checkHost(op, s.buf.prop.Location, s.buf.access); err != nil {
		return err
	}
	if s.len == 0 {
		return f(nil)
	}
	data := hostBytes(driver.Ptr(s.Ptr()), uint64(s.Size()))
	return f(unsafe.Slice((*T)(unsafe.Pointer(&data[0])), s.len))
}

// checkHost refuses memory that the host cannot touch: doing so would kill the
// process.
func checkHost(op string, memory driver.Location, access accessList) error {
	if memory.Type != driver.LocationHost && memory.Type != driver.LocationHostNUMA {
		return core.Error(core.Failure{Op: op, Kind: core.NotSupported,
			Asked: fmt.Sprintf("the CPU on memory of device %d", memory.ID),
			Hint:  "copy it, or create the memory on the host (cuda.OnHost, cuda.OnHostNUMA)"})
	}
	if mode := access.mode(memory); mode != driver.AccessReadWrite {
		loc := cuda.Location{Type: cuda.LocationType(memory.Type), ID: int(memory.ID)}
		return core.Error(core.Failure{Op: op, Kind: core.NotPermitted,
			Asked: fmt.Sprintf("the CPU has %v to memory on %v", AccessMode(mode), loc),
			Hint:  fmt.Sprintf("grant %v read-write access with SetAccess", loc)})
	}
	return nil
}

// hostBytes is memory at an address that is the driver's, not Go's.
func hostBytes(p driver.Ptr, n uint64) []byte {
	address := uintptr(p)
	return unsafe.Slice(*(**byte)(unsafe.Pointer(&address)), n)
}
