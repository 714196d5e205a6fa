package sim

import (
	"github.com/cuvmm/cuvmm/internal/driver"
	"github.com/cuvmm/cuvmm/internal/host"
)

// MemGetHandleForAddressRange makes a DMA-BUF. Such a descriptor keeps the memory
// of a range in place for a network card or another device. Here there is none:
// its file holds no bytes, but pins the memory until it is closed.
func (a *api) MemGetHandleForAddressRange(c driver.Context, p driver.Ptr, size uint64, flags driver.RangeHandleFlags) (int32, driver.Result) {
	ctx, r := a.enterContext(driver.CallMemGetHandleForAddressRange, c)
	if r != driver.Success {
		return -1, r
	}
	defer a.leave()
	m := a.m
	page := host.PageSize()
	lo, hi := uint64(p), uint64(p)+size
	switch {
	case ctx.device.attributes[driver.AttrDMABuf] == 0:
		return -1, driver.NotSupported
	case flags&^driver.RangeHandlePCIe != 0 || flags != 0 && m.options.DriverVersion < 12080:
		return -1, driver.InvalidValue
	case size == 0 || lo%page != 0 || size%page != 0 || !m.backed(lo, size):
		return -1, driver.InvalidValue
	}
	var pins []*memory
	for r := range m.backing.overlapping(lo, hi) {
		if r.v.mem == nil || r.v.mem.team != nil || len(pins) > 0 && r.v.mem.prop != pins[0].prop {
			return -1, driver.InvalidValue // not the driver's, or not all of one kind
		}
		pins = append(pins, r.v.mem)
	}
	if m.books != nil && !pins[0].onHost() && pins[0].prop.Type == driver.AllocationPinned {
		fd, err := m.pinBooked(pins)
		if err != nil {
			m.explain(driver.CallMemGetHandleForAddressRange, "DMA-BUF of [%#x, %#x): %v", lo, hi, err)
			return -1, driver.OperatingSystem
		}
		return int32(fd), driver.Success
	}
	file, err := newFile(label{Kind: labelDMABuf, Size: page})
	fd := -1
	if err == nil {
		if fd, err = file.Export(); err != nil {
			_ = file.Close()
		}
	}
	if err != nil {
		m.explain(driver.CallMemGetHandleForAddressRange, "DMA-BUF of [%#x, %#x): %v", lo, hi, err)
		return -1, driver.OperatingSystem
	}
	for _, mem := range pins {
		mem.refs++
	}
	m.held = append(m.held, held{file: file, pins: pins})
	return int32(fd), driver.Success
}

// pinBooked makes the descriptor on a machine that processes share, where it pins
// device memory longer than its maker lives. Other memory cannot be moved into
// files, and is pinned by this process.
func (m *Machine) pinBooked(pins []*memory) (int, error) {
	var ids []uint64
	for _, mem := range pins {
		if err := m.share(mem); err != nil {
			return -1, err
		}
		ids = append(ids, mem.id)
	}
	page := host.PageSize()
	body := roundUp(uint64(8*len(ids)), page)
	return m.books.Pin(ids, body+page, func(file []byte, id uint64) {
		l := label{Kind: labelDMABuf, Size: body, ID: id}
		l.put(file[body:])
	})
}
