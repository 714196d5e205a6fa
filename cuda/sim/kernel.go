package sim

import (
	"fmt"
	"sync"
	"sync/atomic"
	"time"
	"unsafe"

	"github.com/cuvmm/cuvmm/internal/driver"
)

// Kernel is one launch of a kernel, as the Go function that stands for it sees
// it. The function does the whole grid's work. It must touch device memory only
// through this package (Load, Store and the word methods), which checks every
// access as the device does: a bad one ends the function and destroys the
// context. A panic of its own, and the end of its goroutine (the FailNow of a
// test), do so too.
type Kernel struct {
	// Name is the entry's name.
	Name string
	// Grid and Block are the launch's dimensions: x, y, z.
	Grid, Block [3]int
	// SharedBytes is the dynamic shared memory of each block.
	SharedBytes int

	m       *Machine
	at      site
	entry   entry
	globals map[string]*backing
	params  []byte
}

var twins sync.Map // entry name to func(*Kernel)

// RegisterKernel makes f stand for the PTX entry of that name on all machines. f
// reads the launch's arguments with [Param], by the type that the PTX declares, and
// device memory with [Load] and [Store]:
//
//	sim.RegisterKernel("double", func(k *sim.Kernel) {
//		p, n := sim.Param[uint64](k, 0), sim.Param[uint32](k, 1)
//		v := sim.Load[float32](k, p, int(n))
//		for i := range v {
//			v[i] *= 2
//		}
//		sim.Store(k, p, v)
//	})
//
// Call it from an init function. A second registration of a name panics.
func RegisterKernel(name string, f func(k *Kernel)) {
	if f == nil {
		panic(fmt.Sprintf("sim: RegisterKernel(%q) without a function", name))
	}
	if _, taken := twins.LoadOrStore(name, f); taken {
		panic(fmt.Sprintf("sim: RegisterKernel(%q) for the second time", name))
	}
}

func kernelTwin(name string) func(*Kernel) {
	f, _ := twins.Load(name)
	twin, _ := f.(func(*Kernel))
	return twin
}

// Param is the launch's i-th parameter. T must be as large as the PTX declares
// it.
func Param[T any](k *Kernel, i int) T {
	var v T
	if i < 0 || i >= len(k.entry.params) || k.entry.params[i].size != uint64(unsafe.Sizeof(v)) {
		panic(fmt.Sprintf("parameter %d of type %T is not what the PTX of %s declares: %+v", i, v, k.Name, k.entry.params))
	}
	p := k.entry.params[i]
	copy(bytesOf(&v, 1), k.params[p.offset:][:p.size])
	return v
}

// Load reads n values of type T, which must hold no pointers, at a device
// address that is aligned for them.
func Load[T any](k *Kernel, p uint64, n int) []T {
	v := make([]T, n)
	k.copy(p, bytesOf(unsafe.SliceData(v), n), unsafe.Alignof(*new(T)), false)
	return v
}

// Store writes values, whose type must hold no pointers, to a device address that
// is aligned for them.
func Store[T any](k *Kernel, p uint64, v []T) {
	k.copy(p, bytesOf(unsafe.SliceData(v), len(v)), unsafe.Alignof(*new(T)), true)
}

func (k *Kernel) aligned(p uint64, to uintptr) {
	if p%uint64(to) != 0 {
		panic(stop{&fault{driver.MisalignedAddress, fmt.Sprintf("kernel %s: the address %#x is not aligned to %d bytes", k.Name, p, to)}})
	}
}

func bytesOf[T any](p *T, n int) []byte {
	return unsafe.Slice((*byte)(unsafe.Pointer(p)), uintptr(n)*unsafe.Sizeof(*p))
}

func (k *Kernel) copy(p uint64, b []byte, align uintptr, write bool) {
	if len(b) == 0 {
		return
	}
	k.aligned(p, align)
	need := driver.AccessRead
	if write {
		need = driver.AccessReadWrite
	}
	k.check()
	at := k.found(k.m.pin(k.at, driver.CallLaunchKernel, place{addr: p}, uint64(len(b)), need))
	defer at.release()
	if write {
		copyRuns(at.runs, [][]byte{b})
	} else {
		copyRuns([][]byte{b}, at.runs)
	}
}

// stop ends a kernel's function. A nil fault means that the machine was closed,
// or that the context was lost to another fault.
type stop struct{ fault *fault }

// found ends the kernel if what it touches is not memory that it may touch.
func (k *Kernel) found(at *pins, f *fault) *pins {
	if f != nil {
		f.text = "kernel " + k.Name + ": " + f.text
		panic(stop{f})
	}
	return at
}

// check ends the kernel if the machine was closed or the context was lost, so that a kernel
// that polls memory does not outlive them.
func (k *Kernel) check() {
	k.m.mu.Lock()
	defer k.m.mu.Unlock()
	if k.m.closed || k.at.lost != driver.Success {
		panic(stop{})
	}
}

// word gives a function an aligned 64-bit word of device memory.
func (k *Kernel) word(p uint64, need driver.AccessFlags, use func(w *atomicWord)) {
	k.atomically(p, wordSize, need, func(b []byte) { use(word(b)) })
}

// atomically gives a function a word of device memory that is aligned to its size.
func (k *Kernel) atomically(p, size uint64, need driver.AccessFlags, use func(b []byte)) {
	k.aligned(p, uintptr(size))
	k.check()
	at := k.found(k.m.pinWord(k.at, driver.CallLaunchKernel, p, size, need))
	defer at.release()
	use(at.runs[0])
	k.at.acquire()
}

