package sim

import (
	"slices"

	"github.com/cuvmm/cuvmm/internal/osmem"
)

// held is a memory file that the machine has released, but that descriptors or mappings
// may still hold, in this process or another. The system does not report the end of the
// last one, so the machine queries a few files at every call, and all files when the
// amount of free memory matters.
type held struct {
	file *osmem.Shared
	mem  *memory   // the memory in the file; nil for a DMA-BUF
	pins []*memory // what a DMA-BUF keeps
}

const (
	aFew = 4
	all  = int(^uint(0) >> 1)
)

// settle queries at most limit files, and reclaims the memory that no process holds.
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

// revive removes memory from the list, because it is in use again.
func (m *Machine) revive(mem *memory) {
	m.held = slices.DeleteFunc(m.held, func(h held) bool { return h.mem == mem })
}
