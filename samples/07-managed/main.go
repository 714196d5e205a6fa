// Command 07-managed loads weights into managed memory under each placement,
// prefetches them in one batch, works on them, discards what was scratch, and
// shows before and after what the driver knows of every piece.
//
//	go run ./samples/07-managed [-driver auto|real|sim] [-layers 3] [-mib 4]
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
	"github.com/cuvmm/cuvmm/managed"
)

func main() {
	if err := run(os.Args[1:], os.Stdout); err != nil && !errors.Is(err, flag.ErrHelp) {
		fmt.Fprintln(os.Stderr, "07-managed:", err)
		os.Exit(1)
	}
}

// model is how much there is to load.
type model struct {
	layers   int
	elements int // of each layer
}

func run(args []string, out io.Writer) (err error) {
	flags := flag.NewFlagSet("07-managed", flag.ContinueOnError)
	driver := flags.String("driver", "", "`auto`, real or sim (default: $CUVMM_DRIVER, or auto)")
	layers := flags.Int("layers", 3, "how many `layers` there are")
	mib := flags.Int("mib", 4, "how many `MiB` a layer has")
	if err := flags.Parse(args); err != nil {
		return err
	}
	switch {
	case flags.NArg() > 0:
		return fmt.Errorf("argument %q: only flags are taken", flags.Arg(0))
	case *layers < 1 || *layers > 100:
		return fmt.Errorf("-layers %d: 1 to 100", *layers)
	case *mib < 1 || *mib > 1024:
		return fmt.Errorf("-mib %d: 1 to 1024", *mib)
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
	fmt.Fprintln(out, "pictures   D last prefetched to the device, H to the host; d, h preferred there; r read mostly; . nothing said")
	return everyPlacement(dev, model{*layers, *mib << 18}, out)
}

// placements are those that a program would choose from.
var placements = []struct {
	name string
	at   managed.Placement
}{
	{"none", nil},
	{"GPU first, CPU mapped", managed.GPUFirst},
	{"read mostly", managed.ReadMostly},
	{"a callback: halves", func(_ *cuda.Stream, r managed.Range) error {
		half, err := r.Slice(0, r.Len()/2)
		if err != nil {
			return err
		}
		return half.SetPreferred(cuda.OnHost())
	}},
}

func everyPlacement(dev *cuda.Device, m model, out io.Writer) error {
	for _, p := range placements {
		fmt.Fprintf(out, "placement  %s\n", p.name)
		if err := m.run(dev, p.at, out); err != nil {
			return fmt.Errorf("placement %s: %w", p.name, err)
		}
	}
	return nil
}

func (m model) run(dev *cuda.Device, at managed.Placement, out io.Writer) (err error) {
	s, err := dev.NewStream(cuda.StreamOptions{})
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, s.Close()) }()
	// What the allocator made ends with it: nothing else is to be closed.
	memory, err := managed.NewAllocator(dev, managed.Options{Placement: at, Stream: s})
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, memory.Close()) }()
	weights, err := m.load(memory, s)
	if err != nil {
		return err
	}
	scratch, err := managed.New(dev, 4*m.elements, managed.Options{})
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, scratch.Close()) }()

	if err := show(out, "before", weights, scratch); err != nil {
		return err
	}
	all := []managed.Range{scratch.Range}
	for _, w := range weights {
		all = append(all, w.Buffer().Range)
	}
	if err := managed.PrefetchBatch(s, all, dev.Location()); err != nil {
		return err
	}
	sum, err := m.add(dev, s, weights, scratch)
	if err != nil {
		return err
	}
	// Nobody needs the scratch any more: its pages need not be moved.
	if err := scratch.DiscardPrefetch(s, cuda.OnHost()); errors.Is(err, cuda.ErrNotSupported) {
		fmt.Fprintf(out, "  %v\n", err)
	} else if err != nil {
		return err
	}
	if err := s.Synchronize(); err != nil {
		return err
	}
	if err := show(out, "after", weights, scratch); err != nil {
		return err
	}
	stats := memory.Stats()
	_, err = fmt.Fprintf(out, "  verified   %v is the sum of the layers, which have %d MiB\n", sum, stats.Bytes>>20)
	return err
}

