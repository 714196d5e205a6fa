package managed_test

import (
	"errors"
	"fmt"
	"log"

	"github.com/cuvmm/cuvmm/cuda"
	"github.com/cuvmm/cuvmm/cuda/auto"
	"github.com/cuvmm/cuvmm/managed"
)

func device() (dev *cuda.Device, done func()) {
	sys, err := auto.Open(auto.Options{Driver: auto.Software})
	if err != nil {
		log.Fatal(err)
	}
	return sys.Devices()[0], func() {
		if err := sys.Close(); err != nil {
			log.Fatal(err)
		}
	}
}

// Memory that the CPU fills and the GPU works on.
func Example() {
	dev, done := device()
	defer done()
	stream, err := dev.NewStream(cuda.StreamOptions{})
	if err != nil {
		log.Fatal(err)
	}
	defer stream.Close()

	memory, err := managed.NewAllocator(dev, managed.Options{Placement: managed.GPUFirst, Stream: stream})
	if err != nil {
		log.Fatal(err)
	}
	defer memory.Close() // and with it all that it made
	weights, err := managed.NewArray[float32](memory, stream, 1_000_000)
	if err != nil {
		log.Fatal(err)
	}
	err = weights.Host(stream, func(data []float32) error {
		data[0] = 1.5
		return nil
	})
	if err != nil {
		log.Fatal(err)
	}
	if err := weights.Buffer().Prefetch(stream, dev.Location()); err != nil { // for the next kernel
		log.Fatal(err)
	}
	at, err := weights.Buffer().LastPrefetch()
	fmt.Println(at, err, memory.Stats().Live)
	// Output: device 0 <nil> 1
}

func ExampleAccessedBy() {
	dev, done := device()
	defer done()
	buffer, err := managed.New(dev, 1<<20, managed.Options{})
	if err != nil {
		log.Fatal(err)
	}
	defer buffer.Close()
	set := buffer.AccessedBy()
	fmt.Println(set.Assign(dev.Location(), cuda.OnHost()))
	fmt.Println(set.All())
	err = set.Add(cuda.OnHostNUMA(0))
	fmt.Println(errors.Is(err, cuda.ErrInvalidArgument))
	// Output:
	// <nil>
	// [host device 0] <nil>
	// true
}

func ExamplePrefetchBatch() {
	dev, done := device()
	defer done()
	stream, err := dev.NewStream(cuda.StreamOptions{})
	if err != nil {
		log.Fatal(err)
	}
	defer stream.Close()
	first, err := managed.New(dev, 1<<20, managed.Options{})
	if err != nil {
		log.Fatal(err)
	}
	defer first.Close()
	second, err := managed.New(dev, 4<<20, managed.Options{})
	if err != nil {
		log.Fatal(err)
	}
	defer second.Close()
	half, err := second.Slice(0, 2<<20)
	if err != nil {
		log.Fatal(err)
	}
	fmt.Println(managed.PrefetchBatch(stream, []managed.Range{first.Range, half}, dev.Location()))
	fmt.Println(half.LastPrefetch())
	fmt.Println(managed.PrefetchBatch(stream, nil, dev.Location()) != nil)
	// Output:
	// <nil>
	// device 0 <nil>
	// true
}
