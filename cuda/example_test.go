package cuda_test

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"log"
	"log/slog"
	"time"

	"github.com/cuvmm/cuvmm/csrc/kernels"
	"github.com/cuvmm/cuvmm/cuda"
	"github.com/cuvmm/cuvmm/cuda/auto"
	"github.com/cuvmm/cuvmm/cuda/sim"
)

// system opens a machine of two software GPUs. Most programs call cuda.Open or
// auto.Open with the zero Options.
func system() *cuda.System { return systemWith(cuda.Options{}) }

func systemWith(options cuda.Options) *cuda.System {
	sys, err := auto.Open(auto.Options{Driver: auto.Software, CUDA: options, Machine: sim.Options{Devices: make([]sim.DeviceOptions, 2)}})
	check(err)
	return sys
}

func check(err error) {
	if err != nil {
		log.Fatal(err)
	}
}

// closing is for defer.
func closing(c interface{ Close() error }) { check(c.Close()) }

func ExampleOpen() {
	sys, err := cuda.Open(cuda.Options{Library: "/none/libcuda.so.1"})
	if errors.Is(err, cuda.ErrNoDriver) {
		fmt.Println("there is no driver")
		return
	}
	check(err)
	defer closing(sys)
	// Output: there is no driver
}

func ExampleSystem() {
	sys := system()
	defer closing(sys)
	for _, dev := range sys.Devices() {
		fmt.Println(dev, dev.TotalMemory()>>30, "GiB")
	}
	_, err := sys.Device(7)
	fmt.Println(errors.Is(err, cuda.ErrInvalidArgument))
	// Output:
	// device 0 (Software GPU) 16 GiB
	// device 1 (Software GPU) 16 GiB
	// true
}

func ExampleSystem_Drain() {
	sys := system()
	defer closing(sys)
	stream, err := sys.Devices()[0].NewStream(cuda.StreamOptions{})
	check(err)
	defer closing(stream)
	pinned, err := sys.Devices()[0].NewHostBuffer(4096)
	check(err)
	check(pinned.CloseAfter(stream)) // gone when the stream's work is done

	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	fmt.Println(sys.Drain(ctx), sys.Stats().Pending)
	// Output: <nil> 0
}

func ExampleDriverInfo() {
	sys := system()
	defer closing(sys)
	fmt.Println(sys.Driver(), sys.Driver().Software)
	// Output: software driver, CUDA 13.0 true
}

func ExampleStats() {
	sys := system()
	defer closing(sys)
	event, err := sys.Devices()[0].NewEvent(cuda.EventOptions{})
	check(err)
	defer closing(event)
	var now cuda.Stats = sys.Stats()
	fmt.Println(now.Events, now.Streams)
	// Output: 1 0
}

func ExampleOptions() {
	sys := systemWith(cuda.Options{
		Logger:         slog.New(slog.DiscardHandler),
		TraceLeaks:     true,        // Live names where each object was made
		AllocationWait: time.Second, // wait that long for memory that is being freed
	})
	defer closing(sys)
	fmt.Println(sys.Live())
	// Output: []
}

func ExampleDevice() {
	sys := system()
	defer closing(sys)
	dev := sys.Devices()[0]
	can, err := dev.CanAccess(sys.Devices()[1])
	fmt.Println(dev.Ordinal(), dev.Name(), can, err)
	// Output: 0 Software GPU true <nil>
}

func ExampleCapabilities() {
	sys := system()
	defer closing(sys)
	can, err := sys.Devices()[0].Capabilities()
	check(err)
	fmt.Println(can.VirtualMemory, can.PosixFD, can.MinimumGranularity>>20, "MiB")
	// Output: true true 2 MiB
}

// An attribute can read 1, and the feature be out of this process's reach: only a
// trial tells.
func ExampleProbe() {
	sys := system()
	defer closing(sys)
	tried, err := sys.Devices()[0].Probe()
	check(err)
	fmt.Println(tried.Memory, tried.Fabric, errors.Is(tried.FabricError, cuda.ErrNotPermitted))
	// Output: true false true
}

// What an operation made and the driver did not take back is tried again.
func ExampleLeftover() {
	machine, err := sim.New(sim.Options{})
	check(err)
	sys, err := machine.OpenOwned(cuda.Options{})
	check(err)
	defer closing(sys)
	machine.Inject(sim.Fault{Call: "cuMemRelease", Result: 999})
	_, err = sys.Devices()[0].Probe()
	check(err)
	for _, left := range sys.Leftovers() {
		fmt.Printf("%d KiB of %s on device %d\n", left.Bytes>>10, left.What, left.Device)
	}
	check(sys.Drain(context.Background()))
	fmt.Println(len(sys.Leftovers()))
	// Output:
	// 2048 KiB of memory on device 0
	// 0
}

