package tracegen

// model is the shape of a language model, as published with its weights. Its
// activations have two bytes an element.
type model struct {
	layers, hidden, heads, kvHeads, headDim, ff, vocab uint64

	gated  bool // three matrices in the feed-forward part, not two
	biases bool // linear layers have one
	tied   bool // the embedding is also the output layer
}

var (
	gpt2Large  = model{layers: 36, hidden: 1280, heads: 20, kvHeads: 20, headDim: 64, ff: 5120, vocab: 50257, biases: true, tied: true}
	gpt2Medium = model{layers: 24, hidden: 1024, heads: 16, kvHeads: 16, headDim: 64, ff: 4096, vocab: 50257, biases: true, tied: true}
	pythia410m = model{layers: 24, hidden: 1024, heads: 16, kvHeads: 16, headDim: 64, ff: 4096, vocab: 50304, biases: true}
	smollm360m = model{layers: 32, hidden: 960, heads: 15, kvHeads: 5, headDim: 64, ff: 2560, vocab: 49152, gated: true, tied: true}
	qwen05b    = model{layers: 24, hidden: 896, heads: 14, kvHeads: 2, headDim: 64, ff: 4864, vocab: 151936, gated: true, tied: true}
	qwen15b    = model{layers: 28, hidden: 1536, heads: 12, kvHeads: 2, headDim: 128, ff: 8960, vocab: 151936, gated: true, tied: true}
	qwen7b     = model{layers: 28, hidden: 3584, heads: 28, kvHeads: 4, headDim: 128, ff: 18944, vocab: 152064, gated: true}
	llama1b    = model{layers: 16, hidden: 2048, heads: 32, kvHeads: 8, headDim: 64, ff: 8192, vocab: 128256, gated: true, tied: true}
	llama3b    = model{layers: 28, hidden: 3072, heads: 24, kvHeads: 8, headDim: 128, ff: 8192, vocab: 128256, gated: true, tied: true}
	tinyllama  = model{layers: 22, hidden: 2048, heads: 32, kvHeads: 4, headDim: 64, ff: 5632, vocab: 32000, gated: true}
)

func (m model) width() uint64   { return m.heads * m.headDim }
func (m model) kvWidth() uint64 { return m.kvHeads * m.headDim }

// linear is a matrix of the model.
type linear struct{ in, out uint64 }

// linears are the matrices of a layer: query, key, value, output, up (or gate),
// then up where it is gated, and down.
func (m model) linears() []linear {
	l := []linear{{m.hidden, m.width()}, {m.hidden, m.kvWidth()}, {m.hidden, m.kvWidth()}, {m.width(), m.hidden}, {m.hidden, m.ff}}
	if m.gated {
		l = append(l, linear{m.hidden, m.ff})
	}
	return append(l, linear{m.ff, m.hidden})
}

// layerParameters are the elements of each parameter of a layer: the matrices,
// their biases, two norms.
func (m model) layerParameters() []uint64 {
	var p []uint64
	for _, l := range m.linears() {
		p = append(p, l.in*l.out)
	}
	if m.biases {
		for _, l := range m.linears() {
			p = append(p, l.out)
		}
	}
	return append(p, m.hidden, m.hidden)
}

// ends are the parameters before and after the layers.
func (m model) ends() []uint64 {
	p := []uint64{m.vocab * m.hidden, m.hidden}
	if !m.tied {
		p = append(p, m.vocab*m.hidden)
	}
	return p
}

// parameters are the elements of all parameters, in the order in which a
// program makes them: the embedding, the layers, the rest.
func (m model) parameters() []uint64 {
	p := m.ends()[:1]
	for range m.layers {
		p = append(p, m.layerParameters()...)
	}
	return append(p, m.ends()[1:]...)
}

func sum(p []uint64) uint64 {
	total := uint64(0)
	for _, n := range p {
		total += n
	}
	return total
}
