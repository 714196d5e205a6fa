// Command 03-compressible asks for memory that the GPU may compress, says what
// was granted, and uses it. Memory that compresses well is read with less
// traffic; it takes as much room as any other.
//
//	go run ./samples/03-compressible [-driver auto|real|sim]
package main

import (
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
		fmt.Fprintln(os.Stderr, "03-compressible:", err)
		os.Exit(1)
	}
}

func run(args []string, out io.Writer) (err error) {
	flags := flag.NewFlagSet("03-compressible", flag.ContinueOnError)
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
	return compressible(dev, out)
}

// compressible asks, says what was granted, and puts the memory to use.
func compressible(dev *cuda.Device, out io.Writer) (err error) {
	caps, err := dev.Capabilities()
	if err != nil {
		return err
	}
	wish := vmm.Properties{Compressible: true}
	size, err := vmm.GranularityOf(dev, wish)
	if err != nil {
		return err
	}
	size *= 16
	memory, err := vmm.Create(dev, size, wish)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, memory.Close()) }()
	granted, err := memory.Granted()
	if err != nil {
		return err
	}
	fmt.Fprintf(out, "claimed    the device says that it can compress: %v\n", caps.Compression)
	fmt.Fprintf(out, "asked      %d MiB, compressible: %v\n", size>>20, memory.Requested().Compressible)
	fmt.Fprintf(out, "granted    compressible: %v\n", granted.Compressible)
	if !granted.Compressible {
		fmt.Fprintln(out, "           it is plain memory, and works as well")
	}

	r, err := vmm.Reserve(dev, size, vmm.ReserveOptions{})
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, r.Close()) }()
	m, err := r.Map(0, memory)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, m.Close()) }()
	if err := m.SetAccess(vmm.Access{Location: dev.Location(), Mode: vmm.ReadWrite}); err != nil {
		return err
	}
	return use(dev, m, out)
}

// use fills the memory with one value, which is as compressible as memory can
// be, adds it all up, and compares.
func use(dev *cuda.Device, m *vmm.Mapping, out io.Writer) (err error) {
	module, err := dev.LoadModule(kernels.Basic)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, module.Close()) }()
	fill, err := module.Kernel(kernels.Fill)
	if err != nil {
		return err
	}
	sum, err := module.Kernel(kernels.Sum)
	if err != nil {
		return err
	}
	s, err := dev.NewStream(cuda.StreamOptions{})
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, s.Close()) }()
	total, err := vmm.NewArray[uint64](dev, vmm.BufferOptions{})
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, total.Close()) }()
	if err := total.Resize(s, 1); err != nil {
		return err
	}

	const value = 0xC0DEC
	words := uint64(m.Size() / 4)
	if err := fill.Launch(s, cuda.Threads(1<<16), m.Ptr(), words, uint32(value), uint32(0)); err != nil {
		return err
	}
	if err := sum.Launch(s, cuda.Threads(1<<16), m.Ptr(), words, total.Ptr()); err != nil {
		return err
	}
	var got [1]uint64
	if err := total.All().CopyTo(s, got[:]); err != nil {
		return err
	}
	if want := words * value; got[0] != want {
		return fmt.Errorf("%d words of %d add up to %d, not to %d", words, value, got[0], want)
	}
	_, err = fmt.Fprintf(out, "verified   %d words of %d add up to %d\n", words, value, got[0])
	return err
}
