package vmm_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"

	"github.com/cuvmm/cuvmm/cuda"
	"github.com/cuvmm/cuvmm/vmm"
)

// Two arrays leave the GPU to another user, and come back one after the other.
func ExampleSuspend() {
	dev, done := firstDevice()
	defer done()
	ctx := context.Background()
	weights, err := vmm.NewArray[float32](dev, vmm.BufferOptions{})
	fatal(err)
	defer weights.Close()
	_, err = weights.Append(nil, []float32{1, 2, 3})
	fatal(err)
	cache, err := vmm.NewBuffer(dev, vmm.BufferOptions{})
	fatal(err)
	defer cache.Close()
	fatal(cache.Resize(nil, 1000))

	at := weights.Ptr()
	s, err := vmm.Suspend(ctx, vmm.SuspendOptions{}, weights, cache)
	fatal(err)
	r := s.Report()
	fmt.Println("given back:", r.Given>>20, "MiB, held:", r.Held)
	_, err = weights.Append(nil, []float32{4})
	fmt.Println(errors.Is(err, cuda.ErrSuspended))

	fatal(s.Resume(ctx, weights))
	back := make([]float32, 3)
	fatal(weights.All().CopyTo(nil, back))
	fmt.Println(back, weights.Ptr() == at)
	fatal(s.Resume(ctx)) // the rest
	// Output:
	// given back: 4 MiB, held: 0
	// true
	// [1 2 3] true
}

// A GPU is not empty when this library's memory sleeps. The report says what the rest is.
func ExampleOutside() {
	dev, done := firstDevice()
	defer done()
	b, err := vmm.NewBuffer(dev, vmm.BufferOptions{})
	fatal(err)
	defer b.Close()
	fatal(b.Resize(nil, 1000))

	s, err := vmm.Suspend(context.Background(), vmm.SuspendOptions{TrimPools: true}, b)
	fatal(err)
	for _, o := range s.Report().Outside {
		fmt.Println("device", o.Device, "has", o.Own>>20, "MiB of this library, and", o.PoolUsed>>20, "MiB of its default pool in use")
		fmt.Println(o.Free+o.Own+o.Pool+o.Rest == o.Total)
	}
	fatal(s.Resume(context.Background()))
	// Output:
	// device 0 has 0 MiB of this library, and 0 MiB of its default pool in use
	// true
}

// A guard lies under the addresses while the memory is away.
func ExampleGuard() {
	dev, done := firstDevice()
	defer done()
	b, err := vmm.NewBuffer(dev, vmm.BufferOptions{Chunks: vmm.FixedChunks(32 << 20)})
	fatal(err)
	defer b.Close()
	fatal(b.Grow(320 << 20))
	s, err := vmm.Suspend(context.Background(), vmm.SuspendOptions{Keep: vmm.Drop, Guard: true}, b)
	fatal(err)
	show := func(g vmm.Guard) { fmt.Printf("%d MiB of memory lie under %d MiB\n", g.Memory>>20, g.Covered>>20) }
	show(s.Report().Guard)
	fatal(s.Resume(context.Background()))
	// Output:
	// 64 MiB of memory lie under 320 MiB
}

// SuspendAfter waits for nothing: the memory goes when the stream's work is done.
func ExampleSuspendAfter() {
	dev, done := firstDevice()
	defer done()
	ctx := context.Background()
	stream, err := dev.NewStream(cuda.StreamOptions{})
	fatal(err)
	defer stream.Close()
	b, err := vmm.NewBuffer(dev, vmm.BufferOptions{})
	fatal(err)
	defer b.Close()
	_, err = b.Append(stream, []byte("on its way"))
	fatal(err)

	s, err := vmm.SuspendAfter(vmm.SuspendOptions{}, []*cuda.Stream{stream}, b)
	fatal(err)
	fatal(s.Released().Wait(ctx))
	fmt.Println(b.Stats().Suspended == b.Stats().Committed)
	fatal(s.Resume(ctx))
	back := make([]byte, b.Len())
	part, err := b.Slice(0, b.Len())
	fatal(err)
	fatal(part.CopyTo(nil, back))
	fmt.Printf("%s\n", back)
	// Output:
	// true
	// on its way
}

