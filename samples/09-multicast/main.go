// Command 09-multicast computes the L2 norm of a vector that is spread over
// several devices, so that each of them has it at the end: once through a
// multicast address, where the switches between the devices add up on the way,
// and once by copies between peers. It compares the results, and the bytes that
// each way moves between the devices.
//
//	go run ./samples/09-multicast [-driver auto|real|sim] [-n ELEMENTS]
//
// On a real driver it only copies: creating a multicast object there must be
// asked for when the driver is opened (cuda.WithRealMulticast), since one that
// goes wrong can disturb everybody's work on the machine, and a sample does not
// ask. The software driver shows both ways, on four devices.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"math"
	"os"

	"github.com/cuvmm/cuvmm/cuda"
	"github.com/cuvmm/cuvmm/cuda/auto"
	"github.com/cuvmm/cuvmm/cuda/sim"
	"github.com/cuvmm/cuvmm/multicast"
	"github.com/cuvmm/cuvmm/vmm"
)

func main() {
	if err := run(os.Args[1:], os.Stdout); err != nil && !errors.Is(err, flag.ErrHelp) {
		fmt.Fprintln(os.Stderr, "09-multicast:", err)
		os.Exit(1)
	}
}

func run(args []string, out io.Writer) (err error) {
	flags := flag.NewFlagSet("09-multicast", flag.ContinueOnError)
	driver := flags.String("driver", "", "`auto`, real or sim (default: $CUVMM_DRIVER, or auto)")
	n := flags.Int("n", 1<<18, "how many `elements` each device has")
	if err := flags.Parse(args); err != nil {
		return err
	}
	if flags.NArg() > 0 {
		return fmt.Errorf("argument %q: only flags are taken", flags.Arg(0))
	}
	if *n < 1 || *n > 1<<28 {
		return fmt.Errorf("-n %d: each device has 1 to %d elements", *n, 1<<28)
	}
	sys, err := auto.Open(auto.Options{Driver: auto.Choice(*driver), Machine: sim.WithMulticast(4)})
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, sys.Close()) }()
	fmt.Fprintf(out, "driver     %v\n", sys.Driver())
	return norms(context.Background(), sys.Devices(), *n, out)
}

// why says why the devices are not used by multicast; nil if they are.
func why(devices []*cuda.Device) error {
	if !devices[0].System().Driver().Software {
		return errors.New("on a real driver multicast must be asked for (cuda.WithRealMulticast), and this sample does not")
	}
	return multicast.Supported(devices...)
}

// norms computes the norm in both ways.
func norms(ctx context.Context, devices []*cuda.Device, n int, out io.Writer) (err error) {
	var parts []*part
	defer func() {
		for _, p := range parts {
			err = errors.Join(err, p.close())
		}
	}()
	want := 0.0
	for i, d := range devices {
		p, sum, err := newPart(d, i, n)
		parts = append(parts, p)
		if err != nil {
			return err
		}
		want += sum
	}
	want = math.Sqrt(want)
	fmt.Fprintf(out, "devices    %d, with %d elements each\n", len(devices), n)
	fmt.Fprintf(out, "vector     of length %d and norm %.6f\n", n*len(devices), want)

	copied, moved, err := byCopies(parts)
	if err != nil {
		return fmt.Errorf("by copies: %w", err)
	}
	if err := check(copied, want); err != nil {
		return fmt.Errorf("by copies: %w", err)
	}
	fmt.Fprintf(out, "copies     %v\n", moved)

	if reason := why(devices); reason != nil {
		fmt.Fprintf(out, "multicast  not used: %v\n", reason)
		_, err = fmt.Fprintln(out, "verified   every device has the norm")
		return err
	}
	reduced, moved, err := byMulticast(ctx, parts)
	if err != nil {
		return fmt.Errorf("by multicast: %w", err)
	}
	if err := check(reduced, want); err != nil {
		return fmt.Errorf("by multicast: %w", err)
	}
	fmt.Fprintf(out, "multicast  %v\n", moved)
	_, err = fmt.Fprintln(out, "verified   every device has the norm, the same in both ways")
	return err
}

// check compares what each device has.
func check(got []float64, want float64) error {
	for i, v := range got {
		if !(math.Abs(v-want) <= 1e-9*want) {
			return fmt.Errorf("device %d has the norm %v, not %v", i, v, want)
		}
	}
	return nil
}

// traffic counts the bytes that pass the devices' links, by device.
type traffic struct{ sent, received []int }

func newTraffic(devices int) *traffic { return &traffic{make([]int, devices), make([]int, devices)} }

// copied: a device copied to another.
func (t *traffic) copied(from, to, bytes int) {
	t.sent[from] += bytes
	t.received[to] += bytes
}

// reduced: a device loaded a sum. The switch takes the bytes from every replica,
// and the device receives them once.
func (t *traffic) reduced(by, bytes int) {
	for i := range t.sent {
		t.sent[i] += bytes
	}
	t.received[by] += bytes
}

// multiplied: a device stored, or added, to all. It sends the bytes once, and
// every replica receives them.
func (t *traffic) multiplied(by, bytes int) {
	t.sent[by] += bytes
	for i := range t.received {
		t.received[i] += bytes
	}
}

// String writes what each device sends and receives, which is the same for all.
func (t *traffic) String() string {
	return fmt.Sprintf("each device sends %d bytes and receives %d", t.sent[0], t.received[0])
}

// part is a device with its part of the vector.
type part struct {
	device *cuda.Device
	stream *cuda.Stream
	x      *vmm.Array[float32]
	n      int
}

// newPart fills a device's part, and answers the sum of its squares.
func newPart(d *cuda.Device, number, n int) (p *part, sum float64, err error) {
	p = &part{device: d, n: n}
	if p.stream, err = d.NewStream(cuda.StreamOptions{}); err != nil {
		return p, 0, err
	}
	if p.x, err = vmm.NewArray[float32](d, vmm.BufferOptions{}); err != nil {
		return p, 0, err
	}
	v := make([]float32, n)
	for i := range v {
		v[i] = float32((i+number)%7) / 4
		sum += float64(v[i]) * float64(v[i])
	}
	_, err = p.x.Append(p.stream, v)
	return p, sum, err
}

func (p *part) close() (err error) {
	if p.x != nil {
		err = p.x.Close()
	}
	if p.stream != nil {
		err = errors.Join(err, p.stream.Close())
	}
	return err
}

// oneBlock is how the kernels here are launched.
var oneBlock = cuda.Launch{Grid: [3]int{1, 1, 1}, Block: [3]int{256, 1, 1}}

// launch runs a kernel of a module on the device.
func (p *part) launch(m *cuda.Module, name string, args ...any) error {
	k, err := m.Kernel(name)
	if err != nil {
		return err
	}
	return k.Launch(p.stream, oneBlock, args...)
}

// number reads a float64 back, behind all that the stream has to do.
func (p *part) number(at cuda.Ptr) (float64, error) {
	b := make([]byte, 8)
	err := p.stream.Download(b, at)
	return float64Of(b), err
}
