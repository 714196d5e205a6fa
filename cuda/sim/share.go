package sim

import (
	"bytes"
	"encoding/binary"
	"errors"

	"github.com/cuvmm/cuvmm/internal/driver"
	"github.com/cuvmm/cuvmm/internal/host"
	"github.com/cuvmm/cuvmm/internal/osmem"
)

// A memory file holds the memory's bytes and, in a page behind them, the label
// from which an importer learns what the memory is.
type label struct {
	Magic       [8]byte
	Size        uint64
	Kind        uint32
	Location    uint32
	Node        int32
	Compression uint8
	RDMA        uint8
	Usage       uint16
	Device      driver.UUID
	ID          uint64 // in the books of the machine's folder; 0 without one
	Handles     uint32 // requested
	Channel     int32  // the maker's place on the fabric, if fabric handles were
	Clique      uint32
	Cluster     [16]byte
}

const (
	labelMemory = 1
	labelDMABuf = 2
	labelTeam   = 3 // the file is a multicast object's state
)

var labelMagic = [8]byte{'c', 'u', 'v', 'm', 'm', 0, 0, 3}

var errLabel = errors.New("the memory file carries no label of a software driver")

// newFile makes an empty memory file of l.Size bytes with a label.
func newFile(l label) (*osmem.Shared, error) {
	s, err := osmem.NewShared("cuvmm", l.Size+host.PageSize())
	if err != nil {
		return nil, err
	}
	l.write(s)
	return s, nil
}

func (l label) write(s *osmem.Shared) { l.put(s.Bytes()[l.Size:]) }

// put encodes the label.
func (l label) put(to []byte) {
	l.Magic = labelMagic
	var b bytes.Buffer
	if err := binary.Write(&b, binary.LittleEndian, &l); err != nil {
		panic(err) // a struct of fixed size always encodes
	}
	copy(to, b.Bytes())
}

// readLabel reads the label of a memory file of so many bytes, all told, from
// the beginning of its last page. A process that can pass a descriptor can have
// written it.
func readLabel(b []byte, file uint64) (label, error) {
	var l label
	if err := binary.Read(bytes.NewReader(b), binary.LittleEndian, &l); err != nil {
		return l, err
	}
	if page := host.PageSize(); l.Magic != labelMagic || file <= page || l.Size != file-page {
		return l, errLabel
	}
	switch on := driver.LocationType(l.Location); {
	case l.Kind == labelDMABuf:
	case l.Kind == labelTeam && l.Size == roundUp(teamBytes, host.PageSize()):
	case l.Kind == labelMemory && (on == driver.LocationDevice || on == driver.LocationHostNUMA && l.Node == 0):
	default:
		return l, errLabel
	}
	return l, nil
}

// labelOf is the label of a mapped memory file.
func labelOf(s *osmem.Shared) (label, error) {
	file := s.Bytes()
	return readLabel(file[max(0, len(file)-int(host.PageSize())):], uint64(len(file)))
}

// label describes mem.
func (mem *memory) label() label {
	p := mem.prop
	l := label{
		Kind: labelMemory, Size: mem.size, Location: uint32(p.Location.Type),
		Compression: uint8(p.Flags.CompressionType), RDMA: p.Flags.GPUDirectRDMACapable,
		Usage: uint16(p.Flags.Usage), Handles: uint32(p.RequestedHandleTypes),
	}
	if p.RequestedHandleTypes&driver.HandleFabric != 0 {
		l.offer(mem.machine.options.Fabric)
	}
	if p.Location.Type == driver.LocationNone { // a multicast object's
		l.Kind, l.Size = labelTeam, roundUp(teamBytes, host.PageSize())
	} else if p.Location.Type == driver.LocationDevice {
		l.Device = mem.machine.devices[p.Location.ID].uuid
	} else {
		l.Node = p.Location.ID
	}
	return l
}

// newShared makes an empty memory file with mem's label, and its number in the
// books.
func (m *Machine) newShared(mem *memory) (s *osmem.Shared, id uint64, err error) {
	l := mem.label()
	if m.books == nil {
		s, err = newFile(l)
		return s, 0, err
	}
	l.ID = m.books.NewID()
	if s, err = m.books.NewFile(l.Size + host.PageSize()); err == nil {
		l.write(s)
	}
	return s, l.ID, err
}

// moveTo makes a memory file the storage of the memory's bytes.
func (mem *memory) moveTo(s *osmem.Shared, id uint64) error {
	if id != 0 {
		if err := mem.machine.books.Publish(s, id, mem.pool.index, mem.size); err != nil {
			return err
		}
	}
	mem.shared, mem.id = s, id
	return nil
}

// share turns memory into a memory file that keeps its contents.
func (m *Machine) share(mem *memory) error {
	if mem.team != nil {
		return nil // it lies in a file from the beginning
	}
	for mem.busy > 0 && !m.closed {
		m.changed.Wait()
	}
	if m.closed {
		return errors.New("the machine was closed")
	}
	if mem.shared == nil {
		s, id, err := m.newShared(mem)
		if err != nil {
			return err
		}
		to := s.Bytes()
		for b := range mem.runs(0, mem.size) {
			copyPages(to, b)
			to = to[len(b):]
		}
		if err := mem.moveTo(s, id); err != nil {
			_ = s.Close()
			return err
		}
		mem.pool.discard(mem.pieces)
		mem.pieces = nil
	}
	m.shared[mem.shared.ID()] = mem
	return nil
}

