package sim

import (
	"encoding/json"
	"fmt"
	"reflect"

	"github.com/cuvmm/cuvmm/internal/driver"
	"github.com/cuvmm/cuvmm/internal/errs"
	"github.com/cuvmm/cuvmm/internal/ledger"
	"github.com/cuvmm/cuvmm/internal/osmem"
)

// hardware is what all processes on a machine have in common. Its pools of
// memory are those of the devices, by ordinal, and then the host's.
type hardware struct {
	Devices    []DeviceOptions
	HostMemory int
}

// join makes m a part of the machine that processes share in a folder. The options
// describe all devices, visible or not.
func (m *Machine) join(o Options) error {
	here := hardware{o.Devices, o.HostMemory}
	text, err := json.Marshal(here)
	if err != nil {
		return fmt.Errorf("sim: %w", err)
	}
	first := ledger.Machine{Description: text}
	for _, d := range o.Devices {
		first.Limits = append(first.Limits, wholePages(uint64(d.Memory)))
	}
	first.Limits = append(first.Limits, wholePages(uint64(o.HostMemory)))
	books, err := ledger.Open(o.Folder, first)
	if err != nil {
		return fmt.Errorf("sim: the machine in folder %s: %w", o.Folder, err)
	}
	var there hardware
	if err = json.Unmarshal(books.Description(), &there); err == nil {
		if other := differ(here, there); other != "" {
			_ = books.Close()
			return errs.Invalid("sim.New", fmt.Sprintf("the machine in folder %s: %s", o.Folder, other), "give all processes the same options, or take another folder")
		}
	}
	if err == nil {
		err = books.Join()
	}
	if err != nil {
		_ = books.Close()
		return fmt.Errorf("sim: the machine in folder %s: %w", o.Folder, err)
	}
	m.books = books
	for i, d := range m.devices {
		d.pool.books, d.pool.index = books, i
		if len(o.Visible) > 0 {
			d.pool.index = o.Visible[i]
		}
	}
	m.host.books, m.host.index = books, len(o.Devices)
	return nil
}

// differ describes how the machine in the folder differs from the one in the options, if it does.
func differ(here, there hardware) string {
	switch {
	case len(here.Devices) != len(there.Devices):
		return fmt.Sprintf("it has %s, these options say %d", errs.Count(len(there.Devices), "device"), len(here.Devices))
	case here.HostMemory != there.HostMemory:
		return fmt.Sprintf("it has HostMemory %d, these options say %d", there.HostMemory, here.HostMemory)
	}
	for i := range here.Devices {
		a, b := reflect.ValueOf(here.Devices[i]), reflect.ValueOf(there.Devices[i])
		for f := range a.NumField() {
			mine, its := a.Field(f), b.Field(f)
			switch mine.Kind() {
			case reflect.Slice, reflect.Map:
				if mine.Len() == 0 && its.Len() == 0 { // nil or not
					continue
				}
			}
			if reflect.DeepEqual(mine.Interface(), its.Interface()) {
				continue
			}
			return fmt.Sprintf("its device %d has %s %s, these options say %s", i,
				a.Type().Field(f).Name, inWords(its.Interface()), inWords(mine.Interface()))
		}
	}
	return ""
}

func inWords(v any) string {
	if uuid, ok := v.([16]byte); ok {
		return fmt.Sprintf("%x", uuid)
	}
	return fmt.Sprint(v)
}

// openBooked is openShared on a machine of a folder: only its own memory can be
// imported, however the descriptor is labelled.
func (m *Machine) openBooked(fd int) (*memory, driver.Result) {
	tail, size, err := m.books.Tail(fd)
	var l label
	if err == nil {
		l, err = readLabel(tail, size)
	}
	if err != nil || l.Kind == labelDMABuf || !m.books.Is(l.ID, fd) {
		m.explain(driver.CallMemImportFromShareableHandle, "import of descriptor %d: it is not memory that a process on this machine's folder exported (%v): give all processes the same Folder (%s)", fd, err, MachineEnv)
		return nil, driver.Unknown
	}
	return m.importBooked(l)
}

// importBooked holds memory of the machine that another process made.
func (m *Machine) importBooked(l label) (*memory, driver.Result) {
	mem, r := m.imported(l)
	switch {
	case r != driver.Success:
		m.explain(driver.CallMemImportFromShareableHandle, "import: the memory is on a device that this process does not see")
		return nil, r
	case !m.books.Hold(l.ID):
		m.explain(driver.CallMemImportFromShareableHandle, "import: the memory is gone")
		return nil, driver.InvalidHandle
	}
	s, err := m.books.Open(l.ID)
	if err != nil {
		m.books.Drop(l.ID)
		m.explain(driver.CallMemImportFromShareableHandle, "import: %v", err)
		return nil, driver.OperatingSystem
	}
	m.adopt(mem, s, l)
	return mem, driver.Success
}

// adopt attaches imported memory to its file.
func (m *Machine) adopt(mem *memory, s *osmem.Shared, l label) {
	mem.shared, mem.id = s, l.ID
	m.shared[s.ID()] = mem
	if l.Kind == labelTeam {
		state := stateIn(s)
		mem.size = state.size.Load()
		m.newTeam(mem, state)
	}
}
