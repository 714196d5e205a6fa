package sim

import (
	"unsafe"

	"github.com/cuvmm/cuvmm/internal/driver"
	"github.com/cuvmm/cuvmm/internal/host"
)

// A device with pageable memory access works on the operating system's memory at
// its own addresses, and takes advice and prefetches for it as for managed
// memory. The system does not report when such memory is freed, so pages of it on a
// device are counted there until they are moved away.

func newSystemMemory(m *Machine) *backing {
	const addresses = 1 << 56 // more than a process has
	r := &backing{m: m, kind: KindSystemMemory, span: span{0, addresses}}
	r.managed = &managed{pages: newPages(addresses, page{at: driver.DeviceInvalid}), attach: driver.AttachGlobal}
	return r
}

func (d *device) pageable() bool { return d.attributes[driver.AttrPageableMemoryAccess] != 0 }

// isSystem reports whether a device pages the system's memory, and that lies
// there.
func (m *Machine) isSystem(p, n uint64) bool {
	for _, d := range m.devices {
		if d.pageable() {
			return n <= m.system.hi && p < m.system.hi && !space.overlaps(span{p, p + n}) && host.Mapped(p, n)
		}
	}
	return false
}

// whole returns the pages that a span lies in.
func (r *backing) whole(s span) span {
	unit := host.PageSize()
	return span{s.lo / unit * unit, roundUp(s.hi, unit)}
}

// systemBytes is memory of the process at its own address.
func systemBytes(s span) []byte {
	address := uintptr(s.lo)
	return unsafe.Slice(*(**byte)(unsafe.Pointer(&address)), s.size())
}