// LoadWord reads the 64-bit word at p atomically.
func (k *Kernel) LoadWord(p uint64) (v uint64) {
	k.word(p, driver.AccessRead, func(w *atomicWord) { v = w.Load() })
	return v
}

// LoadWord32 reads the 32-bit word at p atomically.
func (k *Kernel) LoadWord32(p uint64) (v uint32) {
	k.atomically(p, 4, driver.AccessRead, func(b []byte) {
		v = (*atomic.Uint32)(unsafe.Pointer(unsafe.SliceData(b))).Load()
	})
	return v
}

// StoreWord writes the 64-bit word at p atomically.
func (k *Kernel) StoreWord(p, v uint64) {
	k.word(p, driver.AccessReadWrite, func(w *atomicWord) { w.Store(v) })
}

// AddWord adds to the 64-bit word at p atomically, and returns the sum.
func (k *Kernel) AddWord(p, delta uint64) (sum uint64) {
	k.word(p, driver.AccessReadWrite, func(w *atomicWord) { sum = w.Add(delta) })
	return sum
}

// Sleep lets the kernel run for so long, or until the machine is closed or the
// context is lost.
func (k *Kernel) Sleep(d time.Duration) {
	for end := time.Now().Add(d); ; {
		k.check()
		left := time.Until(end)
		if left <= 0 {
			return
		}
		time.Sleep(min(left, 10*time.Millisecond))
	}
}

// run calls the twin and turns the way it ended into a fault. The twin has a goroutine of
// its own, which it may end, as a test's FailNow does.
func (k *Kernel) run(twin func(*Kernel)) *fault {
	ended := make(chan *fault)
	go func() {
		f := &fault{driver.LaunchFailed, fmt.Sprintf("kernel %s: its Go function ended its goroutine: it must return, and report to a test with Errorf alone", k.Name)}
		defer func() {
			switch p := recover().(type) {
			case nil:
			case stop:
				f = p.fault
			default:
				f = &fault{driver.LaunchFailed, fmt.Sprintf("kernel %s: its Go function panicked: %v", k.Name, p)}
			}
			ended <- f
		}()
		twin(k)
		f = nil
	}()
	return <-ended
}

// The limits of a launch, as on the device on which the driver was measured.
const (
	maxGridX        = 1<<31 - 1
	maxGridYZ       = 1<<16 - 1
	maxBlockXY      = 1024
	maxBlockZ       = 64
	maxBlockThreads = 1024
	maxSharedBytes  = 48 << 10 // static and dynamic, of a kernel that was allowed no more
)

func launchable(l driver.LaunchConfig) bool {
	within := func(v, limit uint32) bool { return v > 0 && v <= limit }
	return within(l.GridX, maxGridX) && within(l.GridY, maxGridYZ) && within(l.GridZ, maxGridYZ) &&
		within(l.BlockX, maxBlockXY) && within(l.BlockY, maxBlockXY) && within(l.BlockZ, maxBlockZ) &&
		uint64(l.BlockX)*uint64(l.BlockY)*uint64(l.BlockZ) <= maxBlockThreads
}

// LaunchKernel reads the parameters before it returns. The kernel runs in a
// goroutine of its own, so it may take any time and wait for others.
func (a *api) LaunchKernel(c driver.Context, h driver.Function, l driver.LaunchConfig, params []byte, sh driver.Stream) driver.Result {
	return a.launch(driver.CallLaunchKernel, c, h, l, params, sh)
}

// LaunchKernelEx refuses more blocks than run at once. The function that stands
// for the kernel does the whole grid's work, so it waits for no blocks.
func (a *api) LaunchKernelEx(c driver.Context, h driver.Function, l driver.LaunchConfig, params []byte, sh driver.Stream) driver.Result {
	return a.launch(driver.CallLaunchKernelEx, c, h, l, params, sh)
}

func (a *api) launch(call driver.Call, c driver.Context, h driver.Function, l driver.LaunchConfig, params []byte, sh driver.Stream) driver.Result {
	s, r := a.enterStream(call, c, sh)
	if r != driver.Success {
		return r
	}
	defer a.leave()
	f := a.m.functions[h]
	switch {
	case f == nil || f.module.context != s.context:
		return driver.InvalidHandle
	case !launchable(l) || uint64(l.SharedBytes) > f.dynamic || uint64(len(params)) < f.entry.size:
		return driver.InvalidValue
	case call == driver.CallLaunchKernelEx && uint64(l.GridX)*uint64(l.GridY)*uint64(l.GridZ) > f.atOnce(l):
		return driver.CooperativeTooLarge
	}
	k := Kernel{
		Name: f.entry.name, Grid: [3]int{int(l.GridX), int(l.GridY), int(l.GridZ)},
		Block: [3]int{int(l.BlockX), int(l.BlockY), int(l.BlockZ)}, SharedBytes: int(l.SharedBytes),
		m: a.m, entry: f.entry, globals: f.module.globals, params: append([]byte(nil), params...),
	}
	twin := kernelTwin(f.entry.name)
	_, r = s.submit(task{long: true, kernels: []*function{f}, run: func(at site) *fault {
		launch := k // each launch of a graph has its own
		launch.at, launch.at.kernel = at, k.Name
		return launch.run(twin)
	}})
	return r
}
