package main

import (
	_ "embed"
	"errors"
	"fmt"
	"math"

	"github.com/cuvmm/cuvmm/cuda"
	"github.com/cuvmm/cuvmm/cuda/sim"
	"github.com/cuvmm/cuvmm/vmm"
)

// model stands for a language model: it keeps an entry of each token in each layer, and attends
// over those of a sequence, which lie one behind the other.
type model struct {
	layers int
	stream *cuda.Stream
	module *cuda.Module
	kernel *cuda.Kernel
	found  *vmm.Array[float32] // by the last attention
}

// entry is what a layer keeps of a token.
type entry struct{ Key, Value [width]float32 }

const (
	width      = 16
	entryBytes = 2 * width * 4
)

// newModel returns a model with so many layers.
func newModel(dev *cuda.Device, layers int) (m *model, err error) {
	m = &model{layers: layers}
	if m.stream, err = dev.NewStream(cuda.StreamOptions{}); err != nil {
		return nil, err
	}
	if m.module, err = dev.LoadModule(ptx); err == nil {
		if m.kernel, err = m.module.Kernel(attention); err == nil {
			m.found, err = vmm.NewArray[float32](dev, vmm.BufferOptions{Reserve: layers * width})
		}
	}
	if err == nil {
		err = m.found.Resize(nil, layers*width)
	}
	if err != nil {
		return nil, errors.Join(err, m.Close())
	}
	return m, nil
}

// Close waits for the model's work.
func (m *model) Close() (err error) {
	if m.found != nil {
		err = m.found.Close()
	}
	if m.module != nil {
		err = errors.Join(err, m.module.Close())
	}
	return errors.Join(err, m.stream.Close())
}

// bytes is the size of so many tokens.
func (m *model) bytes(tokens int) int { return tokens * m.layers * entryBytes }

// entries returns what the model keeps of tokens.
func (m *model) entries(tokens []uint32) (all []entry) {
	for _, token := range tokens {
		for layer := range m.layers {
			var e entry
			for i := range width {
				token = token*1664525 + 1013904223 + uint32(layer)
				e.Key[i], e.Value[i] = float32(token>>24)/512, float32(token>>16&0xff)
			}
			all = append(all, e)
		}
	}
	return all
}

// write writes tokens of a sequence, the first of which is number from, to its addresses.
func (m *model) write(sequence cuda.Ptr, from int, tokens []uint32) error {
	return cuda.UploadOf(m.stream, sequence+cuda.Ptr(m.bytes(from)), m.entries(tokens))
}

// attend finds what the last of a sequence's tokens is about, in each layer.
func (m *model) attend(sequence cuda.Ptr, tokens int) error {
	each := cuda.Launch{Grid: [3]int{m.layers, 1, 1}, Block: [3]int{width, 1, 1}}
	return m.kernel.Launch(m.stream, each, sequence, uint32(tokens), uint32(m.layers), m.found.Ptr())
}

// check compares what attend found with what it should have.
func (m *model) check(tokens []uint32) error {
	found, want := make([]float32, m.layers*width), attended(m.entries(tokens), m.layers)
	if err := m.found.All().CopyTo(m.stream, found); err != nil {
		return err
	}
	for i, v := range want {
		if !(math.Abs(float64(found[i]-v)) < 1e-2) { // values are up to 255
			return fmt.Errorf("layer %d finds %v at %d, not %v", i/width, found[i], i%width, v)
		}
	}
	return nil
}

// attended is the kernel in Go.
func attended(tokens []entry, layers int) (found []float32) {
	for layer := range layers {
		query := tokens[len(tokens)-layers+layer].Key
		var sum float32
		var values [width]float32
		for at := layer; at < len(tokens); at += layers {
			var score float32
			for i, k := range tokens[at].Key {
				score += query[i] * k
			}
			weight := float32(math.Exp2(float64(score)))
			sum += weight
			for i, v := range tokens[at].Value {
				values[i] += weight * v
			}
		}
		for _, v := range values {
			found = append(found, v/sum)
		}
	}
	return found
}

//go:embed attend.ptx
var ptx []byte

// attention is the kernel's name in the PTX.
const attention = "sample_attend"

func init() {
	sim.RegisterKernel(attention, func(k *sim.Kernel) {
		tokens, layers := int(sim.Param[uint32](k, 1)), int(sim.Param[uint32](k, 2))
		sequence := sim.Load[entry](k, sim.Param[uint64](k, 0), tokens*layers)
		sim.Store(k, sim.Param[uint64](k, 3), attended(sequence, layers))
	})
}
