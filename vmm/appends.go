package vmm

import (
	"slices"

	"github.com/cuvmm/cuvmm/cuda"
	"github.com/cuvmm/cuvmm/internal/core"
)

// appends tracks the streams that a buffer was appended to on, so that a publication
// can be announced behind the appends of independent goroutines. It is guarded by
// holds.mu.
type appends struct {
	last uint64 // the number of the last append
	on   []appendsOn
}

// appendsOn is a stream, and the number of the last append on it.
type appendsOn struct {
	stream *core.Stream
	last   uint64
}

// extendLocked makes the buffer longer by an append that runs on a stream, or, without
// one, has completed. The caller holds changes.
func (b *buffer) extendLocked(to uint64, on *cuda.Stream) {
	if on == nil {
		b.used.Store(to)
		return
	}
	b.holds.mu.Lock()
	defer b.holds.mu.Unlock()
	b.used.Store(to)
	a := &b.holds.appends
	a.last++
	st := core.StreamOf(on)
	a.on = slices.DeleteFunc(a.on, func(o appendsOn) bool { return o.stream == st || o.stream.Finished() })
	a.on = append(a.on, appendsOn{st, a.last})
}

// appended returns the appends until now, for a buffer that shares their bytes.
func (hs *holds) appended() appends {
	hs.mu.Lock()
	defer hs.mu.Unlock()
	return appends{hs.appends.last, slices.Clone(hs.appends.on)}
}

// Appended implements share.Hold.
func (h *claim) Appended() (n uint64, on []*core.Stream, mark uint64) {
	hs := &h.b.holds
	hs.mu.Lock()
	defer hs.mu.Unlock()
	for _, o := range hs.appends.on {
		if o.last > h.announced {
			on = append(on, o.stream)
		}
	}
	return h.b.used.Load(), on, hs.appends.last
}

// Announced implements share.Hold.
func (h *claim) Announced(mark uint64) {
	h.b.holds.mu.Lock()
	defer h.b.holds.mu.Unlock()
	h.announced = max(h.announced, mark)
}
