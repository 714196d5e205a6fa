package pool_test

import (
	"fmt"
	"log"

	"github.com/cuvmm/cuvmm/cuda"
	"github.com/cuvmm/cuvmm/cuda/sim"
	"github.com/cuvmm/cuvmm/vmm/pool"
)

// Blocks come back in the order of their streams, and a graph's memory stays
// its own until the graph is gone.
func ExamplePool_Capture() {
	machine, err := sim.New(sim.Options{})
	if err != nil {
		log.Fatal(err)
	}
	defer machine.Close()
	sys, err := machine.Open()
	if err != nil {
		log.Fatal(err)
	}
	defer sys.Close()
	dev, err := sys.Device(0)
	if err != nil {
		log.Fatal(err)
	}
	stream, err := dev.NewStream(cuda.StreamOptions{})
	if err != nil {
		log.Fatal(err)
	}
	defer stream.Close()

	p, err := pool.New(dev, pool.Options{})
	if err != nil {
		log.Fatal(err)
	}
	defer p.Close()
	block, err := p.Alloc(pool.Request{Bytes: 1 << 20, Stream: stream})
	if err != nil {
		log.Fatal(err)
	}
	// Never waits: the memory serves others when the stream's work has passed.
	if err := p.Free(block); err != nil {
		log.Fatal(err)
	}

	graph, stats, err := p.Capture(stream, pool.CaptureOptions{}, func() error {
		scratch, err := p.Alloc(pool.Request{Bytes: 1 << 20, Stream: stream})
		if err != nil {
			return err
		}
		if err := stream.Memset(scratch.Ptr(), 0, scratch.Bytes()); err != nil {
			return err
		}
		return p.Free(scratch)
	})
	if err != nil {
		log.Fatal(err)
	}
	defer graph.Close()
	fmt.Println("served in the capture:", stats.Served, "refused:", stats.Refused)
	// Output: served in the capture: 1 refused: 0
}
