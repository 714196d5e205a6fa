package managed

import (
	"fmt"

	"github.com/cuvmm/cuvmm/cuda"
)

// Placement says where new memory is to lie. It is called with the memory and
// the stream of the allocation, which may be nil; its error fails the allocation,
// and the memory is freed. [GPUFirst] and [ReadMostly] are ready
// made; nil leaves the memory to who touches it.
type Placement func(s *cuda.Stream, r Range) error

// GPUFirst is for memory that the GPU works on and the CPU fills or looks at: it
// prefers the device, maps it for the CPU, and prefetches it to the device at
// once. That keeps a machine on which GPU memory is memory of the system too
// (Grace Hopper) from running out of the system's while a model is loaded. A
// prefetch that fails is a warning in the log, not an error: the memory comes to
// the device when that touches it. A device without concurrent managed access has
// its memory anyway, and takes no advice: there it does nothing.
func GPUFirst(s *cuda.Stream, r Range) error {
	const op = "managed.GPUFirst"
	if err := r.hold(op); err != nil {
		return err
	}
	defer r.drop()
	m := r.h.m
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
		m.sys.Config.Log.Warn("cuvmm: managed memory could not be prefetched; it moves when it is touched",
			"memory", fmt.Sprintf("%d bytes at %v", r.n, r.Ptr()), "device", m.dev.String(), "error", err)
	}
	return nil
}

// ReadMostly is for memory that is written once and then read by everybody.
func ReadMostly(_ *cuda.Stream, r Range) error { return r.SetReadMostly(true) }
