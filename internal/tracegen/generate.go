package tracegen

import (
	"fmt"
	"math/bits"
	"math/rand/v2"

	"github.com/cuvmm/cuvmm/vmm/pool/trace"
)

// Config says which trace a generator makes. The zero value is seed 0, one
// stream, full size.
type Config struct {
	// Seed picks the model, the lengths and everything else that is random.
	Seed uint64
	// Streams is how many streams the program uses; 0 is 1, as programs do
	// unless told otherwise.
	Streams int
	// Divisor makes every block smaller by this factor, rounded up; 0 is 1. At
	// full size the blocks that live at once are 4 to 16 GiB. The operations
	// stay the same.
	Divisor uint64
}

// Generator makes traces of one kind of program.
type Generator struct {
	Name string
	Make func(Config) *trace.Trace
}

// Generators are all generators of this package, in a fixed order.
func Generators() []Generator {
	return []Generator{{"training", Training}, {"lora", LoRA}, {"serving", Serving}, {"uniform", Uniform}, {"mixture", Mixture}, {"caches", Caches}}
}

const (
	mib = 1 << 20
	gib = 1 << 30
)

// The tags of generated traces, in the order of Trace.Tags.
const (
	tagWeights uint32 = iota
	tagOptimizer
	tagGradients
	tagActivations
	tagWorkspace
	tagInputs
	tagKV
)

var tagNames = []string{"weights", "optimizer", "gradients", "activations", "workspace", "inputs", "kv"}

// builder writes a trace down. Its programs use integers alone, since floating
// point differs between machines, and of math/rand only the generator itself.
type builder struct {
	pcg     *rand.PCG
	t       trace.Trace
	next    uint32
	live    []bool
	divisor uint64
}

// block is a block of the trace under way; none is no block.
type block uint32

const none = ^block(0)

func newBuilder(name string, c Config) *builder {
	var program uint64 // the same seed is no relation between two programs
	for _, letter := range []byte(name) {
		program = program<<8 | uint64(letter)
	}
	b := &builder{pcg: rand.NewPCG(c.Seed, program), divisor: max(c.Divisor, 1)}
	b.t = trace.Trace{Name: fmt.Sprintf("%s-%d", name, c.Seed), Streams: min(max(c.Streams, 1), trace.MaxStreams), Tags: tagNames}
	return b
}

func (b *builder) allocOn(stream, tag uint32, bytes uint64) block {
	id := b.next
	b.next++
	b.live = append(b.live, true)
	b.t.Ops = append(b.t.Ops, trace.Op{Kind: trace.Alloc, Tag: tag, Stream: stream, ID: id, Bytes: int((bytes + b.divisor - 1) / b.divisor)})
	return block(id)
}

func (b *builder) alloc(tag uint32, bytes uint64) block { return b.allocOn(0, tag, bytes) }

// act takes an activation of so many elements of two bytes.
func (b *builder) act(elements uint64) block { return b.alloc(tagActivations, 2*elements) }

func (b *builder) free(blocks ...block) {
	for _, x := range blocks {
		if x == none {
			continue
		}
		b.live[x] = false
		b.t.Ops = append(b.t.Ops, trace.Op{Kind: trace.Free, ID: uint32(x)})
	}
}

// use has the stream work on the block, where the trace has so many streams.
func (b *builder) use(stream uint32, x block) {
	if int(stream) < b.t.Streams {
		b.t.Ops = append(b.t.Ops, trace.Op{Kind: trace.Use, Stream: stream, ID: uint32(x)})
	}
}

func (b *builder) sync() { b.t.Ops = append(b.t.Ops, trace.Op{Kind: trace.Sync}) }

// done gives back what lives, the newest first, and returns the trace.
func (b *builder) done() *trace.Trace {
	for id := len(b.live) - 1; id >= 0; id-- {
		if b.live[id] {
			b.free(block(id))
		}
	}
	b.sync()
	return &b.t
}

// below returns a number below n, which is far from 2^64.
func (b *builder) below(n uint64) uint64 {
	high, _ := bits.Mul64(b.pcg.Uint64(), n)
	return high
}

// between returns a number from low to high, both included.
func (b *builder) between(low, high uint64) uint64 { return low + b.below(high-low+1) }

// spread returns a number from low to high with as many in each octave, which
// is how lengths of texts and sizes of tensors come. Both are powers of two.
func (b *builder) spread(low, high uint64) uint64 {
	octaves := uint64(0)
	for low<<octaves < high {
		octaves++
	}
	from := low << b.below(octaves)
	return from + b.below(from)
}

func (b *builder) one(in ...uint64) uint64 { return in[b.below(uint64(len(in)))] }

func roundUp(n, to uint64) uint64 { return (n + to - 1) / to * to }
