// Command 14-multicast computes the L2 norm of a vector that is spread over
// several devices, so that each of them has the norm at the end: once by copies
// between peers, and once through a multicast address, where the switches between
// the devices add up on the way. It compares the results, and the bytes that pass
// each device's link.
//
//	go run ./samples/14-multicast [-driver auto|real|sim] [-n ELEMENTS]
//
// On a real driver it only copies. Creating a multicast object there is opt-in
// (cuda.Options.RealMulticast), because one that goes wrong can disturb other work on
// the machine. The software driver shows both ways, on four devices.
package main

import (
	"encoding/binary"
	"errors"
	"fmt"
	"math"

	"github.com/cuvmm/cuvmm/cuda"
	"github.com/cuvmm/cuvmm/cuda/sim"
	"github.com/cuvmm/cuvmm/multicast"
	"github.com/cuvmm/cuvmm/samples/internal/app"
	"github.com/cuvmm/cuvmm/vmm"
)

var sample = app.Sample{
	Name:    "14-multicast",
	Shows:   "a norm over several devices, through one multicast address and by copies",
	Next:    "15-vector-index: an index that goroutines extend while other processes search it",
	Machine: sim.WithMulticast(4),
	Run:     run,
}

func main() { app.Main(sample) }

// rank is a device with its part of the vector.
type rank struct {
	device *cuda.Device
	stream *cuda.Stream
	x      *vmm.Array[float32]
}

func run(e *app.Env) (err error) {
	n := e.Flags.Int("n", 1<<18, "how many `elements` each device has")
	if err := e.Open(); err != nil {
		return err
	}
	if *n < 1 || *n > 1<<28 {
		return app.Usagef("-n %d: each device has 1 to %d elements", *n, 1<<28)
	}
	var ranks []rank
	squares := 0.0
	for i, d := range e.System.Devices() {
		r := rank{device: d}
		if r.stream, err = d.NewStream(cuda.StreamOptions{}); err != nil {
			return err
		}
		defer app.Close(r.stream, &err)
		if r.x, err = vmm.NewArray[float32](d, vmm.BufferOptions{}); err != nil {
			return err
		}
		defer app.Close(r.x, &err)
		v := make([]float32, *n)
		for j := range v {
			v[j] = float32((i+j)%7) / 4
			squares += float64(v[j]) * float64(v[j])
		}
		if _, err := r.x.Append(r.stream, v); err != nil {
			return err
		}
		ranks = append(ranks, r)
	}
	want := math.Sqrt(squares)
	e.Line("vector", "of length %d and norm %.6f", *n*len(ranks), want)

	norms, err := byCopies(ranks)
	if err := errors.Join(err, check(norms, want)); err != nil {
		return fmt.Errorf("by copies: %w", err)
	}
	others := len(ranks) - 1
	e.Line("copies", "each device sends %d bytes and receives %d", word*others, word*others)

	if reason := unavailable(e); reason != nil {
		e.Line("multicast", "not used: %v", reason)
		e.Line("verified", "every device has the norm")
		return nil
	}
	norms, err = byMulticast(e.Context, ranks)
	if err := errors.Join(err, check(norms, want)); err != nil {
		return fmt.Errorf("by multicast: %w", err)
	}
	// A device adds one to a counter of 4 bytes in every replica, and loads one
	// sum, for which every replica sends its own.
	e.Line("multicast", "each device sends %d bytes and receives %d", 4+word*len(ranks), 4*len(ranks)+word)
	e.Line("verified", "every device has the norm, the same in both ways")
	return nil
}

// unavailable returns why the devices are not used by multicast, or nil.
func unavailable(e *app.Env) error {
	if !e.System.Driver().Software {
		return errors.New("on a real driver multicast is opt-in (cuda.Options.RealMulticast), and this sample leaves it off")
	}
	return multicast.Supported(e.System.Devices()...)
}

// check compares the norm that each device has.
func check(got []float64, want float64) error {
	for i, v := range got {
		if !(math.Abs(v-want) <= 1e-9*want) {
			return fmt.Errorf("device %d has the norm %v, not %v", i, v, want)
		}
	}
	return nil
}

// launch runs a kernel of a module in one block.
func (r rank) launch(m *cuda.Module, name string, args ...any) error {
	k, err := m.Kernel(name)
	if err != nil {
		return err
	}
	return k.Launch(r.stream, cuda.Launch{Grid: [3]int{1, 1, 1}, Block: [3]int{256, 1, 1}}, args...)
}

// number reads a float64 back, behind all work of the stream.
func (r rank) number(at cuda.Ptr) (float64, error) {
	b := make([]byte, word)
	err := r.stream.Download(b, at)
	return math.Float64frombits(binary.NativeEndian.Uint64(b)), err
}
