// Package exchange implements exports and imports of memory below the messages of handles
// and handles/publish: descriptors of exported memory within this process's budget of
// open files, and imports of memory that another process declares.
package exchange

import (
	"errors"
	"fmt"

	"github.com/cuvmm/cuvmm/cuda"
	"github.com/cuvmm/cuvmm/internal/core"
	"github.com/cuvmm/cuvmm/internal/driver"
	"github.com/cuvmm/cuvmm/internal/errs"
	"github.com/cuvmm/cuvmm/internal/phys"
	"github.com/cuvmm/cuvmm/vmm"
)

// The sentinels of imports, which handles documents.
var (
	ErrSizeMismatch = errors.New("size mismatch")
	ErrMismatch     = errors.New("not what was declared")
	ErrNotMemory    = errors.New("not GPU memory")
)

// Memory is an exporter's declaration of memory: see handles.Descriptor.
type Memory struct {
	Location           cuda.Location
	Device             cuda.UUID
	Handle             vmm.HandleTypes
	Compressible, RDMA bool
	Chunks             []int
}

// Describe declares memory of this process: its location, granted properties and
// chunks. A property that only some of the chunks have counts as not granted.
func Describe(op string, on *core.System, asked driver.AllocationProp, chunks []*phys.Handle) (m Memory, err error) {
	m.Handle = vmm.HandleTypes(asked.RequestedHandleTypes) & (vmm.PosixFD | vmm.Fabric)
	m.Location = cuda.Location{Type: cuda.LocationType(asked.Location.Type), ID: int(asked.Location.ID)}
	if m.Location.Type == cuda.LocationDevice {
		if m.Device = cuda.UUID(on.UUID(driver.Device(m.Location.ID))); m.Device == (cuda.UUID{}) {
			return m, errs.Peer(op, cuda.ErrNotSupported, fmt.Sprintf("memory of %v", m.Location),
				"the driver does not report the device's UUID, by which the other process finds it: install a later one")
		}
	}
	m.Compressible, m.RDMA = len(chunks) > 0, len(chunks) > 0
	m.Chunks = make([]int, len(chunks))
	for i, h := range chunks {
		granted, err := h.Granted(op)
		if err != nil {
			return m, err
		}
		m.Chunks[i] = int(h.Size)
		m.Compressible = m.Compressible && granted.Flags.CompressionType == driver.CompressionGeneric
		m.RDMA = m.RDMA && granted.Flags.GPUDirectRDMACapable != 0
	}
	return m, nil
}
