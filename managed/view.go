package managed

import (
	"fmt"

	"github.com/cuvmm/cuvmm/cuda"
	"github.com/cuvmm/cuvmm/internal/core"
	"github.com/cuvmm/cuvmm/internal/driver"
	"github.com/cuvmm/cuvmm/internal/osmem"
)

// ViewOptions change what View takes.
type ViewOptions struct {
	// Hint takes memory that is not managed too: operations on it then do nothing
	// and answer no error, and whatever is read of it reads as if it had never
	// been set. For programs whose memory is managed only sometimes.
	Hint bool
}

// View is a Buffer of n bytes of managed memory that was made elsewhere, looked
// at from the device: another library's, a pool's, or memory of the operating
// system where the device pages that. The driver is asked whether it is. The
// memory stays its maker's, who keeps it while the Buffer is used; Close gives
// nothing back. It must not be memory of Go's.
func View(d *cuda.Device, p cuda.Ptr, n int, o ViewOptions) (*Buffer, error) {
	const op = "managed.View"
	switch {
	case d == nil:
		return nil, core.Invalid(op, "a nil device", "take one from System.Devices")
	case p == 0 || n <= 0 || n > maxBytes || uint64(p)+uint64(n) < uint64(p):
		return nil, core.Invalid(op, fmt.Sprintf("%d bytes at %v", n, p), "name the memory's address, and at least one byte")
	}
	ctx, err := core.ContextOf(d)
	if err != nil {
		return nil, err
	}
	m := &memory{sys: core.SystemOf(d), dev: d, ctx: ctx, ptr: driver.Ptr(p), size: uint64(n), kind: viewed, refs: 1}
	if err := m.checkManaged(op); err != nil {
		if !o.Hint || ctx.Lost() != driver.Success {
			return nil, err
		}
		m.kind = hinted
	}
	return &Buffer{Range: Range{h: &handle{m: m}, n: m.size}}, nil
}

// checkManaged asks for an attribute that only managed memory has, of all of the
// range: that finds a pool's memory too. The system's memory is what the driver
// does not know and the process has, where the device pages it.
func (m *memory) checkManaged(op string) error {
	var v [1]int32
	r := m.ctx.Note(m.sys.Drv.MemRangeGetAttribute(m.ctx.Handle, driver.RangeReadMostly, m.ptr, m.size, v[:]))
	if r == driver.Success {
		return nil
	}
	if r != driver.InvalidValue {
		return m.fail(op, driver.CallMemRangeGetAttribute, r)
	}
	asked := fmt.Sprintf("%s at %#x", core.Bytes(m.size), uint64(m.ptr))
	is, known := m.sys.Drv.PointerGetAttribute(m.ctx.Handle, driver.PointerIsManaged, m.ptr)
	if known == driver.InvalidValue && m.sys.Attribute(m.ctx.Device, driver.AttrPageableMemoryAccess) != 0 && osmem.Mapped(uint64(m.ptr), m.size) {
		return nil // the driver knows nothing of it, and pages it all the same
	}
	if known == driver.Success && is != 0 {
		f := core.Failure{Op: op, Kind: core.OutOfRange, Asked: asked + ", which goes past the end of the managed memory there", Hint: "name less"}
		if start, size, ok := m.extent(); ok {
			f.Asked += fmt.Sprintf(": %s from %#x on", core.Bytes(size), start)
		}
		return core.Error(f)
	}
	return core.Error(core.Failure{Op: op, Kind: core.InvalidArgument, Call: driver.CallMemRangeGetAttribute, Result: r,
		Asked: asked + ", which is not managed memory",
		Hint:  "allocate it with managed.New, or set ViewOptions.Hint where it may be either"})
}

// extent is the allocation that holds the memory's first byte.
func (m *memory) extent() (start, size uint64, ok bool) {
	start, r := m.sys.Drv.PointerGetAttribute(m.ctx.Handle, driver.PointerRangeStart, m.ptr)
	if r != driver.Success {
		return 0, 0, false
	}
	size, r = m.sys.Drv.PointerGetAttribute(m.ctx.Handle, driver.PointerRangeSize, m.ptr)
	return start, size, r == driver.Success
}
