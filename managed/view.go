package managed

import (
	"fmt"

	"github.com/cuvmm/cuvmm/cuda"
	"github.com/cuvmm/cuvmm/internal/core"
	"github.com/cuvmm/cuvmm/internal/driver"
	"github.com/cuvmm/cuvmm/internal/errs"
	"github.com/cuvmm/cuvmm/internal/host"
)

// ViewOptions change what View takes.
type ViewOptions struct {
	// Hint also accepts memory that is not managed: operations on it then do nothing and
	// succeed, and advice reads as if it had never been set. It is for programs whose
	// memory is only sometimes managed.
	Hint bool
}

// View returns a Buffer of n bytes of managed memory that was made elsewhere, used from the
// device: memory of another library or a pool, or of the operating system if the device
// pages that. The driver verifies it. The memory is not owned: its owner keeps it while the
// Buffer is used, and Close frees nothing. Host excludes only operations through this
// Buffer and its clones. It must not be Go memory. Bytes past the end of the managed memory
// are ErrOutOfRange, even with ViewOptions.Hint.
func View(d *cuda.Device, p cuda.Ptr, n int, o ViewOptions) (*Buffer, error) {
	const op = "managed.View"
	switch {
	case core.SystemOf(d) == nil:
		return nil, errs.NilDevice(op)
	case p == 0 || n <= 0 || n > maxBytes || uint64(p)+uint64(n) < uint64(p):
		return nil, errs.Invalid(op, fmt.Sprintf("%s at %v", errs.Count(n, "byte"), p), "name the memory's address, and at least one byte")
	}
	ctx, err := core.ContextOf(op, d)
	if err != nil {
		return nil, err
	}
	m := &memory{sys: core.SystemOf(d), dev: d, ctx: ctx, ptr: driver.Ptr(p), size: uint64(n), kind: viewed, refs: 1, accesses: new(accesses)}
	isManaged, err := m.isManaged(op)
	switch {
	case err != nil:
		return nil, err
	case isManaged:
	case o.Hint:
		m.kind = hinted
	default:
		return nil, errs.New(errs.Failure{Op: op, Kind: errs.InvalidArgument, Call: driver.CallMemRangeGetAttribute, Result: driver.InvalidValue,
			Asked: m.asked() + ", which is not managed memory",
			Hint:  "allocate it with managed.New, or set ViewOptions.Hint where it may be either"})
	}
	return &Buffer{Range: Range{h: &handle{m: m}, n: m.size}}, nil
}

// isManaged queries an attribute that only managed memory has, for all of the range, which
// also recognizes a pool's memory. Memory that the driver does not know and the process has
// mapped is the system's, which counts if the device pages it.
func (m *memory) isManaged(op string) (bool, error) {
	var v [1]int32
	r := m.ctx.Observe(m.sys.Drv.MemRangeGetAttribute(m.ctx.Handle, driver.RangeReadMostly, m.ptr, m.size, v[:]))
	switch r {
	case driver.Success:
		return true, nil
	case driver.InvalidValue:
	default:
		return false, m.fail(op, driver.CallMemRangeGetAttribute, r)
	}
	is, r := m.sys.Drv.PointerGetAttribute(m.ctx.Handle, driver.PointerIsManaged, m.ptr)
	switch {
	case r == driver.InvalidValue: // unknown to the driver, which may still page it
		return m.sys.Attribute(m.ctx.Device, driver.AttrPageableMemoryAccess) != 0 && host.Mapped(uint64(m.ptr), m.size), nil
	case r != driver.Success:
		return false, m.fail(op, driver.CallPointerGetAttribute, r)
	case is == 0:
		return false, nil
	}
	f := errs.Failure{Op: op, Kind: errs.OutOfRange, Asked: m.asked() + ", which goes past the end of the managed memory there", Hint: "name less"}
	if start, size, ok := m.extent(); ok {
		f.Asked += fmt.Sprintf(": %s from %#x on", errs.Bytes(size), start)
	}
	return false, errs.New(f)
}

// asked describes the memory in an error.
func (m *memory) asked() string {
	return fmt.Sprintf("%s at %#x", errs.Bytes(m.size), uint64(m.ptr))
}

// extent returns the allocation that holds the memory's first byte.
func (m *memory) extent() (start, size uint64, ok bool) {
	start, r := m.sys.Drv.PointerGetAttribute(m.ctx.Handle, driver.PointerRangeStart, m.ptr)
	if r != driver.Success {
		return 0, 0, false
	}
	size, r = m.sys.Drv.PointerGetAttribute(m.ctx.Handle, driver.PointerRangeSize, m.ptr)
	return start, size, r == driver.Success
}
