package main

import (
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"slices"

	"github.com/cuvmm/cuvmm/csrc/kernels"
	"github.com/cuvmm/cuvmm/cuda"
	"github.com/cuvmm/cuvmm/samples/internal/app"
	"github.com/cuvmm/cuvmm/vmm"
)

// vectors are a, b and c, one behind the other in one range of addresses.
type vectors struct {
	devices  []*cuda.Device
	together bool // each device reaches the memory of all
	chunk    int  // bytes
	chunks   int  // of each vector
	space    *vmm.Reservation
	streams  []*cuda.Stream // one for each device
	owned    []io.Closer
}

// owns has Close close a resource.
func (v *vectors) owns(c io.Closer) { v.owned = append(v.owned, c) }

// Close closes what was made, the last first.
func (v *vectors) Close() (err error) {
	for _, c := range slices.Backward(v.owned) {
		app.Close(c, &err)
	}
	return err
}

// at is where a chunk of a vector begins.
func (v *vectors) at(vector, chunk int) cuda.Ptr {
	return v.space.Ptr() + cuda.Ptr((vector*v.chunks+chunk)*v.chunk)
}

// words is how many elements a chunk has.
func (v *vectors) words() int { return v.chunk / 4 }

// survey reports whether each device can use the memory of all others, and a
// size of chunks that suits every device.
func survey(devices []*cuda.Device) (together bool, chunk int, err error) {
	together = true
	for _, d := range devices {
		g, err := vmm.GranularityOf(d, vmm.Properties{})
		if err != nil {
			return false, 0, err
		}
		chunk = max(chunk, g) // both are powers of two
		for _, other := range devices {
			ok, err := d.CanAccess(other)
			if err != nil {
				return false, 0, err
			}
			together = together && ok
		}
	}
	return together, chunk, nil
}

// place maps memory of a device into the range. The mapping keeps the memory
// alive.
func place(r *vmm.Reservation, offset int, on *cuda.Device, size int) (m *vmm.Mapping, err error) {
	memory, err := vmm.Create(on, size, vmm.Properties{})
	if err != nil {
		return nil, err
	}
	defer app.Close(memory, &err)
	return r.Map(offset, memory)
}

// add fills a device's chunks of a and b, and submits their sums. It returns the
// numbers of those chunks.
func (v *vectors) add(device int) (owned []int, err error) {
	d := v.devices[device]
	s, err := d.NewStream(cuda.StreamOptions{})
	if err != nil {
		return nil, err
	}
	v.streams = append(v.streams, s)
	v.owns(s)
	module, err := d.LoadModule(kernels.Basic)
	if err != nil {
		return nil, err
	}
	v.owns(module)
	sum, err := module.Kernel(kernels.VectorAdd)
	if err != nil {
		return nil, err
	}
	words := v.words()
	for c := device; c < v.chunks; c += len(v.devices) {
		owned = append(owned, c)
		a, b := values(c*words, words)
		if err := errors.Join(upload(s, v.at(0, c), a), upload(s, v.at(1, c), b)); err != nil {
			return nil, err
		}
		if err := sum.Launch(s, cuda.Threads(words), v.at(0, c), v.at(1, c), v.at(2, c), uint64(words)); err != nil {
			return nil, err
		}
	}
	return owned, nil
}

// values returns n elements of a and b, from the first on.
func values(first, n int) (a, b []float32) {
	a, b = make([]float32, n), make([]float32, n)
	for i := range n {
		a[i], b[i] = float32(first+i), float32((first+i)%1000)/8
	}
	return a, b
}

func upload(s *cuda.Stream, to cuda.Ptr, v []float32) error {
	bytes, err := binary.Append(nil, binary.NativeEndian, v)
	return errors.Join(err, s.Upload(to, bytes))
}

// verify compares n sums at an address with those of elements first and up.
func verify(s *cuda.Stream, at cuda.Ptr, first, n int) error {
	bytes, c := make([]byte, 4*n), make([]float32, n)
	if err := s.Download(bytes, at); err != nil {
		return err
	}
	if _, err := binary.Decode(bytes, binary.NativeEndian, c); err != nil {
		return err
	}
	a, b := values(first, n)
	for i := range c {
		if c[i] != a[i]+b[i] {
			return fmt.Errorf("c[%d] is %v, not %v + %v", first+i, c[i], a[i], b[i])
		}
	}
	return nil
}
