package vmm_test

import (
	"context"
	"fmt"
	"io"
	"log"
	"strings"

	"github.com/cuvmm/cuvmm/cuda"
	"github.com/cuvmm/cuvmm/cuda/auto"
	"github.com/cuvmm/cuvmm/vmm"
)

func ExampleArray() {
	sys, err := auto.Open(auto.Options{})
	if err != nil {
		log.Fatal(err)
	}
	defer sys.Close()
	dev, err := sys.Device(0)
	if err != nil {
		log.Fatal(err)
	}

	array, err := vmm.NewArray[float32](dev, vmm.BufferOptions{})
	if err != nil {
		log.Fatal(err)
	}
	defer array.Close()

	address := array.Ptr()
	for range 3 {
		if _, err := array.Append(nil, []float32{1, 2, 3, 4}); err != nil {
			log.Fatal(err)
		}
	}
	fmt.Println(array.Len(), "elements, moved:", array.Ptr() != address)

	tail, err := array.Slice(8, 12)
	if err != nil {
		log.Fatal(err)
	}
	back := make([]float32, tail.Len())
	if err := tail.CopyTo(nil, back); err != nil {
		log.Fatal(err)
	}
	fmt.Println(back)
	// Output:
	// 12 elements, moved: false
	// [1 2 3 4]
}

func ExampleNewWriter() {
	sys, err := auto.Open(auto.Options{})
	if err != nil {
		log.Fatal(err)
	}
	defer sys.Close()

	buffer, err := vmm.NewBuffer(sys.Devices()[0], vmm.BufferOptions{
		Reserve: 1 << 30,
		Chunks:  vmm.FixedChunks(16 << 20),
	})
	if err != nil {
		log.Fatal(err)
	}
	defer buffer.Close()

	if _, err := io.Copy(vmm.NewWriter(buffer), strings.NewReader("to the GPU and back")); err != nil {
		log.Fatal(err)
	}
	text, err := io.ReadAll(vmm.NewReader(buffer))
	if err != nil {
		log.Fatal(err)
	}
	stats := buffer.Stats()
	fmt.Printf("%s: %d bytes in use, %d MiB committed, %d MiB reserved\n",
		text, stats.Used, stats.Committed>>20, stats.Reserved>>20)
	// Output:
	// to the GPU and back: 19 bytes in use, 16 MiB committed, 1024 MiB reserved
}

func ExampleBuffer_CloseAfter() {
	sys, err := auto.Open(auto.Options{})
	if err != nil {
		log.Fatal(err)
	}
	defer sys.Close()
	dev := sys.Devices()[0]

	stream, err := dev.NewStream(cuda.StreamOptions{})
	if err != nil {
		log.Fatal(err)
	}
	defer stream.Close()
	buffer, err := vmm.NewBuffer(dev, vmm.BufferOptions{})
	if err != nil {
		log.Fatal(err)
	}
	if _, err := buffer.Append(stream, make([]byte, 1<<20)); err != nil {
		log.Fatal(err)
	}

	// Out of use at once, given back when the stream's work has passed.
	if err := buffer.CloseAfter(stream); err != nil {
		log.Fatal(err)
	}
	if err := sys.Drain(context.Background()); err != nil {
		log.Fatal(err)
	}
	fmt.Println(sys.Stats().AllocatedBytes, "bytes allocated")
	// Output:
	// 0 bytes allocated
}

func ExampleReserve() {
	sys, err := auto.Open(auto.Options{})
	if err != nil {
		log.Fatal(err)
	}
	defer sys.Close()
	dev := sys.Devices()[0]

	// Physical memory, address space, and the tie between them.
	memory, err := vmm.Create(dev, 2<<20, vmm.Properties{})
	if err != nil {
		log.Fatal(err)
	}
	defer memory.Close()
	space, err := vmm.Reserve(dev, 4<<20, vmm.ReserveOptions{})
	if err != nil {
		log.Fatal(err)
	}
	defer space.Close()
	for _, offset := range []int{0, 2 << 20} { // one memory at two addresses
		mapping, err := space.Map(offset, memory)
		if err != nil {
			log.Fatal(err)
		}
		defer mapping.Close()
	}
	err = space.SetAccess(0, 4<<20, vmm.Access{Location: dev.Location(), Mode: vmm.ReadWrite})
	if err != nil {
		log.Fatal(err)
	}

	stream, err := dev.NewStream(cuda.StreamOptions{})
	if err != nil {
		log.Fatal(err)
	}
	defer stream.Close()
	if err := stream.Upload(space.Ptr(), []byte("seen twice")); err != nil {
		log.Fatal(err)
	}
	seen := make([]byte, 10)
	if err := stream.Download(seen, space.Ptr()+2<<20); err != nil {
		log.Fatal(err)
	}
	fmt.Printf("%s\n", seen)
	// Output:
	// seen twice
}

// Two sequences share a prompt and go on differently: memory is taken for what
// differs alone.
func ExampleBuffer_Fork() {
	sys, err := auto.Open(auto.Options{})
	if err != nil {
		log.Fatal(err)
	}
	defer sys.Close()
	prompt, err := vmm.NewBuffer(sys.Devices()[0], vmm.BufferOptions{Chunks: vmm.FixedChunks(2 << 20)})
	if err != nil {
		log.Fatal(err)
	}
	defer prompt.Close()
	if _, err := prompt.Append(nil, make([]byte, 5<<20)); err != nil {
		log.Fatal(err)
	}

	reply, err := prompt.Fork(nil, prompt.Len(), vmm.ForkOptions{})
	if err != nil {
		log.Fatal(err)
	}
	defer reply.Close()
	at, err := reply.Append(nil, []byte("a reply"))
	if err != nil {
		log.Fatal(err)
	}
	fmt.Println("the reply begins at", at, "and the prompt still ends at", prompt.Len())
	fmt.Printf("%d MiB shared, %d MiB allocated in all\n", reply.Stats().Shared>>20, sys.Stats().AllocatedBytes>>20)
	// Output:
	// the reply begins at 5242880 and the prompt still ends at 5242880
	// 4 MiB shared, 8 MiB allocated in all
}
