package capturetest

import (
	"fmt"
	"reflect"
	"testing"

	"github.com/cuvmm/cuvmm/cuda"
	"github.com/cuvmm/cuvmm/cuda/sim"
	"github.com/cuvmm/cuvmm/internal/core"
	"github.com/cuvmm/cuvmm/internal/driver"
	"github.com/cuvmm/cuvmm/internal/test/gputest"
	"github.com/cuvmm/cuvmm/vmm"
	"github.com/stretchr/testify/require"
)

const mib = 1 << 20

// world is where one call happens. Its objects are closed when the test ends.
type world struct {
	testing.TB
	place
}

// place is a device to test on.
type place struct {
	dev *cuda.Device
	// folder is that of the software machine, for a process of its own to open. It is
	// empty for the real driver, and where processes share no machine.
	folder string
}

type closer interface{ Close() error }

func (w *world) closed(c closer) {
	w.Cleanup(func() { require.NoError(w, c.Close()) })
}

// must is for what a case needs before its call.
func must[T any](w *world) func(v T, err error) T {
	return func(v T, err error) T {
		w.Helper()
		require.NoError(w, err)
		return v
	}
}

// made keeps what is made before a call.
func made[C closer](w *world) func(c C, err error) C {
	return func(c C, err error) C {
		w.Helper()
		require.NoError(w, err)
		w.closed(c)
		return c
	}
}

// keep keeps what a call makes.
func keep[C closer](w *world) func(c C, err error) error {
	return func(c C, err error) error {
		if err == nil {
			w.closed(c)
		}
		return err
	}
}

// another is the device in a System of its own, round the same driver, which
// has done nothing yet.
func (w *world) another() *cuda.Device {
	sys := made[*cuda.System](w)(gputest.Wrap(core.SystemOf(w.dev.System()).Drv, nil))
	return sys.Devices()[w.dev.Ordinal()]
}

func (w *world) stream() *cuda.Stream {
	return made[*cuda.Stream](w)(w.dev.NewStream(cuda.StreamOptions{}))
}

func (w *world) event() *cuda.Event {
	return made[*cuda.Event](w)(w.dev.NewEvent(cuda.EventOptions{Timing: true}))
}

// recorded is an event behind some work.
func (w *world) recorded(s *cuda.Stream) *cuda.Event {
	e := w.event()
	require.NoError(w, s.Memset(w.memory(64), 1, 64))
	require.NoError(w, e.Record(s))
	return e
}

func (w *world) host(n int) *cuda.HostBuffer {
	return made[*cuda.HostBuffer](w)(w.dev.NewHostBuffer(n))
}

func (w *world) graph() *cuda.Graph {
	s, p := w.stream(), w.memory(64)
	return made[*cuda.Graph](w)(s.WithCapture(cuda.CaptureOptions{}, func() error { return s.Upload(p, []byte{1}) }))
}

const (
	emptyKernel   = "cuvmm_capturetest_nothing"
	emptyVariable = "cuvmm_capturetest_variable"
)

const emptyText = `.version 6.0
.target sm_50
.address_size 64
.visible .global .align 4 .u32 ` + emptyVariable + `;
.visible .entry ` + emptyKernel + `()
{
	ret;
}
`

func init() { sim.RegisterKernel(emptyKernel, func(*sim.Kernel) {}) }

func (w *world) module() *cuda.Module {
	return made[*cuda.Module](w)(w.dev.LoadModule([]byte(emptyText)))
}

func (w *world) kernel() *cuda.Kernel {
	return must[*cuda.Kernel](w)(w.module().Kernel(emptyKernel))
}

// memory is device memory that is no buffer's.
func (w *world) memory(n int) cuda.Ptr {
	c, err := core.ContextOf("test", w.dev)
	require.NoError(w, err)
	drv := c.System().Drv
	p, r := drv.MemAlloc(c.Handle, uint64(n))
	require.Equal(w, driver.Success, r)
	w.Cleanup(func() { require.Equal(w, driver.Success, drv.MemFree(c.Handle, p)) })
	return cuda.Ptr(p)
}

// buffer has 4 MiB in use and a chunk behind them that is not.
func (w *world) buffer() *vmm.Buffer {
	b := made[*vmm.Buffer](w)(vmm.NewBuffer(w.dev, vmm.BufferOptions{Reserve: 64 * mib, Chunks: vmm.FixedChunks(2 * mib)}))
	require.NoError(w, gputest.Err(b.AppendUndefined(6*mib)))
	require.NoError(w, b.Resize(nil, 4*mib))
	return b
}

// array is a buffer of the same kind.
func (w *world) array() *vmm.Array[int32] {
	return must[*vmm.Array[int32]](w)(vmm.ArrayOf[int32](w.buffer()))
}

// slice is 100 elements.
func (w *world) slice() vmm.Slice[int32] { return must[vmm.Slice[int32]](w)(w.array().Slice(0, 100)) }

func (w *world) allocation() *vmm.Allocation {
	return made[*vmm.Allocation](w)(vmm.Create(w.dev, 2*mib, vmm.Properties{}))
}

func (w *world) reservation() *vmm.Reservation {
	return made[*vmm.Reservation](w)(vmm.Reserve(w.dev, 8*mib, vmm.ReserveOptions{}))
}

// mapping is the first of a reservation, with access.
func (w *world) mapping(r *vmm.Reservation) *vmm.Mapping {
	m := made[*vmm.Mapping](w)(r.Map(0, w.allocation()))
	require.NoError(w, m.SetAccess(w.access(vmm.ReadWrite)))
	return m
}

func (w *world) access(m vmm.AccessMode) vmm.Access {
	return vmm.Access{Location: w.dev.Location(), Mode: m}
}

// nothing is for functions that compute.
func nothing(f func() any) operation {
	return func(*world) func() error { return func() error { f(); return nil } }
}

// plain are methods without parameters on one kind of object: where the last
// result is an error, it must be nil.
func plain[T any](object string, of func(w *world) T, methods ...string) table {
	t := table{}
	for _, m := range methods {
		t[object+"."+m] = func(w *world) func() error {
			f := reflect.ValueOf(of(w)).MethodByName(m)
			require.True(w, f.IsValid(), "there is no method %s", m)
			require.Zero(w, f.Type().NumIn(), "%s has parameters", m)
			return func() error {
				out := f.Call(nil)
				if len(out) == 0 {
					return nil
				}
				err, _ := out[len(out)-1].Interface().(error)
				return err
			}
		}
	}
	return t
}

// join makes one table of several.
func join(tables ...table) table {
	all := table{}
	for _, t := range tables {
		for name, o := range t {
			if all[name] != nil {
				panic(fmt.Sprintf("two cases for %s", name))
			}
			all[name] = o
		}
	}
	return all
}
