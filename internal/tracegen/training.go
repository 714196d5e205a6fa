package tracegen

import "github.com/cuvmm/cuvmm/vmm/pool/trace"

// Training is pre-training of a language model with activation recomputation:
// weights, gradients and optimizer states that live long, of which the states
// come into being only in the middle of the first step and the gradients anew
// in each; checkpoints between layers; and the layers' own values, which come and
// go twice. Batches differ in length, so that the holes of one step do not fit
// the next.
func Training(c Config) *trace.Trace {
	b := newBuilder("training", c)
	shapes := []struct {
		model
		stateBytes uint64 // of an element of an optimizer state
		master     bool   // weights of four bytes beside those of two
	}{
		{gpt2Medium, 4, true}, {gpt2Large, 4, true}, {pythia410m, 4, true}, {smollm360m, 4, true}, {qwen05b, 4, true}, {tinyllama, 2, false},
	}
	shape := shapes[b.below(uint64(len(shapes)))]
	p := trainer{builder: b, model: shape.model, stateBytes: shape.stateBytes, master: shape.master}
	p.manyTensors = b.below(2) == 0

	parameters := sum(p.parameters())
	states := parameters * (2 + 2 + 2*p.stateBytes)
	if p.master {
		states += 4 * parameters
	}
	// As many tokens as fit, as people choose their batch.
	budget := max(b.between(11, 15)*gib, states+gib)
	perToken := p.vocab*10 + 2*p.layers*p.hidden
	perLayer := 2 * (14*p.hidden + 8*p.width() + 6*p.ff)
	p.most = min(max((budget-states)/(perToken+perLayer), 1024), 16384) &^ 63

	jitter := b.one(0, 8, 4, 4) // lengths vary by this part, or not at all
	micro := b.between(2, 4)
	p.setup()
	for step := range uint64(5) {
		var losses []block
		for i := range micro {
			tokens := p.most
			if jitter > 0 {
				tokens -= b.below(p.most/jitter) &^ 7
			}
			losses = append(losses, p.microBatch(tokens, i == micro-1))
		}
		p.step()
		b.free(losses...)
		p.loss(step)
		if step == 2 {
			p.evaluate()
		}
		b.sync()
	}
	return b.done()
}

type trainer struct {
	*builder
	model
	stateBytes  uint64
	master      bool
	manyTensors bool   // the optimizer takes temporary tensors for all parameters at once
	most        uint64 // tokens of a micro-batch

	gradients []block // by parameter; none before the first micro-batch
	states    []block
	history   []block // scalars that are logged now and then
}

func (p *trainer) setup() {
	for _, n := range p.parameters() {
		p.alloc(tagWeights, 2*n)
		p.gradients = append(p.gradients, none)
	}
	if p.master {
		for _, n := range p.parameters() {
			p.alloc(tagOptimizer, 4*n)
		}
	}
	p.alloc(tagWorkspace, 32*mib) // of the matrix library, for good
}

// gradient makes the gradient of a parameter: it stays in the first micro-batch
// of a step, and is added to that one later.
func (p *trainer) gradient(parameter int, elements uint64) {
	g := p.alloc(tagGradients, 2*elements)
	if p.gradients[parameter] == none {
		p.gradients[parameter] = g
		return
	}
	p.free(g)
}

func (p *trainer) microBatch(tokens uint64, last bool) (loss block) {
	ids := p.alloc(tagInputs, 8*tokens)
	labels := p.alloc(tagInputs, 8*tokens)
	positions := p.alloc(tagInputs, 2*2*p.headDim*tokens)
	var checkpoints []block
	x := p.act(tokens * p.hidden)
	for range p.layers {
		checkpoints = append(checkpoints, x)
		x, _ = p.layerForward(p.model, tokens, false, nil)
	}
	grad, loss := p.head(tokens, x)
	embedding, perLayer := 0, len(p.layerParameters())
	linears := p.linears()
	for layer := int(p.layers) - 1; layer >= 0; layer-- {
		output, k := p.layerForward(p.model, tokens, true, nil)
		p.free(output)
		at := embedding + 1 + layer*perLayer
		grad = p.layerBackward(p.model, tokens, k, grad, func(i int) {
			p.gradient(at+i, linears[i].in*linears[i].out)
		})
		// What is left of a layer is small: biases and norms.
		for i, n := range p.layerParameters()[len(linears):] {
			p.gradient(at+len(linears)+i, n)
		}
		p.free(checkpoints[layer])
		if p.t.Streams > 1 && last {
			// Gradients leave for the other machines on a stream of their own.
			for i := range linears {
				p.use(1, p.gradients[at+i])
			}
		}
	}
	if !p.tied {
		p.gradient(embedding, p.vocab*p.hidden)
	}
	p.free(grad, ids, labels, positions)
	return loss
}

// head is the loss and its gradient: the largest blocks of all.
func (p *trainer) head(tokens uint64, x block) (grad, loss block) {
	end := len(p.gradients) - len(p.ends()) + 1
	norm, dlogits, loss := p.crossEntropy(p.model, tokens)
	dnorm := p.act(tokens * p.hidden)
	if p.tied {
		p.gradient(0, p.vocab*p.hidden)
	} else {
		p.gradient(end+1, p.vocab*p.hidden)
	}
	p.free(dlogits, norm)
	grad = p.act(tokens * p.hidden)
	p.gradient(end, p.hidden)
	p.free(dnorm, x)
	return grad, loss
}

func (p *trainer) step() {
	var norms []block
	for range p.gradients {
		norms = append(norms, p.alloc(tagOptimizer, 4))
	}
	total := p.alloc(tagOptimizer, 4*uint64(len(norms)))
	p.free(norms...)
	parameters := p.parameters()
	if p.states == nil {
		for _, n := range parameters {
			p.states = append(p.states, p.alloc(tagOptimizer, p.stateBytes*n), p.alloc(tagOptimizer, p.stateBytes*n))
		}
	}
	var temporary []block
	for _, n := range parameters {
		if !p.manyTensors {
			p.free(temporary...)
			temporary = temporary[:0]
		}
		temporary = append(temporary, p.alloc(tagOptimizer, p.stateBytes*n))
	}
	p.free(temporary...)
	p.free(total)
	p.free(p.gradients...)
	for i := range p.gradients {
		p.gradients[i] = none
	}
}

// loss keeps a scalar that is logged every third step: small blocks that outlive
// the large ones round them.
func (p *trainer) loss(step uint64) {
	p.history = append(p.history, p.alloc(tagActivations, 4), p.alloc(tagActivations, 4))
	if step%3 == 2 {
		p.free(p.history...)
		p.history = nil
	}
}

// evaluate runs forward alone, over other lengths.
func (p *trainer) evaluate() {
	for range 2 {
		tokens := p.between(p.most/4, p.most) &^ 7
		ids := p.alloc(tagInputs, 8*tokens)
		x := p.act(tokens * p.hidden)
		for range p.layers {
			y, _ := p.layerForward(p.model, tokens, false, nil)
			p.free(x)
			x = y
		}
		logits := p.act(tokens * p.vocab)
		p.free(x)
		p.history = append(p.history, p.alloc(tagActivations, 4))
		p.free(logits, ids)
	}
}
