package tracegen

import "github.com/cuvmm/cuvmm/vmm/pool/trace"

// Uniform is no program but the plain hard case: blocks of 512 bytes to 256 MiB,
// as many in each octave, given back in random order, while what lives drifts
// between half and all of a budget.
func Uniform(c Config) *trace.Trace {
	b := newBuilder("uniform", c)
	h := b.heap(b.between(10, 14) * gib)
	const phases, perPhase = 12, 500
	for phase := range phases {
		target := h.budget
		if phase > 0 {
			target = b.between(h.budget/2, h.budget)
		}
		for range perPhase {
			bytes := b.spread(512, 256*mib)
			if b.below(4) > 0 {
				bytes = roundUp(bytes, 512) // most, as tensors are; not all
			}
			h.alloc(bytes, target)
		}
		b.sync()
	}
	return b.done()
}