// copyPages copies into a file that reads zero, and leaves pages of zeros
// uncommitted.
func copyPages(to, from []byte) {
	page := int(host.PageSize())
	zero := make([]byte, page)
	for len(from) > 0 {
		n := min(page, len(from))
		if !bytes.Equal(from[:n], zero[:n]) {
			copy(to, from[:n])
		}
		to, from = to[n:], from[n:]
	}
}

// forgetShared is called when the machine no longer holds a memory file.
func (m *Machine) forgetShared(mem *memory) {
	if mem.shared != nil && m.shared[mem.shared.ID()] == mem {
		delete(m.shared, mem.shared.ID())
	}
}

func (a *api) MemExportToShareableHandle(h driver.MemHandle, t driver.HandleTypes) (s driver.ShareableHandle, r driver.Result) {
	if r := a.enter(driver.CallMemExportToShareableHandle); r != driver.Success {
		return s, r
	}
	defer a.leave()
	m := a.m
	owner := m.handles[h]
	switch {
	case owner == nil || owner.imported || t&(t-1) != 0 || t&owner.mem.prop.RequestedHandleTypes == 0:
		return s, driver.InvalidValue
	case t != driver.HandlePosixFD && t != driver.HandleFabric:
		return s, driver.NotSupported
	}
	mem := owner.mem
	mem.refs++
	defer mem.drop()
	if t == driver.HandleFabric {
		return m.exportFabric(mem)
	}
	fd, err := -1, m.share(mem)
	switch {
	case err != nil:
	case mem.id != 0:
		fd, err = m.books.Export(mem.id)
	default:
		fd, err = mem.shared.Export()
	}
	if err != nil {
		m.explain(driver.CallMemExportToShareableHandle, "export of %d bytes: %v", mem.size, err)
		return s, driver.OperatingSystem
	}
	binary.NativeEndian.PutUint32(s[:], uint32(fd))
	return s, driver.Success
}

func (a *api) MemImportFromShareableHandle(s driver.ShareableHandle, t driver.HandleTypes) (driver.MemHandle, driver.Result) {
	if r := a.enter(driver.CallMemImportFromShareableHandle); r != driver.Success {
		return 0, r
	}
	defer a.leave()
	m := a.m
	var mem *memory
	var r driver.Result
	switch t {
	case driver.HandlePosixFD:
		mem, r = m.openShared(int(int32(binary.NativeEndian.Uint32(s[:]))))
	case driver.HandleFabric:
		mem, r = m.importFabric(s)
	default:
		r = driver.InvalidValue
	}
	if r != driver.Success {
		return 0, r
	}
	prop := mem.prop
	prop.RequestedHandleTypes = driver.HandleNone
	prop.Flags.GPUDirectRDMACapable = 0 // the real driver does not tell it of imports
	return m.newHandle(mem, prop, true), driver.Success
}

// openShared finds or maps the memory behind a descriptor, and refers to it.
func (m *Machine) openShared(fd int) (*memory, driver.Result) {
	if id, err := osmem.IdentifyShared(fd); err == nil {
		if mem := m.shared[id]; mem != nil {
			mem.refs++
			if mem.refs == 1 { // it was given up here
				m.revive(mem)
			}
			return mem, driver.Success
		}
	}
	if m.books != nil {
		return m.openBooked(fd)
	}
	// The label first: until it is known to be memory, the file is read and not
	// mapped.
	tail, size, err := osmem.Tail(fd)
	var l label
	if err == nil {
		l, err = readLabel(tail, size)
	}
	if err == nil && l.Kind != labelMemory {
		err = errLabel
	}
	if err != nil {
		m.explain(driver.CallMemImportFromShareableHandle, "import of descriptor %d: %v: if its exporter gave a Folder, this process must give the same (%s)", fd, err, MachineEnv)
		return nil, driver.Unknown
	}
	mem, r := m.imported(l)
	if r != driver.Success {
		m.explain(driver.CallMemImportFromShareableHandle, "import of descriptor %d: the memory is on a device that this machine does not have", fd)
		return nil, r
	}
	s, err := osmem.OpenShared(fd)
	if err != nil {
		m.explain(driver.CallMemImportFromShareableHandle, "import of descriptor %d: %v", fd, err)
		return nil, driver.OperatingSystem
	}
	mem.shared = s
	m.shared[s.ID()] = mem
	return mem, driver.Success
}

// imported is memory of another process, as its label says, still without its
// file.
func (m *Machine) imported(l label) (*memory, driver.Result) {
	mem := &memory{machine: m, size: l.Size, refs: 1}
	mem.prop.Type = driver.AllocationPinned
	mem.prop.Location = driver.Location{Type: driver.LocationType(l.Location), ID: l.Node}
	mem.prop.Flags.CompressionType = driver.CompressionType(l.Compression)
	mem.prop.Flags.GPUDirectRDMACapable = l.RDMA
	mem.prop.Flags.Usage = driver.AllocationUsage(l.Usage)
	if mem.prop.Location.Type == driver.LocationDevice {
		d := m.deviceByUUID(l.Device)
		if d == nil {
			return nil, driver.NotSupported
		}
		mem.prop.Location.ID = int32(d.ordinal)
	}
	return mem, driver.Success
}
