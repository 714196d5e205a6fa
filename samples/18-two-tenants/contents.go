package main

import (
	"errors"
	"fmt"
	"io"
	"slices"

	"github.com/cuvmm/cuvmm/csrc/kernels"
	"github.com/cuvmm/cuvmm/cuda"
	"github.com/cuvmm/cuvmm/samples/internal/app"
	"github.com/cuvmm/cuvmm/vmm"
)

const (
	// piece is how many elements have a sum of their own: 4 MiB, a part of a chunk.
	piece = mib
	// side is how many streams there are: a piece alone does not fill a GPU.
	side = 8
)

// contents fills arrays, and finds out on the GPU whether they are as they were filled.
type contents struct {
	streams   []*cuda.Stream
	sums      *vmm.Array[uint64]
	fill, sum *cuda.Kernel
	owned     []io.Closer
}

// open makes what it needs. The caller calls Close, even after an error.
func (c *contents) open(e *app.Env) (err error) {
	for range side {
		s, err := e.Device.NewStream(cuda.StreamOptions{})
		if err != nil {
			return err
		}
		c.streams, c.owned = append(c.streams, s), append(c.owned, s)
	}
	if c.sums, err = vmm.NewArray[uint64](e.Device, vmm.BufferOptions{}); err != nil {
		return err
	}
	c.owned = append(c.owned, c.sums)
	module, err := e.Device.LoadModule(kernels.Basic)
	if err != nil {
		return err
	}
	c.owned = append(c.owned, module)
	if c.fill, err = module.Kernel(kernels.Fill); err != nil {
		return err
	}
	c.sum, err = module.Kernel(kernels.Sum)
	return err
}

func (c *contents) Close() (err error) {
	for _, o := range slices.Backward(c.owned) {
		err = errors.Join(err, o.Close())
	}
	return err
}

// first returns the first element of a piece. The others count up from it.
func first(seed uint32, i int) uint32 { return (seed<<12 + uint32(i)) * 2654435761 >> 1 }

// write fills an array.
func (c *contents) write(a *vmm.Array[uint32], seed uint32) error {
	return c.each(a, func(s *cuda.Stream, i int, at cuda.Ptr) error {
		return c.fill.Launch(s, cuda.Threads(piece/16), at, uint64(piece), first(seed, i), uint32(1))
	})
}

// check returns an error if an array is not as write filled it.
func (c *contents) check(a *vmm.Array[uint32], seed uint32) error {
	if err := c.sums.Resize(c.streams[0], a.Len()/piece); err != nil {
		return err
	}
	if err := errors.Join(c.sums.All().Zero(c.streams[0]), c.streams[0].Synchronize()); err != nil {
		return err
	}
	// Each thread adds to the sum once, one after the other, so that few threads are faster.
	if err := c.each(a, func(s *cuda.Stream, i int, at cuda.Ptr) error {
		return c.sum.Launch(s, cuda.Threads(piece/64), at, uint64(piece), c.sums.Ptr()+cuda.Ptr(8*i))
	}); err != nil {
		return err
	}
	sums := make([]uint64, c.sums.Len())
	if err := c.sums.All().CopyTo(c.streams[0], sums); err != nil {
		return err
	}
	for i, got := range sums {
		if want := piece*uint64(first(seed, i)) + piece*(piece-1)/2; got != want {
			return fmt.Errorf("the sum of the piece at %v is %d instead of %d", a.Ptr()+cuda.Ptr(4*i*piece), got, want)
		}
	}
	return nil
}

// each launches something for each piece of an array, on all streams in turn, and waits for it.
func (c *contents) each(a *vmm.Array[uint32], launch func(s *cuda.Stream, i int, at cuda.Ptr) error) (err error) {
	for i := 0; i < a.Len()/piece && err == nil; i++ {
		err = launch(c.streams[i%side], i, a.Ptr()+cuda.Ptr(4*i*piece))
	}
	for _, s := range c.streams {
		err = errors.Join(err, s.Synchronize())
	}
	return err
}
