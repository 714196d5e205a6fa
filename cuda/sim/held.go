package sim

import (
	"slices"

	"github.com/cuvmm/cuvmm/internal/osmem"
)

// held is a memory file that the machine would give up, but that others may
// still hold, by a descriptor or a mapping, here or in another process. The
// system tells when they have let go only when asked, so the machine asks about
// a few at every call, and about all when it matters how much memory is free.
type held struct {
	file *osmem.Shared
	mem  *memory   // the memory in the file; nil for a DMA-BUF
	pins []*memory // what a DMA-BUF keeps
}

const (
	aFew = 4
	all  = int(^uint(0) >> 1)
)

// settle asks about at most limit files, and takes back what no process holds.
func (m *Machine) settle(limit int) {
	asked := m.held[:min(limit, len(m.held))]
	var kept, over []held
	for _, h := range asked {
		if h.file.Held() {
			kept = append(kept, h)
		} else {
			over = append(over, h)
		}
	}
	if len(over) > 0 || len(asked) < len(m.held) {
		m.held = slices.Concat(m.held[len(asked):], kept) // next time the others
	}
	for _, h := range over {
		if h.mem != nil {
			m.forgetShared(h.mem)
			h.mem.pool.give(h.mem.size)
		}
		_ = h.file.Close()
		for _, mem := range h.pins {
			mem.drop()
		}
	}
}

// revive takes memory off the list, because it is used again.
func (m *Machine) revive(mem *memory) {
	m.held = slices.DeleteFunc(m.held, func(h held) bool { return h.mem == mem })
}
