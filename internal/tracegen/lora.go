package tracegen

import "github.com/cuvmm/cuvmm/vmm/pool/trace"

// LoRA is fine-tuning of small adapters beside frozen weights, without
// recomputation: all activations of all layers live at once, and each batch is
// as long as its longest text, so that every step asks for other sizes than the
// one before it.
func LoRA(c Config) *trace.Trace {
	b := newBuilder("lora", c)
	shapes := []struct {
		model
		weightBits uint64
		budget     uint64
	}{
		{llama1b, 16, 11}, {llama3b, 16, 13}, {qwen15b, 16, 12}, {qwen7b, 4, 13}, {llama3b, 8, 12},
	}
	shape := shapes[b.below(uint64(len(shapes)))]
	p := tuner{trainer: trainer{builder: b, model: shape.model}, bits: shape.weightBits, rank: b.one(8, 16, 32, 64)}
	p.dropout = b.below(2) == 0
	p.everywhere = b.below(2) == 0
	p.setup()

	perLayer := uint64(0)
	for _, l := range p.linears() {
		perLayer += 2*l.out + 2*p.rank
		if p.dropout {
			perLayer += 3 * l.in
		}
	}
	perLayer += 2 * (5*p.hidden + 2*p.ff)
	weights := sum(p.parameters())*p.bits/8 + 2*p.vocab*p.hidden
	most := (max(shape.budget*gib, weights+2*gib) - weights) / (p.layers*perLayer + 10*p.vocab)
	longest := max(most, 256) &^ 7
	for step := range uint64(14) {
		// One to four texts, padded to the longest of them.
		texts := b.between(1, 4)
		length := uint64(0)
		for range texts {
			length = max(length, b.spread(64, 4096))
		}
		tokens := roundUp(length, 8) * texts
		switch {
		case step == 3:
			tokens = longest // sooner or later one is
		case tokens > longest:
			tokens = longest - b.below(longest/2)&^7 // fewer texts
		}
		loss := p.microBatch(tokens)
		p.step()
		b.free(loss)
		p.loss(step)
		b.sync()
	}
	return b.done()
}

type tuner struct {
	trainer
	bits       uint64 // of a frozen weight
	rank       uint64
	dropout    bool
	everywhere bool // adapters beside all matrices, or only query and value

	adapters []uint64 // elements of each trained parameter
}

func (p *tuner) adapted(matrix int) bool { return p.everywhere || matrix == 0 || matrix == 2 }

func (p *tuner) setup() {
	for _, n := range p.ends() {
		p.alloc(tagWeights, 2*n)
	}
	for range p.layers {
		for _, n := range p.layerParameters() {
			if p.bits == 16 || n < 1<<16 {
				p.alloc(tagWeights, 2*n)
				continue
			}
			p.alloc(tagWeights, n*p.bits/8)
			p.alloc(tagWeights, 4*n/64) // a scale for each 64 weights
		}
	}
	for range p.layers {
		for i, l := range p.linears() {
			if p.adapted(i) {
				for _, n := range []uint64{l.in * p.rank, p.rank * l.out} {
					p.alloc(tagWeights, 4*n)
					p.adapters = append(p.adapters, n)
					p.gradients = append(p.gradients, none)
				}
			}
		}
	}
	p.alloc(tagWorkspace, 32*mib)
}

// unpacked has a frozen matrix in two bytes an element, for as long as it is
// multiplied with.
func (p *tuner) unpacked(l linear) {
	if p.bits < 16 {
		p.free(p.alloc(tagWorkspace, 2*l.in*l.out))
	}
}

func (p *tuner) microBatch(tokens uint64) (loss block) {
	loader := uint32(p.t.Streams - 1) // batches come on a stream of their own, where there is one
	ids := p.allocOn(loader, tagInputs, 8*tokens)
	labels := p.allocOn(loader, tagInputs, 8*tokens)
	mask := p.allocOn(loader, tagInputs, 8*tokens)
	if loader > 0 {
		p.use(0, ids)
		p.use(0, labels)
		p.use(0, mask)
	}
	positions := p.alloc(tagInputs, 2*2*p.headDim*tokens)
	x := p.act(tokens * p.hidden)
	var layers []kept
	var inputs []block
	for range p.layers {
		matrix := 0
		y, k := p.layerForward(p.model, tokens, true, func(k *kept, l linear) {
			p.unpacked(l)
			if p.adapted(matrix) {
				p.adapt(k, l, tokens)
			}
			matrix++
		})
		layers, inputs = append(layers, k), append(inputs, x)
		x = y
	}
	norm, dlogits, loss := p.crossEntropy(p.model, tokens)
	grad := p.act(tokens * p.hidden)
	p.free(dlogits, norm, x)
	perLayer := len(p.adapters) / int(p.layers)
	for layer := int(p.layers) - 1; layer >= 0; layer-- {
		at := (layer + 1) * perLayer
		linears := p.linears()
		grad = p.layerBackward(p.model, tokens, layers[layer], grad, func(i int) {
			p.unpacked(linears[i])
			if !p.adapted(i) {
				return
			}
			dinner := p.act(tokens * p.rank)
			// The order of the matrices differs from that of the list; the sizes
			// are what matters here, and each gradient is made once.
			for range 2 {
				at--
				p.gradient(at, 2*p.adapters[at]) // four bytes an element
			}
			p.free(dinner)
		})
		p.free(inputs[layer])
	}
	p.free(grad, ids, labels, mask, positions)
	return loss
}

// adapt runs the adapter of a matrix: the input, perhaps with dropout and its
// mask, a narrow inner value, and what is added to the output.
func (p *tuner) adapt(k *kept, l linear, tokens uint64) {
	if p.dropout {
		k.adapters = append(k.adapters, p.act(tokens*l.in), p.alloc(tagActivations, tokens*l.in))
	}
	k.adapters = append(k.adapters, p.act(tokens*p.rank))
	wide := p.act(tokens * l.out)
	scaled := p.act(tokens * l.out)
	p.free(wide, scaled)
}

func (p *tuner) step() {
	if p.states == nil {
		for _, n := range p.adapters {
			p.states = append(p.states, p.alloc(tagOptimizer, 4*n), p.alloc(tagOptimizer, 4*n))
		}
	}
	var temporary []block
	for _, n := range p.adapters {
		temporary = append(temporary, p.alloc(tagOptimizer, 4*n))
	}
	p.free(temporary...)
	p.free(p.gradients...)
	for i := range p.gradients {
		p.gradients[i] = none
	}
}
