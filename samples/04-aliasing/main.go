// Command 04-aliasing gives one piece of memory two addresses, writes through
// one and reads through the other. Two ways make the read see what was
// written: the order of streams and events between kernels, and a fence within
// one kernel.
//
//	go run ./samples/04-aliasing [-driver auto|real|sim]
package main

import (
	"encoding/binary"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"

	"github.com/cuvmm/cuvmm/csrc/kernels"
	"github.com/cuvmm/cuvmm/cuda"
	"github.com/cuvmm/cuvmm/cuda/auto"
	"github.com/cuvmm/cuvmm/vmm"
)

func main() {
	if err := run(os.Args[1:], os.Stdout); err != nil && !errors.Is(err, flag.ErrHelp) {
		fmt.Fprintln(os.Stderr, "04-aliasing:", err)
		os.Exit(1)
	}
}

func run(args []string, out io.Writer) (err error) {
	flags := flag.NewFlagSet("04-aliasing", flag.ContinueOnError)
	driver := flags.String("driver", "", "`auto`, real or sim (default: $CUVMM_DRIVER, or auto)")
	if err := flags.Parse(args); err != nil {
		return err
	}
	if flags.NArg() > 0 {
		return fmt.Errorf("argument %q: only flags are taken", flags.Arg(0))
	}
	sys, err := auto.Open(auto.Options{Driver: auto.Choice(*driver)})
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, sys.Close()) }()
	dev, err := sys.Device(0)
	if err != nil {
		return err
	}
	fmt.Fprintf(out, "driver     %v\n", sys.Driver())
	fmt.Fprintf(out, "device     %v\n", dev)
	return alias(dev, out)
}

// alias maps one allocation twice and shows both ways.
func alias(dev *cuda.Device, out io.Writer) (err error) {
	size, err := vmm.GranularityOf(dev, vmm.Properties{})
	if err != nil {
		return err
	}
	memory, err := vmm.Create(dev, size, vmm.Properties{})
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, memory.Close()) }()
	r, err := vmm.Reserve(dev, 2*size, vmm.ReserveOptions{})
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, r.Close()) }()
	first, err := r.Map(0, memory)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, first.Close()) }()
	second, err := r.Map(size, memory)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, second.Close()) }()
	if err := r.SetAccess(0, 2*size, vmm.Access{Location: dev.Location(), Mode: vmm.ReadWrite}); err != nil {
		return err
	}
	fmt.Fprintf(out, "memory     %d MiB, at %v and at %v\n", size>>20, first.Ptr(), second.Ptr())

	module, err := dev.LoadModule(kernels.Basic)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, module.Close()) }()
	if err := byEvent(dev, module, first, second); err != nil {
		return fmt.Errorf("ordered by an event: %w", err)
	}
	fmt.Fprintln(out, "verified   a write on one stream, an event, a read through the other address on another stream")
	if err := byFence(dev, module, first, second); err != nil {
		return fmt.Errorf("ordered by a fence: %w", err)
	}
	_, err = fmt.Fprintln(out, "verified   a write, fence.proxy.alias, and a read through the other address, in one kernel")
	return err
}

const (
	start = 1000 // element i is start + i
	delta = 77
)

// byEvent fills the memory through one address, on one stream, and reads it
// through the other address on another stream, which waits for the first.
func byEvent(dev *cuda.Device, module *cuda.Module, first, second *vmm.Mapping) (err error) {
	fill, err := module.Kernel(kernels.Fill)
	if err != nil {
		return err
	}
	writer, err := dev.NewStream(cuda.StreamOptions{})
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, writer.Close()) }()
	reader, err := dev.NewStream(cuda.StreamOptions{})
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, reader.Close()) }()
	filled, err := dev.NewEvent(cuda.EventOptions{})
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, filled.Close()) }()

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
// the other, all in one kernel, which puts a fence between the two.
func byFence(dev *cuda.Device, module *cuda.Module, first, second *vmm.Mapping) (err error) {
	aliasAdd, err := module.Kernel(kernels.AliasAdd)
	if err != nil {
		return err
	}
	s, err := dev.NewStream(cuda.StreamOptions{})
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, s.Close()) }()
	seen, err := vmm.NewBuffer(dev, vmm.BufferOptions{})
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, seen.Close()) }()
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
