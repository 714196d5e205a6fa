package sim

import (
	"encoding/binary"

	"github.com/cuvmm/cuvmm/internal/driver"
	"github.com/cuvmm/cuvmm/internal/osmem"
)

// Fabric is a process's place on the fabric of its machine. The zero value is
// that of a process without an open channel: memory with fabric handles
// is refused with NOT_PERMITTED, whatever the device's attribute says.
type Fabric struct {
	// Channels are the minor numbers of the IMEX channels that the process may
	// open. The driver takes the first. Processes import from each other on the
	// same channel only: another is refused with NOT_PERMITTED.
	Channels []int
	// Cluster and Clique name the part of the fabric that the process's devices
	// are in. To another part a handle means nothing: INVALID_HANDLE.
	Cluster [16]byte
	Clique  uint32
}

func (f Fabric) open() bool { return len(f.Channels) > 0 }

// offer records the place on the fabric that memory is exported from.
func (l *label) offer(f Fabric) {
	l.Channel, l.Cluster, l.Clique = int32(f.Channels[0]), f.Cluster, f.Clique
}

// A fabric handle names the machine and the memory. It pins nothing, and is invalid once
// the process that created the memory has released it.

func (m *Machine) fabricHandle(id uint64) (s driver.ShareableHandle) {
	machine := m.books.Identity()
	for i, v := range []uint64{machine[0], machine[1], id} {
		binary.LittleEndian.PutUint64(s[8*i:], v)
	}
	return s
}

func (m *Machine) exportFabric(mem *memory) (s driver.ShareableHandle, r driver.Result) {
	if err := m.share(mem); err != nil {
		m.explain(driver.CallMemExportToShareableHandle, "export of %d bytes: %v", mem.size, err)
		return s, driver.OperatingSystem
	}
	m.books.Offer(mem.id)
	return m.fabricHandle(mem.id), driver.Success
}

// importFabric finds or maps the memory that a fabric handle names, and refers
// to it.
func (m *Machine) importFabric(s driver.ShareableHandle) (*memory, driver.Result) {
	here := m.options.Fabric
	if !here.open() {
		return nil, driver.NotSupported
	}
	file, l, mem, r := m.openOffer(s)
	switch {
	case file == nil:
	case l.Handles&uint32(driver.HandleFabric) == 0 || l.Cluster != here.Cluster || l.Clique != here.Clique:
		m.explain(driver.CallMemImportFromShareableHandle, "import of a fabric handle: it is of clique %d of cluster %x, this process is in clique %d of %x", l.Clique, l.Cluster, here.Clique, here.Cluster)
		r = driver.InvalidHandle
	case l.Channel != int32(here.Channels[0]):
		m.explain(driver.CallMemImportFromShareableHandle, "import of a fabric handle: it was made on channel %d, this process is on channel %d", l.Channel, here.Channels[0])
		r = driver.NotPermitted
	}
	return m.acceptOffer(file, l, mem, r)
}

// openOffer maps what a handle of the machine names, if it is memory that its maker offers.
func (m *Machine) openOffer(s driver.ShareableHandle) (file *osmem.Shared, l label, mem *memory, r driver.Result) {
	id := binary.LittleEndian.Uint64(s[16:])
	if s != m.fabricHandle(id) {
		m.explain(driver.CallMemImportFromShareableHandle, "import of a handle: it is of another machine, or none at all")
		return nil, l, nil, driver.InvalidHandle
	}
	file, err := m.books.Open(id)
	if err == nil {
		l, err = labelOf(file)
	}
	if err == nil && l.ID != id {
		err = errLabel
	}
	if err != nil {
		m.explain(driver.CallMemImportFromShareableHandle, "import of a handle: the memory is gone: %v", err)
		return file, l, nil, driver.InvalidHandle
	}
	if mem, r = m.imported(l); r != driver.Success {
		m.explain(driver.CallMemImportFromShareableHandle, "import of a handle: the memory's device is hidden from this process")
		r = driver.InvalidDevice
	}
	return file, l, mem, r
}

// acceptOffer refers to what openOffer has mapped, or lets go of it if the result so far is
// a failure.
func (m *Machine) acceptOffer(file *osmem.Shared, l label, mem *memory, r driver.Result) (*memory, driver.Result) {
	if r == driver.Success && !m.books.Accept(l.ID) {
		m.explain(driver.CallMemImportFromShareableHandle, "import of a handle: its maker is gone, or released the memory")
		r = driver.InvalidHandle
	}
	if file == nil {
		return nil, r
	}
	known := m.shared[file.ID()]
	if r != driver.Success || known != nil {
		_ = file.Close()
	}
	switch {
	case r != driver.Success:
		return nil, r
	case known != nil:
		known.refs++
		return known, r
	}
	m.adopt(mem, file, l)
	return mem, r
}
