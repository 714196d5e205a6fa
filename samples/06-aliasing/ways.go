package main

import (
	"encoding/binary"
	"fmt"

	"github.com/cuvmm/cuvmm/csrc/kernels"
	"github.com/cuvmm/cuvmm/cuda"
	"github.com/cuvmm/cuvmm/samples/internal/app"
	"github.com/cuvmm/cuvmm/vmm"
)

const (
	start = 1000 // element i is start + i
	delta = 77
)

// byEvent fills the memory through one address on one stream, and reads it
// through the other address on a stream that waits for the first.
func byEvent(module *cuda.Module, writer, reader *cuda.Stream, first, second *vmm.Mapping) (err error) {
	fill, err := module.Kernel(kernels.Fill)
	if err != nil {
		return err
	}
	filled, err := writer.Device().NewEvent(cuda.EventOptions{})
	if err != nil {
		return err
	}
	defer app.Close(filled, &err)
	n := first.Size() / 4
	if err := fill.Launch(writer, cuda.Threads(n), first.Ptr(), uint64(n), uint32(start), uint32(1)); err != nil {
		return err
	}
	if err := filled.Record(writer); err != nil {
		return err
	}
	if err := reader.Wait(filled); err != nil {
		return err
	}
	got := make([]byte, second.Size())
	if err := reader.Download(got, second.Ptr()); err != nil {
		return err
	}
	return compare(got, start)
}

// byFence adds to every element through one address and reads it back through
// the other, in one kernel, which has a fence between the two.
func byFence(module *cuda.Module, s *cuda.Stream, first, second *vmm.Mapping) (err error) {
	aliasAdd, err := module.Kernel(kernels.AliasAdd)
	if err != nil {
		return err
	}
	seen, err := vmm.NewBuffer(s.Device(), vmm.BufferOptions{})
	if err != nil {
		return err
	}
	defer app.Close(seen, &err)
	if _, err := seen.AppendUndefined(first.Size()); err != nil {
		return err
	}
	n := first.Size() / 4
	if err := aliasAdd.Launch(s, cuda.Threads(n), first.Ptr(), second.Ptr(), seen.Ptr(), uint64(n), uint32(delta)); err != nil {
		return err
	}
	got := make([]byte, seen.Len())
	if err := s.Download(got, seen.Ptr()); err != nil {
		return err
	}
	return compare(got, start+delta)
}

// compare requires element i to be first + i.
func compare(got []byte, first uint32) error {
	for i := 0; i < len(got); i += 4 {
		want := first + uint32(i/4)
		if v := binary.NativeEndian.Uint32(got[i:]); v != want {
			return fmt.Errorf("element %d is %d, not %d", i/4, v, want)
		}
	}
	return nil
}
