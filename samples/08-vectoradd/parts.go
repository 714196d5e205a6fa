package main

import (
	"encoding/binary"
	"errors"
	"fmt"

	"github.com/cuvmm/cuvmm/cuda"
	"github.com/cuvmm/cuvmm/samples/internal/app"
	"github.com/cuvmm/cuvmm/vmm"
)

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
