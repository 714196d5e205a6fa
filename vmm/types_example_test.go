package vmm_test

import (
	"fmt"
	"log"
	"slices"
	"sync"

	"github.com/cuvmm/cuvmm/cuda"
	"github.com/cuvmm/cuvmm/cuda/auto"
	"github.com/cuvmm/cuvmm/vmm"
)

func fatal(err error) {
	if err != nil {
		log.Fatal(err)
	}
}

// firstDevice opens the driver for an example.
func firstDevice() (dev *cuda.Device, done func()) {
	sys, err := auto.Open(auto.Options{Driver: auto.Software})
	fatal(err)
	return sys.Devices()[0], func() { fatal(sys.Close()) }
}

// Goroutines append to one array without a lock: each learns where its elements
// lie.
func ExampleArray_Append() {
	dev, done := firstDevice()
	defer done()
	index, err := vmm.NewArray[int32](dev, vmm.BufferOptions{})
	fatal(err)
	defer index.Close()

	found := make([]bool, 4)
	var writers sync.WaitGroup
	for w := range found {
		writers.Go(func() {
			at, err := index.Append(nil, []int32{int32(w), int32(w)})
			fatal(err)
			mine, err := index.Slice(at, at+2)
			fatal(err)
			back := make([]int32, 2)
			fatal(mine.CopyTo(nil, back))
			found[w] = back[0] == int32(w) && back[1] == int32(w)
		})
	}
	writers.Wait()
	fmt.Println(index.Len(), found)
	// Output: 8 [true true true true]
}

// An array of structs, and the same memory by the byte.
func ExampleArrayOf() {
	dev, done := firstDevice()
	defer done()
	type point struct{ X, Y, Z float32 }
	buffer, err := vmm.NewBuffer(dev, vmm.BufferOptions{})
	fatal(err)
	defer buffer.Close()
	points, err := vmm.ArrayOf[point](buffer)
	fatal(err)
	_, err = points.Append(nil, []point{{1, 2, 3}, {4, 5, 6}})
	fatal(err)
	fmt.Println(points.Len(), "points,", buffer.Len(), "bytes")

	_, err = vmm.ArrayOf[struct{ Name string }](buffer)
	fmt.Println(err)
	// Output:
	// 2 points, 24 bytes
	// vmm.ArrayOf: invalid argument: elements of type struct { Name string }, of which field Name (string) contains a Go pointer; use numbers, booleans, and arrays and structs of those: the GPU cannot follow Go's pointers
}

// Slices are Go's: from an element up to, not including, another.
func ExampleSlice() {
	dev, done := firstDevice()
	defer done()
	array, err := vmm.NewArray[int32](dev, vmm.BufferOptions{})
	fatal(err)
	defer array.Close()
	_, err = array.Append(nil, []int32{0, 1, 2, 3, 4, 5})
	fatal(err)
	var middle vmm.Slice[int32]
	middle, err = array.Slice(2, 5)
	fatal(err)
	fatal(middle.CopyFrom(nil, []int32{20, 30, 40}))
	all := make([]int32, array.Len())
	fatal(array.All().CopyTo(nil, all))
	fmt.Println(all)
	_, err = array.Slice(5, 3)
	fmt.Println(err)
	// Output:
	// [0 1 20 30 40 5]
	// vmm.Array.Slice: out of range: 5 to 3 of 6; stay inside what is in use; Append, AppendUndefined or Resize make it longer
}

// A buffer whose range has become too small moves to a larger one: nothing is
// copied, and the old one stays for work under way.
func ExampleBuffer_Move() {
	dev, done := firstDevice()
	defer done()
	old, err := vmm.NewBuffer(dev, vmm.BufferOptions{Reserve: 2 << 20})
	fatal(err)
	_, err = old.Append(nil, []byte("the same bytes"))
	fatal(err)

	larger, err := old.Move(vmm.MoveOptions{Reserve: 1 << 30})
	fatal(err)
	defer larger.Close()
	stats := larger.Stats()
	fmt.Printf("%d bytes, %d MiB shared, %d MiB reserved\n", stats.Used, stats.Shared>>20, stats.Reserved>>20)
	fatal(old.Close())
	fatal(larger.Grow(100 << 20))
	// Output: 14 bytes, 2 MiB shared, 1024 MiB reserved
}

