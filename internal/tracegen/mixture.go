package tracegen

import "github.com/cuvmm/cuvmm/vmm/pool/trace"

// Mixture is no program but a hard case with very large blocks: half of the blocks
// have less than 2 MiB, 40 % 2 to 64 MiB, and 10 % 64 to 1,500 MiB. They are given
// back in random order, while what lives drifts between half and all of a budget.
func Mixture(c Config) *trace.Trace {
	b := newBuilder("mixture", c)
	h := b.heap(b.between(11, 15) * gib)
	const phases, perPhase = 12, 500
	for phase := range phases {
		target := h.budget
		if phase > 0 {
			target = b.between(h.budget/2, h.budget)
		}
		for range perPhase {
			var bytes uint64
			switch p := b.below(10); {
			case p < 5:
				bytes = b.spread(512, 2*mib)
			case p < 9:
				bytes = b.spread(2*mib, 64*mib)
			default:
				bytes = b.between(64*mib, 1500*mib)
			}
			h.alloc(roundUp(bytes, 512), target)
		}
		b.sync()
	}
	return b.done()
}

// heap is what lives of a program whose blocks are given back in random order.
type heap struct {
	b      *builder
	budget uint64
	live   uint64
	blocks []heapBlock
}

type heapBlock struct {
	block block
	bytes uint64
}

func (b *builder) heap(budget uint64) *heap { return &heap{b: b, budget: budget} }

// alloc allocates, and gives back others first until no more than target lives.
func (h *heap) alloc(bytes, target uint64) {
	b := h.b
	for h.live+bytes > target && len(h.blocks) > 0 {
		i := b.below(uint64(len(h.blocks)))
		b.free(h.blocks[i].block)
		h.live -= h.blocks[i].bytes
		h.blocks[i] = h.blocks[len(h.blocks)-1]
		h.blocks = h.blocks[:len(h.blocks)-1]
	}
	stream := uint32(b.below(trace.MaxStreams) % uint64(b.t.Streams))
	x := b.allocOn(stream, tagActivations, bytes)
	if b.below(8) == 0 && b.t.Streams > 1 {
		b.use((stream+1)%uint32(b.t.Streams), x)
	}
	h.blocks = append(h.blocks, heapBlock{x, bytes})
	h.live += bytes
}
