package tracegen

import "github.com/cuvmm/cuvmm/vmm/pool/trace"

// Serving is inference for requests that come and go: prompts and responses of
// random length, a key-value cache for each request that grows while it lives,
// and the passing values of prompts of every size. By seed, a cache is pages of a
// fixed number of tokens, or two blocks a layer, or one block, which move to larger
// ones when they grow.
func Serving(c Config) *trace.Trace {
	b := newBuilder("serving", c)
	shapes := []struct {
		model
		weightBits, budget uint64 // the budget in GiB
	}{
		{llama1b, 16, 7}, {llama3b, 16, 13}, {qwen15b, 16, 10}, {qwen7b, 4, 12}, {llama3b, 8, 11},
	}
	shape := shapes[b.below(uint64(len(shapes)))]
	s := server{builder: b, model: shape.model, form: b.below(3)}
	switch s.form {
	case pages:
		s.unit = b.one(16, 32, 64)
	case layers:
		s.unit = b.one(256, 512)
	case whole:
		s.unit = b.one(64, 128)
	}
	weights := uint64(0)
	for _, n := range s.parameters() {
		b.alloc(tagWeights, n*shape.weightBits/8)
		weights += n * shape.weightBits / 8
	}
	b.alloc(tagWorkspace, 32*mib)
	s.budget = shape.budget*gib - weights
	longest := b.one(4096, 8192)
	rate := b.between(25, 50) // arrivals in 100 steps, or a few more
	for len(b.t.Ops) < 80_000 {
		for b.below(100) < rate {
			prompt, answer := b.spread(32, longest), b.spread(256, longest)
			if !s.admit(prompt, answer, longest) {
				break
			}
		}
		s.decode()
		b.sync()
	}
	return b.done()
}

// The forms of a cache.
const (
	pages uint64 = iota
	layers
	whole
)

type server struct {
	*builder
	model
	form     uint64
	unit     uint64 // tokens by which a cache grows
	budget   uint64 // bytes of caches
	requests []*request
	arrived  uint64
}

type request struct {
	stream         uint32
	tokens, end    uint64 // how many it has, and will have
	room           uint64 // tokens that its cache holds
	cache          []block
	tables, output block // small, and as old as the request
}

func (s *server) perToken() uint64 { return 2 * 2 * s.layers * s.kvWidth() }

// admit starts a request, unless its whole life would not fit.
func (s *server) admit(prompt, answer, longest uint64) bool {
	end := min(prompt+answer, longest)
	committed := (roundUp(end, s.unit) + s.unit) * s.perToken()
	if s.form == whole {
		committed += committed // one at a time has it twice while it moves
	}
	for _, r := range s.requests {
		committed += (roundUp(r.end, s.unit) + s.unit) * s.perToken()
	}
	if committed > s.budget {
		return false
	}
	r := &request{stream: uint32(s.arrived % uint64(s.t.Streams)), end: end}
	s.arrived++
	r.tables = s.allocOn(r.stream, tagInputs, 4*roundUp(longest, s.unit)/s.unit)
	r.output = s.allocOn(r.stream, tagInputs, 8*longest)
	s.prefill(r, min(prompt, end))
	s.requests = append(s.requests, r)
	return true
}

// prefill runs the prompt through all layers, and fills the cache.
func (s *server) prefill(r *request, prompt uint64) {
	on := func(bytes uint64) block { return s.allocOn(r.stream, tagActivations, bytes) }
	ids := s.allocOn(r.stream, tagInputs, 8*prompt)
	x := on(2 * prompt * s.hidden)
	switch s.form {
	case pages:
		s.grow(r, prompt)
	case whole:
		r.room = roundUp(prompt, s.unit)
		r.cache = append(r.cache, s.allocOn(r.stream, tagKV, r.room*s.perToken()))
	}
	for range s.layers {
		norm := on(2 * prompt * s.hidden)
		qkv := on(2 * prompt * (s.width() + 2*s.kvWidth()))
		s.free(norm)
		if s.form == layers {
			r.room = roundUp(prompt, s.unit)
			r.cache = append(r.cache, s.kv(r, r.room), s.kv(r, r.room))
		}
		attention := on(2 * prompt * s.width())
		s.free(qkv)
		out := on(2 * prompt * s.hidden)
		s.free(attention)
		norm = on(2 * prompt * s.hidden)
		up := on(2 * prompt * 2 * s.ff)
		s.free(norm)
		inner := on(2 * prompt * s.ff)
		s.free(up)
		y := on(2 * prompt * s.hidden)
		s.free(inner, out, x)
		x = y
	}
	logits := on(4 * s.vocab)
	s.free(x, ids, logits)
	r.tokens = prompt
}

func (s *server) kv(r *request, tokens uint64) block {
	return s.allocOn(r.stream, tagKV, 2*tokens*s.kvWidth())
}

// grow has the cache hold so many tokens.
func (s *server) grow(r *request, tokens uint64) {
	if s.form == pages {
		for r.room < tokens {
			r.cache = append(r.cache, s.allocOn(r.stream, tagKV, s.unit*s.perToken()))
			r.room += s.unit
		}
		return
	}
	if r.room >= tokens {
		return
	}
	r.room = roundUp(tokens, s.unit)
	for i, old := range r.cache {
		r.cache[i] = s.allocOn(r.stream, tagKV, r.room*s.perToken()/uint64(len(r.cache)))
		s.free(old)
	}
}

// decode gives every request some tokens; complete ones leave.
func (s *server) decode() {
	if len(s.requests) == 0 {
		return
	}
	batch := uint64(len(s.requests))
	logits := s.alloc(tagActivations, 4*batch*s.vocab)
	probabilities := s.alloc(tagActivations, 4*batch*s.vocab)
	sorted := s.alloc(tagActivations, 12*batch*s.vocab)
	s.free(probabilities, sorted)
	chosen := s.alloc(tagActivations, 8*batch)
	s.free(logits)
	stay := s.requests[:0]
	for _, r := range s.requests {
		r.tokens += 16 // the tokens of several passes, which take no memory of their own
		if r.tokens < r.end {
			s.grow(r, r.tokens)
			stay = append(stay, r)
			continue
		}
		s.free(r.cache...)
		s.free(r.tables, r.output)
	}
	s.requests = stay
	s.free(chosen)
}
