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
	weights, err := managed.NewArray[float32](stream, memory, 1_000_000)
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

// A Buffer is a Range of all of it.
func ExampleBuffer() {
	dev, done := device()
	defer done()
	buffer, err := managed.New(dev, 1<<20, managed.Options{})
	if err != nil {
		log.Fatal(err)
	}
	defer buffer.Close()
	err = buffer.Host(nil, func(data []byte) error { // the memory itself
		copy(data, "written by the CPU")
		return nil
	})
	if err != nil {
		log.Fatal(err)
	}
	var part managed.Range
	if part, err = buffer.Slice(0, 7); err != nil {
		log.Fatal(err)
	}
	data, err := part.Bytes()
	fmt.Printf("%s %v\n", data, err)
	// Output: written <nil>
}

// What is discarded may be written again at once, by the GPU and, with the stream
// awaited, by the CPU.
func ExampleRange_Discard() {
	dev, done := device()
	defer done()
	stream, err := dev.NewStream(cuda.StreamOptions{})
	if err != nil {
		log.Fatal(err)
	}
	defer stream.Close()
	scratch, err := managed.New(dev, 4096, managed.Options{})
	if err != nil {
		log.Fatal(err)
	}
	defer scratch.Close()
	for step := range 3 {
		if err := scratch.Discard(stream); err != nil { // nothing of it is copied from now on
			log.Fatal(err)
		}
		if err := stream.Memset(scratch.Ptr(), byte('a'+step), 4096); err != nil {
			log.Fatal(err)
		}
	}
	err = scratch.Host(stream, func(data []byte) error {
		fmt.Printf("%s\n", data[:3])
		return nil
	})
	fmt.Println(err)
	// Output:
	// ccc
	// <nil>
}

func ExampleDiscardBatch() {
	dev, done := device()
	defer done()
	memory, err := managed.NewAllocator(dev, managed.Options{})
	if err != nil {
		log.Fatal(err)
	}
	defer memory.Close()
	var scratch []managed.Range
	for range 3 {
		b, err := memory.New(nil, 1<<20)
		if err != nil {
			log.Fatal(err)
		}
		scratch = append(scratch, b.Range)
	}
	// Without a stream they return when it is done.
	fmt.Println(managed.DiscardBatch(nil, scratch))
	fmt.Println(managed.DiscardPrefetchBatch(nil, scratch, cuda.OnHost()))
	fmt.Println(scratch[2].LastPrefetch())
	// Output:
	// <nil>
	// <nil>
	// host <nil>
}

// Tables that every device reads: each gets a copy of its own.
func ExamplePlacement() {
	dev, done := device()
	defer done()
	var tables managed.Placement = func(s *cuda.Stream, r managed.Range) error {
		if err := managed.ReadMostly(s, r); err != nil {
			return err
		}
		return r.SetPreferred(cuda.OnHost())
	}
	buffer, err := managed.New(dev, 1<<20, managed.Options{Placement: tables})
	if err != nil {
		log.Fatal(err)
	}
	defer buffer.Close()
	fmt.Println(buffer.ReadMostly())
	fmt.Println(buffer.Preferred())
	// Output:
	// true <nil>
	// host <nil>
}

// Memory of one stream, for devices without concurrent managed access.
func ExampleAttachment() {
	dev, done := device()
	defer done()
	stream, err := dev.NewStream(cuda.StreamOptions{})
	if err != nil {
		log.Fatal(err)
	}
	defer stream.Close()
	buffer, err := managed.New(dev, 4096, managed.Options{Attach: managed.AttachStream, Stream: stream})
	if err != nil {
		log.Fatal(err)
	}
	defer buffer.Close()
	fmt.Println(buffer.Attach(stream, managed.AttachGlobal), managed.AttachGlobal) // for every stream again
	// Output: <nil> global
}

func ExampleAllocator() {
	dev, done := device()
	defer done()
	memory, err := managed.NewAllocator(dev, managed.Options{})
	if err != nil {
		log.Fatal(err)
	}
	for range 3 {
		if _, err := memory.New(nil, 4096); err != nil {
			log.Fatal(err)
		}
	}
	var now managed.Stats = memory.Stats()
	fmt.Println(now.Live, now.Bytes)
	fmt.Println(memory.Close(), memory.Stats().Live) // with all that it made
	// Output:
	// 3 12288
	// <nil> 0
}

func ExampleArrayOf() {
	dev, done := device()
	defer done()
	buffer, err := managed.New(dev, 4096, managed.Options{})
	if err != nil {
		log.Fatal(err)
	}
	defer buffer.Close()
	var numbers *managed.Array[uint32]
	if numbers, err = managed.ArrayOf[uint32](buffer); err != nil {
		log.Fatal(err)
	}
	err = numbers.Host(nil, func(data []uint32) error {
		data[0] = 7
		return nil
	})
	fmt.Println(numbers.Len(), err)
	// Output: 1024 <nil>
}

// Memory that another library allocated, for a program that does not know whether
// it is managed.
func ExampleView() {
	dev, done := device()
	defer done()
	theirs, err := managed.New(dev, 4096, managed.Options{})
	if err != nil {
		log.Fatal(err)
	}
	defer theirs.Close()
	view, err := managed.View(dev, theirs.Ptr(), 4096, managed.ViewOptions{Hint: true})
	if err != nil {
		log.Fatal(err)
	}
	defer view.Close() // gives nothing back
	fmt.Println(view.Managed(), view.SetReadMostly(true))
	fmt.Println(theirs.ReadMostly())
	// Output:
	// true <nil>
	// true <nil>
}