// load makes the layers and has the CPU fill them: layer i holds i+1.
func (m model) load(memory *managed.Allocator, s *cuda.Stream) (layers []*managed.Array[float32], err error) {
	for i := range m.layers {
		w, err := managed.NewArray[float32](memory, s, m.elements)
		if err != nil {
			return nil, err
		}
		err = w.Host(s, func(data []float32) error {
			for j := range data {
				data[j] = float32(i + 1)
			}
			return nil
		})
		if err != nil {
			return nil, err
		}
		layers = append(layers, w)
	}
	return layers, nil
}

// add sums the layers in the scratch on the GPU, and has the CPU look at it.
func (m model) add(dev *cuda.Device, s *cuda.Stream, weights []*managed.Array[float32], scratch *managed.Buffer) (sum float32, err error) {
	module, err := dev.LoadModule(kernels.Basic)
	if err != nil {
		return 0, err
	}
	defer func() { err = errors.Join(err, module.Close()) }()
	add, err := module.Kernel(kernels.VectorAdd)
	if err != nil {
		return 0, err
	}
	if err := s.Memset(scratch.Ptr(), 0, scratch.Len()); err != nil {
		return 0, err
	}
	for _, w := range weights {
		if err := add.Launch(s, cuda.Threads(m.elements), w.Ptr(), scratch.Ptr(), scratch.Ptr(), uint64(m.elements)); err != nil {
			return 0, err
		}
	}
	result, err := managed.ArrayOf[float32](scratch)
	if err != nil {
		return 0, err
	}
	want := float32(m.layers * (m.layers + 1) / 2)
	err = result.Host(s, func(data []float32) error {
		for i, v := range data {
			if v != want {
				return fmt.Errorf("element %d is %v, not %v", i, v, want)
			}
		}
		return nil
	})
	return want, err
}

// show draws what the driver knows of the layers and the scratch.
func show(out io.Writer, when string, weights []*managed.Array[float32], scratch *managed.Buffer) error {
	fmt.Fprintf(out, "  %-10s ", when)
	for i, w := range weights {
		p, err := picture(w.Buffer().Range)
		if err != nil {
			return err
		}
		fmt.Fprintf(out, "layer %d [%s]  ", i, p)
	}
	p, err := picture(scratch.Range)
	if err != nil {
		return err
	}
	fmt.Fprintf(out, "scratch [%s]\n", p)
	return nil
}

// pieces is how many characters a picture has.
const pieces = 8

// picture is a character for each piece of a range. The driver tells where it
// was asked to move pages, and where they should be; it does not tell where they
// went when they were touched.
func picture(r managed.Range) (string, error) {
	var p []byte
	for i := range pieces {
		piece, err := r.Slice(i*r.Len()/pieces, (i+1)*r.Len()/pieces)
		if err != nil {
			return "", err
		}
		c, err := sign(piece)
		if err != nil {
			return "", err
		}
		p = append(p, c)
	}
	return string(p), nil
}

func sign(r managed.Range) (byte, error) {
	last, err := r.LastPrefetch()
	if err != nil {
		return 0, err
	}
	preferred, err := r.Preferred()
	if err != nil {
		return 0, err
	}
	mostly, err := r.ReadMostly()
	if err != nil {
		return 0, err
	}
	switch {
	case last.Type == cuda.LocationDevice:
		return 'D', nil
	case last.Type != cuda.LocationNone:
		return 'H', nil
	case preferred.Type == cuda.LocationDevice:
		return 'd', nil
	case preferred.Type != cuda.LocationNone:
		return 'h', nil
	case mostly:
		return 'r', nil
	}
	return '.', nil
}
