package broker

import (
	"fmt"

	"github.com/cuvmm/cuvmm/cuda"
	"github.com/cuvmm/cuvmm/handles"
	"github.com/cuvmm/cuvmm/handles/peer"
	"github.com/cuvmm/cuvmm/internal/core"
	"github.com/cuvmm/cuvmm/internal/driver"
	"github.com/cuvmm/cuvmm/internal/errs"
	"github.com/cuvmm/cuvmm/internal/exchange"
	"github.com/cuvmm/cuvmm/internal/memspec"
	"github.com/cuvmm/cuvmm/internal/phys"
	"github.com/cuvmm/cuvmm/vmm"
)

// largestChunk is the size of all chunks of an object but the last, in bytes: mapping takes a time
// per chunk, whatever its size.
const largestChunk = 1 << 30

// chunksOf returns the sizes of an object's chunks.
func chunksOf(bytes, granularity int) (sizes []int) {
	bytes = (bytes + granularity - 1) / granularity * granularity
	for most := largestChunk / granularity * granularity; bytes > most; bytes -= most {
		sizes = append(sizes, most)
	}
	return append(sizes, bytes)
}

// deviceOf returns the device of a UUID.
func deviceOf(op string, sys *cuda.System, id cuda.UUID) (*cuda.Device, error) {
	for _, d := range sys.Devices() {
		if d.UUID() == id {
			return d, nil
		}
	}
	return nil, errs.Peer(op, cuda.ErrNotSupported, fmt.Sprintf("memory on device %v, which the broker does not see", id),
		"make that device visible to the broker (CUDA_VISIBLE_DEVICES, or the container's devices)")
}

// layout returns the sizes of the chunks that makeMemory makes.
func layout(op string, d *cuda.Device, bytes int) (sizes []int, prop driver.AllocationProp, err error) {
	if total := d.TotalMemory(); bytes > total {
		return nil, prop, errs.Peer(op, cuda.ErrOutOfMemory, fmt.Sprintf("%s on %v, which has %s", errs.Bytes(bytes), d, errs.Bytes(total)), "divide the object among devices")
	}
	prop, gran, err := memspec.Resolve(op, d, vmm.Properties{Handles: vmm.PosixFD})
	if err != nil {
		return nil, prop, err
	}
	return chunksOf(bytes, int(gran)), prop, nil
}

// makeMemory makes memory of a device that exists as file descriptors alone, which the caller closes.
// It needs no context of the device.
func makeMemory(op string, d *cuda.Device, bytes int) (about handles.Descriptor, fds []*peer.FD, err error) {
	sys := core.SystemOf(d)
	sizes, prop, err := layout(op, d, bytes)
	if err != nil {
		return about, nil, err
	}
	var made []*phys.Handle
	defer func() {
		if err != nil {
			_ = peer.CloseAll(fds)
			err = phys.Abandon(op, err, made...)
			return
		}
		_ = phys.ReleaseAll(op, made...) // what the driver refuses is a leftover, which the System releases
	}()
	for _, size := range sizes {
		h, r, err := phys.Create(sys, uint64(size), prop, nil)
		if err != nil {
			return about, fds, err
		}
		if r != driver.Success {
			return about, fds, sys.CallError(op, driver.CallMemCreate, r, fmt.Sprintf("%s of %s on %v", errs.Bytes(size), errs.Bytes(bytes), d))
		}
		made = append(made, h)
		n, err := h.Export(op)
		if err != nil {
			return about, fds, err
		}
		f, err := peer.NewFD(n)
		if err != nil {
			return about, fds, err
		}
		fds = append(fds, f)
	}
	m, err := exchange.Describe(op, sys, prop, made)
	about = handles.Descriptor{Kind: handles.BufferKind, Length: bytes, Chunks: m.Chunks, Location: m.Location, Device: m.Device,
		Compressible: m.Compressible, RDMA: m.RDMA, Handle: m.Handle, Exporter: handles.Self()}
	return about, fds, err
}
