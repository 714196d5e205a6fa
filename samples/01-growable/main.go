// Command 01-growable streams a file into an array on the GPU that grows as it
// reads, and checks what arrived: the SHA-256 of the GPU's memory against the
// file's.
//
//	go run ./samples/01-growable [-driver auto|real|sim] [-step SIZE] [FILE | -]
//
// Without a file it reads its own executable; - is standard input.
package main

import (
	"crypto/sha256"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"time"

	"github.com/cuvmm/cuvmm/cuda"
	"github.com/cuvmm/cuvmm/cuda/auto"
	"github.com/cuvmm/cuvmm/vmm"
)

func main() {
	if err := run(os.Args[1:], os.Stdin, os.Stdout); err != nil && !errors.Is(err, flag.ErrHelp) {
		fmt.Fprintln(os.Stderr, "01-growable:", err)
		os.Exit(1)
	}
}

func run(args []string, stdin io.Reader, out io.Writer) (err error) {
	flags := flag.NewFlagSet("01-growable", flag.ContinueOnError)
	driver := flags.String("driver", "", "`auto`, real or sim (default: $CUVMM_DRIVER, or auto)")
	step := flags.String("step", "4MiB", "how much to read at a time: a `size` such as 64KiB or 4MiB")
	flags.Usage = func() {
		fmt.Fprintln(flags.Output(), "usage: 01-growable [-driver auto|real|sim] [-step SIZE] [FILE | -]")
		flags.PrintDefaults()
	}
	if err := flags.Parse(args); err != nil {
		return err
	}
	if flags.NArg() > 1 {
		return fmt.Errorf("%d files given: name one, or - for standard input", flags.NArg())
	}
	n, err := parseSize(*step)
	if err != nil {
		return err
	}
	in, name, err := open(flags.Arg(0), stdin)
	if err != nil {
		return err
	}
	defer func() { _ = in.Close() }()

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
	fmt.Fprintf(out, "device     %v, %d MiB\n", dev, dev.TotalMemory()>>20)
	fmt.Fprintf(out, "input      %s\n", name)
	return stream(dev, in, n, out)
}

// stream does the job: read, append, compare.
func stream(dev *cuda.Device, in io.Reader, step int, out io.Writer) (err error) {
	array, err := vmm.NewArray[byte](dev, vmm.BufferOptions{})
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, array.Close()) }()
	s, err := dev.NewStream(cuda.StreamOptions{})
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, s.Close()) }()

	address := array.Ptr()
	sum := sha256.New()
	piece := make([]byte, step)
	start := time.Now()
	for {
		n, err := io.ReadFull(in, piece)
		sum.Write(piece[:n])
		if _, err := array.Append(s, piece[:n]); err != nil {
			return err
		}
		if array.Ptr() != address {
			return fmt.Errorf("the array moved from %v to %v", address, array.Ptr())
		}
		if errors.Is(err, io.EOF) || errors.Is(err, io.ErrUnexpectedEOF) {
			break
		}
		if err != nil {
			return err
		}
	}
	if err := s.Synchronize(); err != nil {
		return err
	}
	took := time.Since(start)

	back := sha256.New()
	if _, err := io.Copy(back, vmm.NewReader(array.Buffer())); err != nil {
		return err
	}
	stats := array.Stats()
	fmt.Fprintf(out, "address    %v, the same after every growth\n", address)
	fmt.Fprintf(out, "bytes      %d\n", stats.Used)
	fmt.Fprintf(out, "growths    %d\n", stats.Grown)
	fmt.Fprintf(out, "chunks     %d\n", stats.Chunks)
	fmt.Fprintf(out, "reserved   %d MiB of address space\n", stats.Reserved>>20)
	fmt.Fprintf(out, "committed  %d MiB of memory\n", stats.Committed>>20)
	fmt.Fprintf(out, "throughput %.2f GB/s, reading and hashing included\n", float64(stats.Used)/took.Seconds()/1e9)
	fmt.Fprintf(out, "sha256     %x\n", back.Sum(nil))
	if want, got := sum.Sum(nil), back.Sum(nil); string(want) != string(got) {
		return fmt.Errorf("the GPU's memory has SHA-256 %x, the input %x", got, want)
	}
	_, err = fmt.Fprintln(out, "verified   the GPU's memory has the input's SHA-256")
	return err // a full disk under the output, for one
}

// open is the input and its name for people.
func open(arg string, stdin io.Reader) (io.ReadCloser, string, error) {
	if arg == "-" {
		return io.NopCloser(stdin), "standard input", nil
	}
	if arg == "" {
		self, err := os.Executable()
		if err != nil {
			return nil, "", err
		}
		arg = self
	}
	f, err := os.Open(arg)
	return f, arg, err
}