func ExampleUUID() {
	sys := system()
	defer closing(sys)
	var id cuda.UUID = sys.Devices()[0].UUID()
	fmt.Println(id == sys.Devices()[1].UUID(), len(id.String()))
	// Output: false 40
}

func ExampleLocation() {
	fmt.Println(cuda.OnDevice(1), cuda.OnHost(), cuda.OnHostNUMA(0), cuda.OnCurrentNUMA())
	fmt.Println(cuda.OnDevice(1) == cuda.Location{Type: cuda.LocationDevice, ID: 1})
	// Output:
	// device 1 host host NUMA node 0 current host NUMA node
	// true
}

func ExampleLocationType() {
	fmt.Println(cuda.OnHostNUMA(0).Type, cuda.OnHost().Type == cuda.LocationHost)
	// Output: host NUMA node true
}

func ExampleStream() {
	sys := system()
	defer closing(sys)
	dev := sys.Devices()[0]
	stream, err := dev.NewStream(cuda.StreamOptions{})
	check(err)
	defer closing(stream)
	memory, err := dev.NewHostBuffer(5) // or a buffer of the package vmm
	check(err)
	defer closing(memory)

	check(stream.Upload(memory.Ptr(), []byte("hello"))) // work is done in order, and later
	check(stream.Memset(memory.Ptr(), 'j', 1))
	got := make([]byte, 5)
	check(stream.Download(got, memory.Ptr())) // this waits for its bytes
	fmt.Printf("%s\n", got)
	// Output: jello
}

func ExampleEvent() {
	sys := system()
	defer closing(sys)
	dev := sys.Devices()[0]
	first, err := dev.NewStream(cuda.StreamOptions{})
	check(err)
	defer closing(first)
	second, err := dev.NewStream(cuda.StreamOptions{})
	check(err)
	defer closing(second)
	event, err := dev.NewEvent(cuda.EventOptions{})
	check(err)
	defer closing(event)

	check(event.Record(first)) // what is on the first stream now
	check(second.Wait(event))  // comes before what is put on the second next
	check(event.Synchronize())
	fmt.Println(event.Done())
	// Output: true <nil>
}

func ExampleHostBuffer() {
	sys := system()
	defer closing(sys)
	dev := sys.Devices()[0]
	stream, err := dev.NewStream(cuda.StreamOptions{})
	check(err)
	defer closing(stream)
	pinned, err := dev.NewHostBuffer(12)
	check(err)
	defer closing(pinned)
	copy(pinned.Bytes(), "pinned")
	var part cuda.HostSlice
	part, err = pinned.Slice(0, 6)
	check(err)
	check(stream.CopyFromHost(pinned.Ptr()+6, part)) // copied while the program goes on
	check(stream.Synchronize())
	fmt.Printf("%s\n", pinned.Bytes())
	// Output: pinnedpinned
}

func ExamplePtr() {
	var p cuda.Ptr = 0x7f0000000000
	fmt.Println(p+16, p == 0)
	// Output: 0x7f0000000010 false
}

func ExampleModule() {
	sys := system()
	defer closing(sys)
	module, err := sys.Devices()[0].LoadModule(kernels.Basic) // PTX, or a binary
	check(err)
	defer closing(module)
	_, err = module.Kernel("absent")
	fmt.Println(errors.Is(err, cuda.ErrInvalidArgument))
	// Output: true
}

func ExampleKernel() {
	sys := system()
	defer closing(sys)
	dev := sys.Devices()[0]
	stream, err := dev.NewStream(cuda.StreamOptions{})
	check(err)
	defer closing(stream)
	module, err := dev.LoadModule(kernels.Basic)
	check(err)
	defer closing(module)
	fill, err := module.Kernel(kernels.Fill)
	check(err)
	numbers, err := dev.NewHostBuffer(4 * 4)
	check(err)
	defer closing(numbers)

	const first, step = 10, 5
	check(fill.Launch(stream, cuda.Threads(4), numbers.Ptr(), uint64(4), uint32(first), uint32(step)))
	check(stream.Synchronize())
	for i := range 4 {
		fmt.Println(binary.NativeEndian.Uint32(numbers.Bytes()[4*i:]))
	}
	// Output:
	// 10
	// 15
	// 20
	// 25
}

