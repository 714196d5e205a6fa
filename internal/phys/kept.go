package phys

import "github.com/cuvmm/cuvmm/internal/fd"

// Keep takes a descriptor of the memory over, unless there is one already, and
// has it open until Let, or until the memory is given back: it is closed before,
// since it pins the memory. The caller holds a count.
func (h *Handle) Keep(n int) bool { return h.kept.CompareAndSwap(0, int64(n)+1) }

// Keeps reports whether a descriptor of the memory is kept.
func (h *Handle) Keeps() bool { return h.kept.Load() != 0 }

// Let closes the descriptor that is kept. The caller need not hold a count.
func (h *Handle) Let() {
	if n := h.kept.Swap(0); n != 0 {
		_ = fd.Close(int(n - 1)) // the number is given back whatever it answers
	}
}
