// Command 02-growable streams a file into an array on the GPU. The array grows
// as the file is read, and its address stays the same. At the end the sample
// compares the SHA-256 of the GPU's memory with that of the file.
//
//	go run ./samples/02-growable [-driver auto|real|sim] [-step SIZE] [FILE | -]
//
// Without a file it reads its own executable; - is standard input.
package main

import (
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"io"
	"os"
	"time"

	"github.com/cuvmm/cuvmm/cuda"
	"github.com/cuvmm/cuvmm/samples/internal/app"
	"github.com/cuvmm/cuvmm/vmm"
)

var sample = app.Sample{
	Name:  "02-growable",
	Shows: "an array that grows in place while a file streams into it",
	Next:  "03-kernel: a kernel of your own works on an array",
	Arg:   "FILE | -",
	Run:   run,
}

func main() { app.Main(sample) }

func run(e *app.Env) (err error) {
	step := e.Size("step", "4MiB", "how much to read at a time: a `size` such as 64KiB or 4MiB")
	if err := e.Open(); err != nil {
		return err
	}
	in, name, err := input(e)
	if err != nil {
		return err
	}
	defer app.Close(in, &err)
	e.Line("input", "%s", name)

	array, err := vmm.NewArray[byte](e.Device, vmm.BufferOptions{})
	if err != nil {
		return err
	}
	defer app.Close(array, &err)
	s, err := e.Device.NewStream(cuda.StreamOptions{})
	if err != nil {
		return err
	}
	defer app.Close(s, &err)

	address, start := array.Ptr(), time.Now()
	want, err := stream(e.Context, in, *step, array, s)
	if err != nil {
		return err
	}
	if err := s.Synchronize(); err != nil {
		return err
	}
	took := time.Since(start)
	if array.Ptr() != address {
		return fmt.Errorf("the array moved from %v to %v", address, array.Ptr())
	}

	hash := sha256.New()
	if _, err := io.Copy(hash, vmm.NewReader(array.Buffer())); err != nil {
		return err
	}
	got := hash.Sum(nil)
	stats := array.Stats()
	e.Line("address", "%v, before and after", address)
	e.Line("bytes", "%d", stats.Used)
	e.Line("growths", "%d", stats.Grown)
	e.Line("chunks", "%d", stats.Chunks)
	e.Line("reserved", "%d MiB of address space", stats.Reserved>>20)
	e.Line("committed", "%d MiB of memory", stats.Committed>>20)
	e.Line("throughput", "%.2f GB/s, reading and hashing included", float64(stats.Used)/took.Seconds()/1e9)
	e.Line("sha256", "%x", got)
	if string(want) != string(got) {
		return fmt.Errorf("the GPU's memory has SHA-256 %x, the input %x", got, want)
	}
	e.Line("verified", "the GPU's memory has the input's SHA-256")
	return nil
}

// stream appends the input to the array as work on the stream, and returns the
// input's SHA-256.
func stream(ctx context.Context, in io.Reader, step int, array *vmm.Array[byte], s *cuda.Stream) ([]byte, error) {
	hash := sha256.New()
	piece := make([]byte, step)
	for ctx.Err() == nil {
		n, err := io.ReadFull(in, piece)
		hash.Write(piece[:n])
		// Append grows the array when its memory is full. It returns before the
		// copy is done: the piece can be used again at once.
		if _, err := array.Append(s, piece[:n]); err != nil {
			return nil, err
		}
		if errors.Is(err, io.EOF) || errors.Is(err, io.ErrUnexpectedEOF) {
			return hash.Sum(nil), nil
		}
		if err != nil {
			return nil, err
		}
	}
	return nil, fmt.Errorf("interrupted after %d bytes: %w", array.Len(), ctx.Err())
}

// input returns what to read, and its name.
func input(e *app.Env) (io.ReadCloser, string, error) {
	name := e.Arg
	switch name {
	case "-":
		return io.NopCloser(e.In), "standard input", nil
	case "":
		self, err := os.Executable()
		if err != nil {
			return nil, "", err
		}
		name = self
	}
	f, err := os.Open(name)
	return f, name, err
}
