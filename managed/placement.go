package managed

import (
	"fmt"

	"github.com/cuvmm/cuvmm/cuda"
)

// Placement places new memory. It is called with the memory and the stream of the
// allocation, which may be nil; if it returns an error the allocation fails and the memory
// is freed. [GPUFirst] and [ReadMostly] are predefined; without a placement pages are
// placed when they are first accessed.
type Placement func(s *cuda.Stream, r Range) error

// GPUFirst is a Placement for memory that the GPU works on and the CPU fills or reads: it
// sets the device as the preferred location, maps the memory for the CPU, and prefetches
// it to the device. On a machine whose GPU memory is also system memory (Grace Hopper) that
// keeps a program from exhausting the CPU's memory while it loads a model. A prefetch that
// fails is logged as a warning and is not an error: the memory moves when the device
// accesses it. For a device without concurrent managed access it does nothing: managed
// memory is always on that device, and it takes no advice.
func GPUFirst(s *cuda.Stream, r Range) error {
	const op = "managed.GPUFirst"
	if err := r.acquire(op); err != nil {
		return err
	}
	defer r.release()
	m := r.h.m
	if err := checkStream(op, m.sys, s); err != nil {
		return err
	}
	if !m.concurrent(m.ctx.Device) {
		return nil
	}
	to := cuda.OnDevice(m.dev.Ordinal())
	before, err := r.Preferred()
	if err != nil {
		return err
	}
	if err := r.SetPreferred(to); err != nil {
		return err
	}
	if err := r.AccessedBy().Add(cuda.OnHost()); err != nil {
		if undo := r.SetPreferred(before); undo != nil {
			err = fmt.Errorf("%w (and the range keeps its new preferred location, since undoing it failed: %w)", err, undo)
		}
		return err
	}
	if err := r.Prefetch(s, to); err != nil {
		m.sys.Config.Log.Warn("cuvmm: managed memory could not be prefetched; it moves when it is accessed",
			"memory", fmt.Sprintf("%d bytes at %v", r.n, r.Ptr()), "device", m.dev.String(), "error", err)
	}
	return nil
}

// ReadMostly is a Placement for memory that is written once and then read on several
// processors.
func ReadMostly(_ *cuda.Stream, r Range) error { return r.SetReadMostly(true) }