// Memory whose contents are in a file is filled from there, and takes no host memory meanwhile.
func ExampleSourceAt() {
	dev, done := firstDevice()
	defer done()
	ctx := context.Background()
	file := bytes.NewReader([]byte("weights of a model"))
	b, err := vmm.NewBuffer(dev, vmm.BufferOptions{})
	fatal(err)
	defer b.Close()
	_, err = vmm.NewWriter(b).ReadFrom(file)
	fatal(err)

	o := vmm.SuspendOptions{Source: vmm.SourceAt(file)}
	preview, err := vmm.Preview(o, b)
	fatal(err)
	for _, held := range preview.Memory {
		fmt.Println(held.Asked>>20, "MiB to go,", len(held.Rest), "reasons to stay,", preview.Host, "bytes of host memory")
	}
	s, err := vmm.Suspend(ctx, o, b)
	fatal(err)
	fatal(s.Resume(ctx))
	back := make([]byte, b.Len())
	part, err := b.Slice(0, b.Len())
	fatal(err)
	fatal(part.CopyTo(nil, back))
	fmt.Printf("%s\n", back)
	// Output:
	// 2 MiB to go, 0 reasons to stay, 0 bytes of host memory
	// weights of a model
}

// A preview says how much of a family goes, and what keeps the rest.
func ExamplePreview() {
	dev, done := firstDevice()
	defer done()
	first, err := vmm.NewBuffer(dev, vmm.BufferOptions{})
	fatal(err)
	defer first.Close()
	fatal(first.Resize(nil, 3<<20))
	fork, err := first.Fork(nil, 2<<20, vmm.ForkOptions{})
	fatal(err)
	defer fork.Close()

	sum := func(rest []vmm.Rest) (bytes int) {
		for _, r := range rest { // r.Why has the reason
			bytes += r.Bytes
		}
		return bytes
	}
	stays := func(h vmm.Held) int { return sum(h.Rest) }
	for _, family := range [][]vmm.Memory{{first}, {first, fork}} {
		for _, keep := range []vmm.Keep{vmm.KeepHost, vmm.Drop} {
			r, err := vmm.Preview(vmm.SuspendOptions{Keep: keep}, family...)
			fatal(err)
			fmt.Println(len(family), "named,", keep, "-", r.Given>>20, "MiB go,", stays(r.Memory[0])>>20, "MiB stay,", r.Host>>20, "MiB of host memory")
		}
	}
	// Output:
	// 1 named, kept in host memory - 2 MiB go, 2 MiB stay, 2 MiB of host memory
	// 1 named, dropped - 2 MiB go, 2 MiB stay, 0 MiB of host memory
	// 2 named, kept in host memory - 4 MiB go, 0 MiB stay, 4 MiB of host memory
	// 2 named, dropped - 4 MiB go, 0 MiB stay, 0 MiB of host memory
}

// A tag names the buffers that sleep together, and what was forked or moved from them.
func ExampleTagged() {
	dev, done := firstDevice()
	defer done()
	ctx := context.Background()
	for _, name := range []string{"weights", "cache"} {
		b, err := vmm.NewBuffer(dev, vmm.BufferOptions{Name: name, Tag: "model"})
		fatal(err)
		defer b.Close()
		fatal(b.Resize(nil, 1000))
	}

	s, err := vmm.Suspend(ctx, vmm.SuspendOptions{}, vmm.Tagged(dev.System(), "model")...)
	fatal(err)
	fmt.Println(len(s.Report().Memory), "buffers gave back", s.Report().Given>>20, "MiB")
	fatal(s.Resume(ctx))
	// Output: 2 buffers gave back 4 MiB
}
