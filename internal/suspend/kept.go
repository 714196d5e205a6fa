package suspend

import (
	"context"
	"fmt"
	"unsafe"

	"github.com/cuvmm/cuvmm/cuda"
	"github.com/cuvmm/cuvmm/internal/core"
	"github.com/cuvmm/cuvmm/internal/driver"
	"github.com/cuvmm/cuvmm/internal/errs"
)

// kept is the bytes of a chunk in host memory.
type kept struct {
	dev  *cuda.Device
	host *cuda.HostBuffer
}

// save keeps the bytes of chunks. It has the host memory before it waits for the GPU.
func (s *Suspension) save(ctx context.Context, op string, chunks []*chunk, wait func() error) error {
	if !s.o.Keep {
		return wait()
	}
	for _, c := range chunks {
		dev, err := c.reader(op)
		if err != nil {
			return err
		}
		host, err := dev.NewHostBuffer(int(c.size))
		if err != nil {
			return fmt.Errorf("%s: %w", op, err)
		}
		c.kept = &kept{dev, host}
	}
	if err := wait(); err != nil {
		return err
	}
	return s.copy(ctx, op, chunks, driver.CallMemcpyDtoHAsync, func(st *core.Stream, c *chunk, at driver.Ptr, p unsafe.Pointer) driver.Result {
		return s.sys.Drv.MemcpyDtoHAsync(st.Ctx.Handle, p, at, c.size, st.Handle)
	})
}

// load copies the bytes of chunks back, to the first of the mappings that each has now.
func (s *Suspension) load(ctx context.Context, op string, chunks []*chunk) error {
	if !s.o.Keep {
		return nil
	}
	return s.copy(ctx, op, chunks, driver.CallMemcpyHtoDAsync, func(st *core.Stream, c *chunk, at driver.Ptr, p unsafe.Pointer) driver.Result {
		return s.sys.Drv.MemcpyHtoDAsync(st.Ctx.Handle, at, p, c.size, st.Handle)
	})
}

func (s *Suspension) copy(ctx context.Context, op string, chunks []*chunk, call driver.Call, submit func(st *core.Stream, c *chunk, at driver.Ptr, p unsafe.Pointer) driver.Result) error {
	for _, c := range chunks {
		if err := context.Cause(ctx); err != nil {
			return fmt.Errorf("%s: %w", op, err)
		}
		t, err := c.kept.dev.Transfer()
		if err != nil {
			return fmt.Errorf("%s: %w", op, err)
		}
		st := core.StreamOf(t)
		if r := submit(st, c, c.maps[0].Ptr(), unsafe.Pointer(&c.kept.host.Bytes()[0])); r != driver.Success {
			return st.Ctx.CallError(op, call, r, errs.Bytes(c.size))
		}
		if err := t.Synchronize(); err != nil {
			return fmt.Errorf("%s: %w", op, err)
		}
	}
	return nil
}

func (k *kept) free() {
	if k != nil {
		_ = k.host.Close()
	}
}

// reader returns the device that reads the chunk's memory, and writes it later: its home, if
// that may, or another that may.
func (c *chunk) reader(op string) (*cuda.Device, error) {
	m := c.maps[0]
	devices := m.Range.CUDA.Devices()
	access := m.Access()
	best := -1
	for _, a := range access {
		if a.Location.Type == driver.LocationDevice && (best < 0 || a.Location == c.h.Asked.Location) {
			best = int(a.Location.ID)
		}
	}
	if best < 0 {
		return nil, errs.New(errs.Failure{Op: op, Kind: errs.NotPermitted,
			Asked: fmt.Sprintf("the bytes of %s at %#x, which no device may read", errs.Bytes(c.size), uint64(m.Ptr())),
			Hint:  "grant a device access with SetAccess before, or Drop the bytes"})
	}
	return devices[best], nil
}
