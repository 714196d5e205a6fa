package tracegen

import "github.com/cuvmm/cuvmm/vmm/pool/trace"

// Uniform is no program but the plain hard case: blocks of 512 bytes to 256 MiB,
// as many in each octave, given back in random order, while what lives drifts
// between half and all of a budget.
func Uniform(c Config) *trace.Trace {
	b := newBuilder("uniform", c)
	budget := b.between(10, 14) * gib
	type held struct {
		block block
		bytes uint64
	}
	var blocks []held
	live := uint64(0)
	const phases, perPhase = 12, 500
	for phase := range phases {
		target := budget
		if phase > 0 {
			target = b.between(budget/2, budget)
		}
		for range perPhase {
			bytes := b.spread(512, 256*mib)
			if b.below(4) > 0 {
				bytes = roundUp(bytes, 512) // most, as tensors are; not all
			}
			for live+bytes > target {
				i := b.below(uint64(len(blocks)))
				b.free(blocks[i].block)
				live -= blocks[i].bytes
				blocks[i] = blocks[len(blocks)-1]
				blocks = blocks[:len(blocks)-1]
			}
			stream := uint32(b.below(trace.MaxStreams) % uint64(b.t.Streams))
			x := b.allocOn(stream, tagActivations, bytes)
			if b.below(8) == 0 && b.t.Streams > 1 {
				b.use((stream+1)%uint32(b.t.Streams), x)
			}
			blocks = append(blocks, held{x, bytes})
			live += bytes
		}
		b.sync()
	}
	return b.done()
}
