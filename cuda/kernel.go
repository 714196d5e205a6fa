package cuda

import (
	"fmt"
	"sync"

	"github.com/cuvmm/cuvmm/internal/driver"
	"github.com/cuvmm/cuvmm/internal/errs"
)

// Kernel is a function that runs on the GPU. It belongs to its module.
type Kernel struct {
	module   *Module
	name     string
	function driver.Function
	declared []parameter // see Module.parameters
	known    bool        // whether the driver listed them
	shared   sharedMemory
}

// parameter is where a parameter lies in the block of parameters, in bytes.
type parameter struct{ off, size int }

// Launch is the shape of a kernel launch.
type Launch struct {
	// Grid is the number of blocks, and Block the number of threads in each,
	// in x, y and z. Dimensions that are not used are 1; none is 0.
	Grid, Block [3]int
	// SharedBytes is the dynamic shared memory of each block, at most
	// Kernel.MaxShared.
	SharedBytes int
	// Cooperative launches run all blocks at once, so that they can wait for each
	// other. The grid has at most Kernel.BlocksAtOnce blocks, and kernels of other
	// streams delay it. It needs CUDA 11.8, and CUDA 12.4 on a capturing stream: on
	// that it is ErrCapturing with an older driver, and for a kernel with more than 256
	// parameters or whose parameters the driver does not list. The capture goes on.
	Cooperative bool
}

// blockThreads is how many threads Threads puts into a block: enough to hide
// memory latency, few enough for every kernel to fit.
const blockThreads = 256

// Threads returns a one-dimensional launch of at least n threads, in blocks of 256. If
// n is not positive, or more than a grid has (some 550 billion), Launch refuses it.
func Threads(n int) Launch {
	blocks := n / blockThreads
	if n%blockThreads > 0 {
		blocks++
	}
	return Launch{Grid: [3]int{blocks, 1, 1}, Block: [3]int{blockThreads, 1, 1}}
}

// Name returns the name of the kernel's entry.
func (k *Kernel) Name() string { return k.name }

// Module returns the module that the kernel belongs to.
func (k *Kernel) Module() *Module { return k.module }

// inner returns the kernel, or an error for one that no function made.
func (k *Kernel) inner(op string) (*Kernel, error) {
	if k == nil || k.module == nil {
		return nil, errs.Invalid(op, "a nil kernel", "take one from Module.Kernel")
	}
	return k, nil
}

// acquire starts an operation on the kernel's module; the caller calls its
// closer.Release.
func (k *Kernel) acquire(op string) (*Module, error) {
	if _, err := k.inner(op); err != nil {
		return nil, err
	}
	return k.module, k.module.acquire(op)
}

// Launch puts a run of the kernel on the stream, which must be of the context
// that the module was loaded into. It returns at once; what goes wrong while
// the kernel runs is the error of a later operation. While the stream captures
// a graph, the launch becomes a part of it.
//
// The arguments are the kernel's parameters, in order: booleans (of one byte),
// int8 to int64, uint8 to uint64, float32, float64, [Ptr] for addresses, types
// based on those, and arrays and structs of them. Each takes the size and the
// alignment that it has in Go, which are C's. If the driver lists the kernel's
// parameters, another number of arguments and arguments of another size are
// ErrInvalidArgument. Drivers before CUDA 12.4 list none, and later ones may list none
// for a kernel of a cubin or a fat binary; then the arguments are the caller's
// responsibility: a uint32 for a 64-bit parameter shifts all that follow.
//
// An int or a uint becomes an integer of the size that the kernel declares in its
// place, 1, 2, 4 or 8 bytes, if that holds its value, as a signed number or as an
// unsigned one. Otherwise, and if the driver lists no parameters, it is
// ErrInvalidArgument. Inside of arrays and structs they are refused, and so are
// uintptr, which has no counterpart in C, and values that refer to Go memory. CUDA's
// vector and complex types are aligned more strictly than any Go type. If the driver
// lists the parameters, an array or a struct of their elements goes where the kernel
// declares it; otherwise have the kernel take their elements instead.
//
// Nothing keeps the memory behind an address alive while the kernel runs: close
// it with CloseAfter and this stream, or with Close. A Ptr into suspended memory is refused
// with ErrSuspended, also in an array or a struct; other integers, and addresses that lie in
// the GPU's memory, are not checked.
func (k *Kernel) Launch(s *Stream, l Launch, args ...any) error {
	const op = "cuda.Kernel.Launch"
	if _, err := k.inner(op); err != nil {
		return err
	}
	config, err := l.config(op)
	if err != nil {
		return err
	}
	p := parameterBlocks.Get().(*parameters)
	defer parameterBlocks.Put(p)
	p.block = p.block[:0]
	if err := k.pack(op, p, args); err != nil {
		return err
	}
	if err := s.use(op); err != nil {
		return err
	}
	defer s.in.Release()
	m := k.module
	if err := m.use(op, s); err != nil {
		return err
	}
	defer m.closer.Release()
	if err := k.allow(op, l.SharedBytes); err != nil {
		return err
	}
	if err := s.checkArguments(op, args); err != nil {
		return err
	}
	if !l.Cooperative {
		r := s.sys().Drv.LaunchKernel(m.ctx.Handle, k.function, config, p.block, s.in.Handle)
		return k.launched(op, driver.CallLaunchKernel, r, s, l, len(p.block))
	}
	if err := k.cooperates(op); err != nil {
		return err
	}
	launch := func() error {
		r := s.sys().Drv.LaunchKernelEx(m.ctx.Handle, k.function, config, p.block, s.in.Handle)
		return k.launched(op, driver.CallLaunchKernelEx, r, s, l, len(p.block))
	}
	if !k.known || len(k.declared) > mostListed {
		return s.in.Uncaptured(op, launch) // it would end the capture
	}
	return launch()
}

