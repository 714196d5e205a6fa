package phys

import "github.com/cuvmm/cuvmm/internal/fd"

// PinFD takes a descriptor of the memory over and has it open until UnpinFD, or until
// the memory is given back: it is closed before, since it pins the memory. The
// caller holds a count.
func (h *Handle) PinFD(n int) { h.keep(int64(n) + 1) }

// HasPinnedFD reports whether a descriptor of the memory is kept.
func (h *Handle) HasPinnedFD() bool { return h.kept.Load() != 0 }

// UnpinFD closes the descriptor that is kept. The caller need not hold a count.
func (h *Handle) UnpinFD() { h.keep(0) }

func (h *Handle) keep(next int64) {
	if n := h.kept.Swap(next); n != 0 {
		_ = fd.Close(int(n - 1)) // the number is given back whatever it returns
	}
}
