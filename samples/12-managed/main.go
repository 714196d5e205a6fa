// Command 12-managed loads weights into managed memory under each placement,
// prefetches them in one batch, adds them up on the GPU, and discards what was
// scratch. It draws what the driver knows of every piece before and after.
//
//	go run ./samples/12-managed [-driver auto|real|sim] [-layers 3] [-mib 4]
package main

import (
	"errors"
	"fmt"

	"github.com/cuvmm/cuvmm/cuda"
	"github.com/cuvmm/cuvmm/managed"
	"github.com/cuvmm/cuvmm/samples/internal/app"
)

var sample = app.Sample{
	Name:  "12-managed",
	Shows: "memory that both the CPU and the GPU use, and where a program wants its pages",
	Next:  "13-fabric: memory shared by a text, across hosts",
	Run:   run,
}

func main() { app.Main(sample) }

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

func run(e *app.Env) error {
	layers := e.Flags.Int("layers", 3, "how many `layers` there are")
	mib := e.Flags.Int("mib", 4, "how many `MiB` a layer has")
	if err := e.Open(); err != nil {
		return err
	}
	if *layers < 1 || *layers > 100 || *mib < 1 || *mib > 1024 {
		return app.Usagef("-layers %d -mib %d: use 1 to 100 layers, of 1 to 1024 MiB", *layers, *mib)
	}
	e.Line("pictures", "D last prefetched to the device, H to the host; d, h preferred there; r read mostly; . nothing known")
	for _, p := range placements {
		e.Line("placement", "%s", p.name)
		if err := place(e, p.at, *layers, *mib<<18); err != nil {
			return fmt.Errorf("placement %s: %w", p.name, err)
		}
	}
	return nil
}

// place loads the layers under a placement, and adds them up.
func place(e *app.Env, at managed.Placement, layers, elements int) (err error) {
	s, err := e.Device.NewStream(cuda.StreamOptions{})
	if err != nil {
		return err
	}
	defer app.Close(s, &err)
	// The allocator owns its arrays: closing it closes them.
	memory, err := managed.NewAllocator(e.Device, managed.Options{Placement: at, Stream: s})
	if err != nil {
		return err
	}
	defer app.Close(memory, &err)
	var weights []*managed.Array[float32]
	for i := range layers {
		w, err := managed.NewArray[float32](s, memory, elements)
		if err != nil {
			return err
		}
		weights = append(weights, w)
		err = w.Host(s, func(data []float32) error { // the CPU fills layer i with i+1
			for j := range data {
				data[j] = float32(i + 1)
			}
			return nil
		})
		if err != nil {
			return err
		}
	}
	scratch, err := managed.New(e.Device, 4*elements, managed.Options{})
	if err != nil {
		return err
	}
	defer app.Close(scratch, &err)
	if err := draw(e, "before", weights, scratch); err != nil {
		return err
	}

	all := []managed.Range{scratch.Range}
	for _, w := range weights {
		all = append(all, w.Buffer().Range)
	}
	if err := managed.PrefetchBatch(s, all, e.Device.Location()); err != nil {
		return err
	}
	sum, err := add(s, weights, scratch)
	if err != nil {
		return err
	}
	// Discarded pages move without their contents. An older driver cannot.
	if err := scratch.DiscardPrefetch(s, cuda.OnHost()); errors.Is(err, cuda.ErrNotSupported) {
		e.Line("", "%v", err)
	} else if err != nil {
		return err
	}
	if err := s.Synchronize(); err != nil {
		return err
	}
	if err := draw(e, "after", weights, scratch); err != nil {
		return err
	}
	e.Line("  verified", "%v is the sum of the layers, which have %d MiB", sum, memory.Stats().Bytes>>20)
	return nil
}