func ExampleLaunch() {
	small := cuda.Threads(1000) // as many threads at least, in blocks of a usual size
	tiles := cuda.Launch{Grid: [3]int{64, 64, 1}, Block: [3]int{16, 16, 1}}
	fmt.Println(small.Grid[0]*small.Block[0] >= 1000, tiles.Grid[0]*tiles.Block[0])
	// Output: true 1024
}

// A callback learns when the GPU is done, without a goroutine that waits.
func ExampleStream_Callback() {
	sys := system()
	defer closing(sys)
	dev := sys.Devices()[0]
	stream, err := dev.NewStream(cuda.StreamOptions{})
	check(err)
	defer closing(stream)
	memory, err := dev.NewHostBuffer(4)
	check(err)
	defer closing(memory)

	check(stream.Memset(memory.Ptr(), '+', 4))
	check(stream.Callback(func(err error) {
		fmt.Printf("%s %v\n", memory.Bytes(), err)
	}))
	check(sys.Drain(context.Background())) // waits for the function, too
	// Output: ++++ <nil>
}

// Released tells when the memory of one object is back, whoever closes it.
func ExampleCompletion() {
	sys := system()
	defer closing(sys)
	dev := sys.Devices()[0]
	stream, err := dev.NewStream(cuda.StreamOptions{})
	check(err)
	defer closing(stream)
	memory, err := dev.NewHostBuffer(4)
	check(err)
	check(stream.Memset(memory.Ptr(), '+', 4))
	check(memory.CloseAfter(stream)) // does not wait

	var released cuda.Completion = memory.Released()
	check(released.Wait(context.Background()))
	fmt.Println(sys.Stats().HostBuffers)
	// Output: 0
}

func ExampleGraph() {
	sys := system()
	defer closing(sys)
	dev := sys.Devices()[0]
	stream, err := dev.NewStream(cuda.StreamOptions{})
	check(err)
	defer closing(stream)
	memory, err := dev.NewHostBuffer(4)
	check(err)
	defer closing(memory)

	graph, err := stream.WithCapture(cuda.CaptureOptions{}, func() error {
		return stream.Memset(memory.Ptr(), '+', 4) // written down, not done
	})
	check(err)
	defer closing(graph)
	check(graph.Launch(stream))
	check(stream.Synchronize())
	fmt.Printf("%s\n", memory.Bytes())
	// Output: ++++
}

// A graph that declares its memory is not launched while that is suspended.
func ExampleSpan() {
	sys := system()
	defer closing(sys)
	dev := sys.Devices()[0]
	stream, err := dev.NewStream(cuda.StreamOptions{})
	check(err)
	defer closing(stream)
	memory, err := dev.NewHostBuffer(4)
	check(err)
	defer closing(memory)

	uses := cuda.Span{At: memory.Ptr(), Bytes: memory.Len()}
	graph, err := stream.WithCapture(cuda.CaptureOptions{Uses: []cuda.Span{uses}}, func() error {
		return stream.Memset(memory.Ptr(), '+', memory.Len())
	})
	check(err)
	defer closing(graph)
	check(graph.Launch(stream)) // or cuda.ErrSuspended
	check(stream.Synchronize())
	fmt.Printf("%s\n", memory.Bytes())
	// Output: ++++
}

func ExampleCaptureMode() {
	o := cuda.CaptureOptions{Mode: cuda.CaptureRelaxed}
	fmt.Println(o.Mode, cuda.CaptureOptions{}.Mode)
	// Output: relaxed thread-local
}

func ExampleError() {
	sys := system()
	defer closing(sys)
	_, err := sys.Devices()[0].NewHostBuffer(-1)
	var e *cuda.Error
	if errors.As(err, &e) {
		fmt.Println(e.Op, "|", e.Hint)
	}
	fmt.Println(errors.Is(err, cuda.ErrInvalidArgument))
	// Output:
	// cuda.Device.NewHostBuffer | ask for at least one byte
	// true
}

func ExampleCode() {
	fmt.Println(cuda.Code(2), cuda.Code(0) == 0)
	// Output: CUDA_ERROR_OUT_OF_MEMORY (2) true
}

// A fabric handle gives access to memory: it is never printed whole.
func ExampleFabricHandle() {
	var handle cuda.FabricHandle
	handle[0] = 0xab
	text, err := handle.MarshalText()
	check(err)
	var same cuda.FabricHandle
	check(same.UnmarshalText(text))
	fmt.Println(same == handle, len(fmt.Sprint(handle)) < len(text))
	// Output: true true
}
