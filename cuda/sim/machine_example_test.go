package sim_test

import (
	"errors"
	"fmt"
	"log"
	"strings"

	"github.com/cuvmm/cuvmm/cuda"
	"github.com/cuvmm/cuvmm/cuda/sim"
)

// printer stands for the *testing.T that a test has.
type printer struct{ cleanups []func() }

func (p *printer) Helper()                           {}
func (p *printer) Cleanup(f func())                  { p.cleanups = append(p.cleanups, f) }
func (p *printer) Fatalf(format string, args ...any) { log.Fatalf(format, args...) }

// Errorf prints what comes before the lines of source, which it is all about.
func (p *printer) Errorf(format string, args ...any) {
	text, _, _ := strings.Cut(fmt.Sprintf(format, args...), "\n")
	text, _, _ = strings.Cut(text, " (")
	fmt.Println(text)
}

// end is the end of the test.
func (p *printer) end() {
	for _, f := range p.cleanups {
		f()
	}
}

// What a test leaves open fails it, with the line that made it.
func ExampleOpen() {
	t := &printer{}
	_, sys := sim.Open(t)
	dev, err := sys.Device(0)
	if err != nil {
		log.Fatal(err)
	}
	if _, err := dev.NewStream(cuda.StreamOptions{}); err != nil {
		log.Fatal(err)
	}
	t.end()
	// Output:
	// cuda.System.Close: in use: live objects: stream
	// leaked: stream, made at
}

// A stream that is held stands for a GPU that is busy: what is submitted stays
// undone.
func ExampleMachine_Hold() {
	t := &printer{}
	defer t.end()
	machine, sys := sim.Open(t)
	dev, err := sys.Device(0)
	if err != nil {
		log.Fatal(err)
	}
	stream, err := dev.NewStream(cuda.StreamOptions{})
	if err != nil {
		log.Fatal(err)
	}
	defer stream.Close()
	memory, err := dev.NewHostBuffer(4)
	if err != nil {
		log.Fatal(err)
	}
	defer memory.Close()

	release := machine.Hold(stream.Handle())
	defer release() // also where the test fails before
	if err := stream.Memset(memory.Ptr(), 'x', 4); err != nil {
		log.Fatal(err)
	}
	look := func() {
		bytes, err := machine.Bytes(memory.Ptr(), 4)
		if err != nil {
			log.Fatal(err)
		}
		fmt.Printf("%q\n", bytes)
	}
	look()
	release()
	if err := stream.Synchronize(); err != nil {
		log.Fatal(err)
	}
	look()
	// Output:
	// "\x00\x00\x00\x00"
	// "xxxx"
}

// Work of two streams on the same memory races, unless one stream waits for an event of the
// other. Holding a stream makes sure that the work overlaps.
func ExampleMachine_Races() {
	machine, err := sim.New(sim.Options{Races: true})
	if err != nil {
		log.Fatal(err)
	}
	sys, err := machine.OpenOwned(cuda.Options{})
	if err != nil {
		log.Fatal(err)
	}
	dev, err := sys.Device(0)
	if err != nil {
		log.Fatal(err)
	}
	memory, err := dev.NewHostBuffer(8) // pinned memory that the device reaches
	if err != nil {
		log.Fatal(err)
	}
	first, err1 := dev.NewStream(cuda.StreamOptions{})
	second, err2 := dev.NewStream(cuda.StreamOptions{})
	if err := errors.Join(err1, err2); err != nil {
		log.Fatal(err)
	}
	machine.Hold(first.Handle())
	err1 = first.Memset(memory.Ptr(), 1, 8)
	err2 = second.Memset(memory.Ptr()+4, 2, 4)
	machine.Release(first.Handle())
	if err := errors.Join(err1, err2, first.Synchronize(), second.Synchronize()); err != nil {
		log.Fatal(err)
	}
	for _, r := range machine.Races() {
		fmt.Printf("%s and %s: %d bytes\n", r.First.Work, r.Second.Work, r.Size)
	}
	if err := errors.Join(first.Close(), second.Close(), memory.Close()); err != nil {
		log.Fatal(err)
	}
	fmt.Println("Close reports them:", sys.Close() != nil)
	// Output:
	// cuMemsetD8Async and cuMemsetD8Async: 4 bytes
	// Close reports them: true
}

// Any driver call can be made to fail, by its name; Calls lists them. OnCall sees
// them all, before they are made.
func ExampleMachine_Inject() {
	t := &printer{}
	defer t.end()
	machine, sys := sim.Open(t)
	dev, err := sys.Device(0)
	if err != nil {
		log.Fatal(err)
	}
	stream, err := dev.NewStream(cuda.StreamOptions{})
	if err != nil {
		log.Fatal(err)
	}
	defer stream.Close()

	const outOfMemory cuda.Code = 2 // CUDA_ERROR_OUT_OF_MEMORY
	machine.Inject(sim.Fault{Call: "cuMemHostAlloc", Result: outOfMemory})
	machine.OnCall(func(call string) { fmt.Println(call) })
	_, err = dev.NewHostBuffer(4)
	machine.OnCall(nil)
	fmt.Println(errors.Is(err, cuda.ErrOutOfMemory))
	// Output:
	// cuMemHostAlloc
	// true
}