// What kind of memory is asked for, and what it came to.
func ExampleProperties() {
	dev, done := firstDevice()
	defer done()
	var asked = vmm.Properties{
		Handles:     vmm.PosixFD,
		RDMA:        vmm.RDMAOff,
		Usage:       vmm.AnyUsage,
		Granularity: vmm.MinimumGranularity,
	}
	size, err := vmm.GranularityOf(dev, asked)
	fatal(err)
	var memory *vmm.Allocation
	memory, err = vmm.Create(dev, size, asked)
	fatal(err)
	defer memory.Close()
	granted, err := memory.Granted()
	fatal(err)
	fmt.Println(memory.Size()>>20, "MiB on", granted.Location, "shared by", granted.Handles)
	// Output: 2 MiB on device 0 shared by fd
}

// Chunks say in what pieces memory is taken.
func ExampleChunkPlan() {
	dev, done := firstDevice()
	defer done()
	for _, plan := range []vmm.ChunkPlan{{}, vmm.FixedChunks(4 << 20), vmm.GeometricChunks(2<<20, 16<<20)} {
		buffer, err := vmm.NewBuffer(dev, vmm.BufferOptions{Chunks: plan})
		fatal(err)
		fatal(buffer.Grow(20 << 20))
		var stats vmm.BufferStats = buffer.Stats()
		fmt.Printf("%v: %d chunks, %d MiB\n", plan, stats.Chunks, stats.Committed>>20)
		fatal(buffer.Close())
	}
	// Output:
	// chunks of the granularity to 64 MiB: 5 chunks, 32 MiB
	// chunks of 4 MiB: 5 chunks, 20 MiB
	// chunks of 2 MiB to 16 MiB: 5 chunks, 32 MiB
}

// Memory side by side in one range, with access that differs.
func ExampleReservation_MapRun() {
	dev, done := firstDevice()
	defer done()
	space, err := vmm.Reserve(dev, 8<<20, vmm.ReserveOptions{Align: 8 << 20})
	fatal(err)
	var memory []vmm.Physical
	for range 2 {
		a, err := vmm.Create(dev, 4<<20, vmm.Properties{})
		fatal(err)
		defer a.Close()
		memory = append(memory, a)
	}
	access := []vmm.Access{{Location: dev.Location(), Mode: vmm.ReadOnly}}
	var mappings []*vmm.Mapping
	mappings, err = space.MapRun(0, access, memory...)
	fatal(err)
	var mode vmm.AccessMode
	mode, err = mappings[1].Access(dev.Location())
	fatal(err)
	fmt.Println(mode, "at offset", mappings[1].Ptr()-space.Ptr())
	for _, m := range slices.Backward(mappings) {
		fatal(m.Close())
	}
	fatal(space.Close())
	// Output: read-only at offset 0x400000
}

// Memory with descriptors, and with fabric handles too where those work.
func ExampleHandleTypes() {
	dev, done := firstDevice()
	defer done()
	buffer, err := vmm.NewBuffer(dev, vmm.BufferOptions{Memory: vmm.Properties{Handles: vmm.PreferFabric}})
	fatal(err)
	defer buffer.Close()
	var types vmm.HandleTypes = buffer.Requested().Handles
	fmt.Println(types, types&vmm.Fabric != 0)
	// Output: fd false
}

// The memory of one buffer is back when its Released says so.
func ExampleBuffer_Released() {
	dev, done := firstDevice()
	defer done()
	stream, err := dev.NewStream(cuda.StreamOptions{})
	fatal(err)
	defer stream.Close()
	buffer, err := vmm.NewBuffer(dev, vmm.BufferOptions{})
	fatal(err)
	_, err = buffer.Append(stream, make([]byte, 1<<20))
	fatal(err)
	fatal(buffer.CloseAfter(stream))
	<-buffer.Released().Done()
	fmt.Println(dev.System().Stats().AllocatedBytes)
	// Output: 0
}

// Memory that the GPU's decompression engine writes to.
func ExampleUsage() {
	dev, done := firstDevice()
	defer done()
	memory, err := vmm.Create(dev, 2<<20, vmm.Properties{Usage: vmm.HWDecompress})
	fatal(err)
	defer memory.Close()
	granted, err := memory.Granted()
	fatal(err)
	fmt.Println(granted.Usage == vmm.HWDecompress)
	// Output: true
}