// launched returns the error of a launch with so many bytes of arguments.
func (k *Kernel) launched(op string, call driver.Call, r driver.Result, s *Stream, l Launch, bytes int) error {
	if r == driver.Success {
		return nil
	}
	return k.module.ctx.CallError(op, call, r, fmt.Sprintf("kernel %q with %s of arguments, grid %v of blocks %v, on stream %#x of %v",
		k.name, errs.Count(bytes, "byte"), l.Grid, l.Block, s.handle(), s.dev))
}

// use holds the module for a launch on the stream; the caller calls Release.
func (m *Module) use(op string, s *Stream) error {
	if m.ctx.System() != s.sys() {
		return errs.ForeignError(op, "stream")
	}
	if m.ctx != s.in.Ctx {
		return errs.Invalid(op, fmt.Sprintf("a stream of %v, context %#x, for a module in context %#x of %v",
			s.dev, uintptr(s.in.Ctx.Handle), uintptr(m.ctx.Handle), m.dev),
			"load the module with the Device that the stream was made with")
	}
	return m.acquire(op)
}

// The limits of a launch are the same on every GPU that CUDA has supported
// since 2012.
var (
	gridLimit  = [3]int{1<<31 - 1, 1<<16 - 1, 1<<16 - 1}
	blockLimit = [3]int{1024, 1024, 64}
)

const threadLimit = 1024

func gridHint(n int, axis string, limit int) string {
	switch {
	case n < 1:
		return fmt.Sprintf("the %s dimension is 1 to %d; where there is nothing to do, launch nothing, and a dimension that is not used is 1", axis, limit)
	default:
		return fmt.Sprintf("the %s dimension is 1 to %d: let each thread do several elements, or launch several times", axis, limit)
	}
}

// config is the launch in the driver's form.
func (l Launch) config(op string) (driver.LaunchConfig, error) {
	for i, axis := range []string{"x", "y", "z"} {
		if n, limit := l.Grid[i], gridLimit[i]; n < 1 || n > limit {
			return driver.LaunchConfig{}, errs.Invalid(op, fmt.Sprintf("a grid of %v blocks", l.Grid), gridHint(n, axis, limit))
		}
		if n, limit := l.Block[i], blockLimit[i]; n < 1 || n > limit {
			return driver.LaunchConfig{}, errs.Invalid(op, fmt.Sprintf("blocks of %v threads", l.Block),
				fmt.Sprintf("the %s dimension is 1 to %d; one that is not used is 1", axis, limit))
		}
	}
	if n := l.Block[0] * l.Block[1] * l.Block[2]; n > threadLimit {
		return driver.LaunchConfig{}, errs.Invalid(op, fmt.Sprintf("blocks of %v, %d threads", l.Block, n),
			fmt.Sprintf("a block has at most %d threads: use more blocks", threadLimit))
	}
	if l.SharedBytes < 0 {
		return driver.LaunchConfig{}, errs.Invalid(op, fmt.Sprintf("%d bytes of shared memory", l.SharedBytes), "ask for 0 or more")
	}
	return driver.LaunchConfig{
		GridX: uint32(l.Grid[0]), GridY: uint32(l.Grid[1]), GridZ: uint32(l.Grid[2]),
		BlockX: uint32(l.Block[0]), BlockY: uint32(l.Block[1]), BlockZ: uint32(l.Block[2]),
		SharedBytes: uint32(l.SharedBytes),
	}, nil
}

// mostListed is how many parameters csrc passes to the driver as a list, without which a
// cooperative launch ends a capture.
const mostListed = 256

// maxParameters is the most that any GPU and driver take, in bytes; older ones
// take 4096, and say so themselves.
const maxParameters = 32764

// parameters is a block of parameters being packed. It is kept for reuse, since
// what goes to the driver would otherwise be allocated for each launch.
type parameters struct{ block []byte }

var parameterBlocks = sync.Pool{New: func() any { return &parameters{make([]byte, 0, 256)} }}
