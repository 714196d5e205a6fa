//go:build linux && cgo && (amd64 || arm64) && !cuvmm_nocgo

package main

import (
	"testing"
	"time"

	"github.com/cuvmm/cuvmm/cuda/sim"
	"github.com/cuvmm/cuvmm/vmm/pool"
	"github.com/stretchr/testify/require"
)

// program makes the requests of one, on a pool of the library and on one without a cache.
type program struct {
	w       *world
	plain   *pool.Pool
	entered uint64 // calls that entered Go, without the question whether the stream captures
	twins   map[uintptr]pool.Block
}

func (p *program) alloc(bytes int) uintptr {
	before := centries()
	ptr, status := cAlloc(p.w.handle, bytes, p.w.streams[0].Handle())
	require.EqualValues(p.w.t, cOK, status)
	p.entered += centries() - before - 1 // the software driver is asked in Go
	twin, err := p.plain.Alloc(pool.Request{Bytes: bytes, Stream: p.w.streams[0]})
	require.NoError(p.w.t, err)
	p.twins[ptr] = twin
	return ptr
}

func (p *program) free(blocks ...uintptr) {
	for _, b := range blocks {
		before := centries()
		require.EqualValues(p.w.t, cOK, cFree(p.w.handle, b))
		p.entered += centries() - before
		require.NoError(p.w.t, p.plain.Free(p.twins[b]))
		delete(p.twins, b)
	}
}

// step is one of a training of small layers: activations are freed in the backward pass, while
// gradients come, and the optimizer works on lists of tensors. Its phases request different
// classes.
func (p *program) step(int) {
	const layers, weight, activation = 24, 64 << 10, 16 << 10
	var held, gradients []uintptr
	for range layers {
		held = append(held, p.alloc(activation), p.alloc(activation), p.alloc(128), p.alloc(128), p.alloc(activation))
	}
	for i := len(held) - 1; i >= 0; i-- {
		if i%5 == 0 {
			gradients = append(gradients, p.alloc(weight), p.alloc(512), p.alloc(512))
		}
		g := p.alloc(activation)
		p.free(held[i], g)
	}
	for range 3 {
		var list []uintptr
		for range layers {
			list = append(list, p.alloc(weight), p.alloc(512), p.alloc(512), p.alloc(512))
		}
		p.free(list...)
	}
	p.free(gradients...)
}

// token is one of a decoding whose caches grow by concatenation.
func (p *program) token(caches []uintptr, i int) {
	for at := range caches {
		var list []uintptr
		for range 6 {
			list = append(list, p.alloc(8<<10), p.alloc(24<<10))
		}
		grown := p.alloc((64 + i) * 8 << 10)
		p.free(caches[at])
		caches[at] = grown
		p.free(list...)
	}
}

// A training enters Go for nothing once it is warm, and a decoding only when its caches reach
// the next class; and the pool holds little more than without a cache.
func TestASteadyProgramDoesNotEnterGo(t *testing.T) {
	for name, most := range map[string]int{"training": 0, "decoding": 3} {
		t.Run(name, func(t *testing.T) {
			_, sys := sim.Open(t)
			w := newWorld(t, sys.Devices()[0], 1)
			plain, err := pool.New(w.d, pool.Options{})
			require.NoError(t, err)
			p := &program{w: w, plain: plain, twins: map[uintptr]pool.Block{}}
			var held, caches []uintptr
			do := p.step
			if name == "decoding" {
				for range 8 { // weights, which are as large as what the cache keeps
					held = append(held, p.alloc(3<<19), p.alloc(1<<19), p.alloc(2<<20), p.alloc(2<<20))
				}
				for range 16 {
					caches = append(caches, p.alloc(512<<10))
				}
				do = func(i int) { p.token(caches, i) }
			}
			const steps, warm = 80, 40
			const decay = time.Minute // of the pool, which empties the cache; then two steps fill it, if an instrumented build is that slow
			entering, began := 0, time.Now()
			for i := range steps {
				p.entered = 0
				if do(i); p.entered > 0 && i >= warm {
					entering++
				}
			}
			require.LessOrEqual(t, entering, most+2*int(time.Since(began)/decay))
			require.LessOrEqual(t, w.e.pool.Stats().PeakReserved, plain.Stats().PeakReserved+8<<20)
			p.free(append(held, caches...)...)
			require.NoError(t, plain.Close())
		})
	}
}
