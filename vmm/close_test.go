package vmm_test

import (
	"bytes"
	"context"
	"fmt"
	"io"
	"os"
	"reflect"
	"runtime"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/cuvmm/cuvmm/csrc/kernels"
	"github.com/cuvmm/cuvmm/cuda"
	"github.com/cuvmm/cuvmm/cuda/sim"
	"github.com/cuvmm/cuvmm/internal/test/gputest"
	"github.com/cuvmm/cuvmm/vmm"
	"github.com/stretchr/testify/require"
)

// dependants are the rows of docs/closing.md: what Close does while
// others depend on the object.
var dependants = []struct {
	object, on string
	test       func(t *testing.T, w *world)
}{
	{"Allocation", "mapped", func(t *testing.T, w *world) {
		w.mappings(0)
		require.NoError(t, w.create(kib64, vmm.Properties{}))
		m, err := w.r.Map(0, w.a)
		require.NoError(t, err)
		w.own(m)
		require.NoError(t, m.SetAccess(both(w, vmm.NoAccess)...))
		require.NoError(t, w.s.Memset(m.Ptr(), 7, kib64))
		require.NoError(t, w.a.Close())
		require.NoError(t, w.s.Synchronize())
		got, err := w.m.Bytes(m.Ptr(), kib64)
		require.NoError(t, err)
		require.Equal(t, bytes.Repeat([]byte{7}, kib64), got, "the memory lives")
		require.Equal(t, 1, w.sys.Stats().Allocations)
		require.NoError(t, m.Close())
		require.Zero(t, w.sys.Stats().Allocations, "until its last mapping goes")
	}},
	{"Reservation", "has mappings", func(t *testing.T, w *world) {
		w.mappings(2)
		err := w.r.Close()
		require.ErrorIs(t, err, cuda.ErrInUse)
		require.ErrorContains(t, err, fmt.Sprintf("2 mappings, the first 64 KiB at %#x", uint64(w.r.Ptr())))
		require.NoError(t, w.create(kib64, vmm.Properties{}))
		m, err := w.r.Map(4*kib64, w.a)
		require.NoError(t, err, "it stays open")
		w.own(m)
		// A mapping that is closing goes with the range, after the GPU's work on it.
		w.m.Hold(w.s.Handle())
		require.NoError(t, m.SetAccess(both(w, vmm.NoAccess)...))
		require.NoError(t, w.s.Memset(m.Ptr(), 1, 1))
		require.NoError(t, m.CloseAfter(w.s))
		require.NoError(t, w.maps[0].Close())
		require.ErrorIs(t, w.r.Close(), cuda.ErrInUse, "one is open")
		require.NoError(t, w.maps[1].Close())
		closing := make(chan error, 1)
		go func() { closing <- w.r.Close() }()
		require.Never(t, func() bool { return len(closing) > 0 }, 10*time.Millisecond, time.Millisecond)
		w.m.Release(w.s.Handle())
		require.NoError(t, <-closing)
		require.NoError(t, w.drain())
	}},
	{"Mapping", "GPU work uses it", func(t *testing.T, w *world) {
		w.mappings(1, both(w, vmm.ReadWrite)...)
		waits(t, w, w.far, w.maps[0].Ptr(), w.maps[0])
	}},
	{"Buffer, Array", "GPU work uses it", func(t *testing.T, w *world) {
		waits(t, w, w.far, w.buffer(2, both(w, vmm.ReadWrite)...).Ptr(), w.b)
		a, err := vmm.ArrayOf[uint32](w.buffer(2))
		require.NoError(t, err)
		waits(t, w, w.s, a.Ptr(), a)
	}},
	{"Buffer", "a buffer made by `Move` or `Fork` shares its memory", func(t *testing.T, w *world) {
		for name, share := range map[string]func(old *vmm.Buffer) (*vmm.Buffer, error){
			"Move": func(old *vmm.Buffer) (*vmm.Buffer, error) { return old.Move(vmm.MoveOptions{Reserve: 32 * kib64}) },
			"Fork": func(old *vmm.Buffer) (*vmm.Buffer, error) { return old.Fork(nil, old.Len(), vmm.ForkOptions{}) },
		} {
			old := w.buffer(3)
			other, err := share(old)
			require.NoError(t, err, name)
			w.own(other)
			require.NoError(t, old.Close(), name)
			got, err := io.ReadAll(vmm.NewReader(other))
			require.NoError(t, err)
			require.True(t, bytes.Equal(pattern(3*kib64-100, 1), got), name)
			require.Equal(t, 3, w.sys.Stats().Allocations, name)
			require.NoError(t, other.Close())
			require.Zero(t, w.sys.Stats().Allocations, name)
		}
	}},
	{"Mapping, Buffer, Array", "a function looks at it (`Host`)", func(t *testing.T, w *world) {
		all := hostBuffer(w, 2*mib)
		require.NoError(t, all.Host(func(data []byte) error {
			require.ErrorIs(t, w.b.Close(), cuda.ErrInUse)
			require.NoError(t, gputest.Err(w.b.Append(nil, []byte{1})), "it stays open")
			data[0]++
			return nil
		}))
		require.NoError(t, w.b.Close())
	}},
	{"Sparse", "GPU work uses it", func(t *testing.T, w *world) {
		w.sparse(2, both(w, vmm.ReadWrite)...)
		waits(t, w, w.far, w.ranges[0].Ptr(), w.ranges[0])
		require.Equal(t, 2, w.pages.Stats().Pages)
	}},
	{"Sparse", "another range shares its pages", func(t *testing.T, w *world) {
		a, b := w.sparse(2), w.sparse(0)
		require.NoError(t, b.Share(w.ctx(), a, 0, vmm.Span{First: 0, N: 2}))
		require.NoError(t, w.s.Memset(a.Ptr(), 7, 100))
		require.NoError(t, a.Close())
		got, err := w.m.Bytes(b.Ptr(), 100)
		require.NoError(t, err)
		require.Equal(t, bytes.Repeat([]byte{7}, 100), got, "the pages live")
		require.Equal(t, 2, w.pages.Stats().Used)
		require.NoError(t, b.Close())
		require.Zero(t, w.pages.Stats().Used)
	}},
	{"Pages", "a Sparse uses it", func(t *testing.T, w *world) {
		w.sparse(2)
		require.ErrorIs(t, w.pages.Close(), cuda.ErrInUse)
		require.NoError(t, w.ranges[0].Map(w.ctx(), nil, vmm.Span{First: 4, N: 1}), "it stays open")
		require.NoError(t, w.ranges[0].CloseAfter(w.s))
		require.NoError(t, w.drain())
		require.NoError(t, w.pages.Close())
		require.Zero(t, w.sys.Stats().Allocations)
	}},
	{"Slice", "", func(t *testing.T, w *world) {
		b := w.buffer(2)
		w.part(kib64, 100)
		require.NoError(t, b.Resize(nil, kib64+50))
		require.ErrorIs(t, w.slice.Zero(nil), cuda.ErrOutOfRange)
		require.NoError(t, b.Close())
		require.ErrorIs(t, w.slice.Zero(nil), cuda.ErrClosed)
	}},
	{"HostBuffer", "GPU work uses it", func(t *testing.T, w *world) {
		b := w.buffer(1)
		w.pinned(100)
		w.m.Hold(w.s.Handle())
		require.NoError(t, gputest.Err(b.AppendHost(w.s, w.host.All())))
		was := &w.host.Bytes()[0]
		waitsFor(t, w, w.s, w.host)
		again, err := w.d.NewHostBuffer(100)
		require.NoError(t, err)
		require.Same(t, was, &again.Bytes()[0], "the memory goes back to the pool")
		w.own(again)
	}},
	{"Graph", "a launch of it runs", func(t *testing.T, w *world) {
		b := w.buffer(1)
		g, err := w.s.WithCapture(cuda.CaptureOptions{}, func() error { return w.s.Memset(b.Ptr(), 1, 100) })
		require.NoError(t, err)
		w.m.Hold(w.s.Handle())
		require.NoError(t, g.Launch(w.s))
		waitsFor(t, w, w.s, g)
	}},
	{"Module", "its kernels run", func(t *testing.T, w *world) {
		b := w.buffer(1)
		mod, err := w.d.LoadModule(kernels.Basic)
		require.NoError(t, err)
		k, err := mod.Kernel(kernels.Fill)
		require.NoError(t, err)
		w.m.Hold(w.s.Handle())
		require.NoError(t, k.Launch(w.s, cuda.Threads(10), b.Ptr(), uint64(10), uint32(1), uint32(0)))
		waitsFor(t, w, w.s, mod)
	}},
	{"Stream", "captures a graph", func(t *testing.T, w *world) {
		g, err := w.s.WithCapture(cuda.CaptureOptions{}, func() error {
			require.ErrorIs(t, w.s.Close(), cuda.ErrCapturing)
			return nil
		})
		require.NoError(t, err, "the capture lives")
		require.NoError(t, g.Close())
		require.NoError(t, w.s.Synchronize(), "it stays open")
	}},
	{"Stream", "callbacks are to be called", func(t *testing.T, w *world) {
		s, err := w.d.NewStream(cuda.StreamOptions{})
		require.NoError(t, err)
		began, goOn, called := make(chan struct{}), make(chan struct{}), 0
		require.NoError(t, s.Callback(func(error) { close(began); <-goOn; called++ }))
		require.NoError(t, s.Callback(func(error) { called++ }))
		<-began
		require.NoError(t, s.Close())
		close(goOn)
		require.NoError(t, w.drain())
		require.Equal(t, 2, called)
	}},
	{"Event", "a stream waits for it", func(t *testing.T, w *world) {
		b := w.buffer(1)
		other, err := w.d.NewStream(cuda.StreamOptions{})
		require.NoError(t, err)
		w.own(other)
		e, err := w.d.NewEvent(cuda.EventOptions{})
		require.NoError(t, err)
		w.m.Hold(w.s.Handle())
		require.NoError(t, w.s.Memset(b.Ptr(), 1, 100))
		require.NoError(t, e.Record(w.s))
		require.NoError(t, other.Wait(e))
		require.NoError(t, other.Memset(b.Ptr(), 2, 100))
		require.NoError(t, e.Close())
		time.Sleep(5 * time.Millisecond)
		done, err := other.Done()
		require.NoError(t, err)
		require.False(t, done, "the wait stays")
		w.m.Release(w.s.Handle())
		require.NoError(t, other.Synchronize())
		got, err := w.m.Bytes(b.Ptr(), 100)
		require.NoError(t, err)
		require.Equal(t, bytes.Repeat([]byte{2}, 100), got)
	}},
	{"Mapping, Buffer, Array", "it is suspended", func(t *testing.T, w *world) {
		w.family()
		require.NoError(t, w.suspendFamily(vmm.SuspendOptions{}))
		calls := w.m.Count("cuMemUnmap")
		for _, m := range w.maps {
			require.NoError(t, m.Close())
		}
		require.NoError(t, w.buffers[0].CloseAfter(w.s))
		require.NoError(t, w.drain())
		require.Zero(t, w.buffers[1].Stats().Shared, "the other's count is gone")
		host := func() (n int) {
			for _, o := range w.sys.Live() {
				if strings.HasPrefix(o, "host backing") {
					n++
				}
			}
			return n
		}
		require.Equal(t, 1, host(), "what the mapping needed went, and the other buffer needs the rest")
		require.NoError(t, w.buffers[1].Close())
		require.Equal(t, calls, w.m.Count("cuMemUnmap"), "nothing was mapped")
		require.Zero(t, host())
		require.Zero(t, w.sys.Stats().Suspended)
		require.NoError(t, w.sleep.Resume(w.ctx()), "it is over")
	}},
	{"Sparse", "it is suspended", func(t *testing.T, w *world) {
		w.sparse(3)
		r := w.ranges[0]
		s, err := vmm.Suspend(w.ctx(), vmm.SuspendOptions{}, r)
		require.NoError(t, err)
		require.Equal(t, 3*kib64, s.Report().Given)
		calls := w.m.Count("cuMemUnmap")
		require.NoError(t, r.Close())
		require.Equal(t, calls, w.m.Count("cuMemUnmap"), "nothing was mapped")
		require.Zero(t, w.sys.Stats().Suspended)
		require.Zero(t, w.sys.Stats().KeptBytes)
		require.NoError(t, s.Resume(w.ctx()), "it is over")
	}},
	{"Mapping, Buffer, Array, Sparse", "a Suspension moves its bytes", func(t *testing.T, w *world) {
		w.buffer(1)
		w.sparse(1)
		for _, m := range []interface {
			vmm.Memory
			Close() error
		}{w.b, w.ranges[0]} {
			w.m.Hold(w.far.Handle())
			s, err := vmm.SuspendAfter(vmm.SuspendOptions{}, []*cuda.Stream{w.far}, m)
			require.NoError(t, err)
			closing := make(chan error, 1)
			go func() { closing <- m.Close() }()
			require.Never(t, func() bool { return len(closing) > 0 }, 10*time.Millisecond, time.Millisecond)
			w.m.Release(w.far.Handle())
			require.NoError(t, <-closing)
			require.NoError(t, s.Released().Wait(w.ctx()))
			require.NoError(t, s.Resume(w.ctx()))
		}
	}},
	{"System", "objects live", func(t *testing.T, w *world) {
		w.buffer(1)
		err := w.sys.Close()
		require.ErrorIs(t, err, cuda.ErrInUse)
		for _, kind := range []string{"stream", "reservation of 1 MiB", "buffer of 64 KiB", "allocation of 64 KiB", "mapping of 64 KiB"} {
			require.Contains(t, strings.Join(w.sys.Live(), "\n"), kind)
		}
		require.ErrorContains(t, err, "live objects: stream, ")
		require.NoError(t, gputest.Err(w.b.Append(nil, []byte{1})), "it stays open")
	}},
}

// waits checks that Close waits for work on a stream that was not named.
func waits(t *testing.T, w *world, s *cuda.Stream, p cuda.Ptr, c closer) {
	t.Helper()
	w.m.Hold(s.Handle())
	require.NoError(t, s.Memset(p, 1, 100))
	waitsFor(t, w, s, c)
}

func waitsFor(t *testing.T, w *world, s *cuda.Stream, c closer) {
	t.Helper()
	closing := make(chan error, 1)
	go func() { closing <- c.Close() }()
	select {
	case err := <-closing:
		t.Fatalf("closed under running work: %v", err)
	case <-time.After(10 * time.Millisecond):
	}
	w.m.Release(s.Handle())
	select {
	case err := <-closing:
		require.NoError(t, err)
	case <-time.After(testTimeout):
		t.Fatal("Close hangs")
	}
	require.NoError(t, s.Synchronize(), "the work found its memory")
}

func TestCloseWhileOthersDependOnIt(t *testing.T) {
	for _, row := range dependants {
		t.Run(row.object+" "+row.on, func(t *testing.T) {
			w := newWorld(t, false)
			row.test(t, w)
			w.end()
		})
	}
}

// TestTheTableOfDependantsIsComplete compares the rows above with the document.
func TestTheTableOfDependantsIsComplete(t *testing.T) {
	if runtime.GOOS != "linux" {
		t.Skip("memory is shared, and seen by the CPU, on Linux alone")
	}
	if _, err := os.Stat("close_test.go"); err != nil {
		t.Skip("the repository's sources are not here: this test binary runs away from its checkout")
	}
	text, err := os.ReadFile("../docs/closing.md")
	require.NoError(t, err)
	_, rest, ok := strings.Cut(string(text), "| object | something depends on it | Close |\n| --- | --- | --- |\n")
	require.True(t, ok, "docs/closing.md has no table of dependants")
	table, _, _ := strings.Cut(rest, "\n\n")
	var documented, tested []string
	for _, line := range strings.Split(table, "\n") {
		cells := strings.Split(line, "|")
		object := strings.TrimSpace(cells[1])
		if room, _, _ := strings.Cut(object, " "); slices.Contains([]string{"managed", "multicast", "broker", "Pool"}, room) {
			continue // that room's own tests
		}
		documented = append(documented, object+": "+strings.TrimSpace(cells[2]))
	}
	for _, row := range dependants {
		tested = append(tested, row.object+": "+row.on)
	}
	require.ElementsMatch(t, documented, tested)
}

// permutations calls f with every order of 0 to n-1.
func permutations(n int, f func(order []int)) {
	order := make([]int, n)
	for i := range order {
		order[i] = i
	}
	var permute func(k int)
	permute = func(k int) {
		if k == n {
			f(slices.Clone(order))
			return
		}
		for i := k; i < n; i++ {
			order[k], order[i] = order[i], order[k]
			permute(k + 1)
			order[k], order[i] = order[i], order[k]
		}
	}
	permute(0)
}

func TestCloseInEveryOrder(t *testing.T) {
	permutations(5, func(order []int) {
		w := newWorld(t, false)
		w.mappings(0)
		require.NoError(t, w.create(kib64, vmm.Properties{}))
		m, err := w.r.Map(0, w.a)
		require.NoError(t, err)
		w.own(m)
		old := w.buffer(2)
		moved, err := old.Move(vmm.MoveOptions{Reserve: 32 * kib64})
		require.NoError(t, err)
		w.own(moved)
		objects := []closer{w.a, m, w.r, old, moved}
		for _, i := range order {
			err := objects[i].Close()
			if objects[i] == closer(w.r) && slices.Index(order, 1) > slices.Index(order, 2) {
				require.ErrorIs(t, err, cuda.ErrInUse, "order %v", order)
			} else {
				require.NoError(t, err, "order %v", order)
			}
			for _, b := range []*vmm.Buffer{old, moved} {
				if part, err := b.Slice(0, b.Len()); err == nil {
					got := make([]byte, part.Len())
					require.NoError(t, part.CopyTo(nil, got), "order %v", order)
					require.True(t, bytes.Equal(pattern(2*kib64-100, 1), got), "order %v", order)
				}
			}
		}
		w.end()
	})
}

// owners makes one of everything that vmm lets a user close.
func owners(t testing.TB, w *world) map[string]closer {
	w.mappings(1, both(w, vmm.ReadWrite)...)
	alone, err := vmm.Reserve(w.d, kib64, vmm.ReserveOptions{})
	require.NoError(t, err)
	require.NoError(t, w.create(kib64, vmm.Properties{}))
	a, err := vmm.NewArray[uint32](w.d, vmm.BufferOptions{Reserve: 16 * kib64, Chunks: vmm.FixedChunks(kib64)})
	require.NoError(t, err)
	require.NoError(t, gputest.Err(a.Append(nil, make([]uint32, 1000))))
	spread, err := vmm.NewSparse(w.d, vmm.SparseOptions{Reserve: 8 * kib64, Page: kib64})
	require.NoError(t, err)
	require.NoError(t, spread.Map(w.ctx(), w.s, vmm.Span{First: 3, N: 2}))
	source, err := vmm.NewPages(w.d, vmm.PagesOptions{})
	require.NoError(t, err)
	all := map[string]closer{"Allocation": w.a, "Reservation": alone, "Mapping": w.maps[0], "Buffer": w.buffer(1), "Array": a,
		"Sparse": spread, "Pages": source}
	for _, c := range all {
		w.own(c)
	}
	return all
}

// closesAfter is an owner that can be closed without waiting.
type closesAfter interface {
	CloseAfter(streams ...*cuda.Stream) error
}

func TestCloseOnceFromManyGoroutines(t *testing.T) {
	w := newWorld(t, false)
	all := owners(t, w)
	creates := w.m.Count("cuMemCreate")
	var wg sync.WaitGroup
	errs := make(chan error, 1000)
	for _, c := range all {
		for i := range 16 {
			wg.Add(1)
			go func() {
				defer wg.Done()
				if after, ok := c.(closesAfter); ok && i%2 == 1 {
					errs <- after.CloseAfter(w.s, w.far)
					return
				}
				errs <- c.Close()
			}()
		}
	}
	wg.Wait()
	close(errs)
	for err := range errs {
		require.NoError(t, err)
	}
	require.NoError(t, w.drain())
	require.Equal(t, creates, w.m.Count("cuMemRelease"), "everything went once")
	w.end()
}

// valuesFor are arguments for any method of vmm's objects.
func valuesFor(t testing.TB, w *world) map[reflect.Type]reflect.Value {
	src := w.buffer(1)
	part, err := src.Slice(0, 100)
	require.NoError(t, err)
	words, err := vmm.ArrayOf[uint32](src)
	require.NoError(t, err)
	w.pinned(100)
	require.NoError(t, w.create(kib64, vmm.Properties{}))
	values := map[reflect.Type]reflect.Value{}
	for _, v := range []any{
		1, src.Ptr(), w.s, w.d, make([]byte, 100), make([]uint32, 25), part, words.All(), w.host.All(),
		vmm.ForkOptions{}, vmm.MoveOptions{}, vmm.DMABufOptions{}, w.d.Location(), []vmm.Access{{Location: w.d.Location(), Mode: vmm.ReadWrite}}, []*cuda.Stream{w.s},
		[]vmm.Span{{First: 0, N: 1}}, w.sparse(1),
		func([]byte) error { t.Fatal("called"); return nil }, func([]uint32) error { t.Fatal("called"); return nil },
	} {
		values[reflect.TypeOf(v)] = reflect.ValueOf(v)
	}
	values[reflect.TypeFor[context.Context]()] = reflect.ValueOf(w.ctx())
	values[reflect.TypeFor[vmm.Physical]()] = reflect.ValueOf(w.a)
	values[reflect.TypeFor[[]vmm.Physical]()] = reflect.ValueOf([]vmm.Physical{w.a})
	return values
}

// TestEveryMethodReturnsErrClosed finds the methods itself, so that a new one is
// not forgotten.
func TestEveryMethodReturnsErrClosed(t *testing.T) {
	// open are the methods that go on working, and why.
	open := map[string]string{
		"Close": "closing again does nothing", "CloseAfter": "closing again does nothing",
		"Slice.Slice": "a part of a value is a value",
	}
	for _, how := range []string{"Close", "CloseAfter"} {
		w := newWorld(t, false)
		values := valuesFor(t, w)
		all := owners(t, w)
		shells := map[string]any{}
		b, a := all["Buffer"].(*vmm.Buffer), all["Array"].(*vmm.Array[uint32])
		part, err := b.Slice(0, 100)
		require.NoError(t, err)
		shells["Slice"], shells["Slice of words"] = part, a.All()
		if how == "CloseAfter" { // and is not torn down yet
			w.m.Hold(w.s.Handle())
			require.NoError(t, w.s.Memset(b.Ptr(), 1, 1))
		}
		for name, c := range all {
			shells[name] = c
			if after, ok := c.(closesAfter); ok && how == "CloseAfter" {
				require.NoError(t, after.CloseAfter(w.s))
			} else {
				require.NoError(t, c.Close())
			}
		}
		called := 0
		for name, shell := range shells {
			v := reflect.ValueOf(shell)
			for i := range v.NumMethod() {
				method, f := v.Type().Method(i).Name, v.Method(i)
				if open[method] != "" || strings.HasPrefix(name, "Slice") && open["Slice."+method] != "" {
					continue
				}
				what := fmt.Sprintf("%s: %s.%s", how, name, method)
				args := make([]reflect.Value, f.Type().NumIn())
				for j := range args {
					arg, ok := values[f.Type().In(j)]
					require.True(t, ok, "%s takes a %v: add one to valuesFor", what, f.Type().In(j))
					args[j] = arg
				}
				var out []reflect.Value
				if f.Type().IsVariadic() {
					out = f.CallSlice(args)
				} else {
					out = f.Call(args)
				}
				if n := len(out); n > 0 && f.Type().Out(n-1) == reflect.TypeFor[error]() {
					err, _ := out[n-1].Interface().(error)
					require.ErrorIs(t, err, cuda.ErrClosed, what)
					called++
				}
			}
		}
		require.GreaterOrEqual(t, called, 40, "methods were found")

		live := w.buffer(1)
		_, err = b.Move(vmm.MoveOptions{Reserve: 32 * kib64})
		require.ErrorIs(t, err, cuda.ErrClosed)
		require.ErrorIs(t, gputest.Err(live.AppendSlice(nil, part)), cuda.ErrClosed)
		into, err := live.Slice(0, 100)
		require.NoError(t, err)
		require.ErrorIs(t, into.CopyFromSlice(nil, part), cuda.ErrClosed)
		_, err = w.r.Map(2*kib64, all["Allocation"].(*vmm.Allocation))
		require.ErrorIs(t, err, cuda.ErrClosed)
		_, err = vmm.NewReader(b).Read(make([]byte, 1))
		require.ErrorIs(t, err, cuda.ErrClosed)
		_, err = vmm.NewWriter(b).Write([]byte{1})
		require.ErrorIs(t, err, cuda.ErrClosed)
		w.m.Release(w.s.Handle())
		w.end()
	}
}

func TestAClosedSystemIsRefused(t *testing.T) {
	m, err := sim.New(sim.Options{})
	require.NoError(t, err)
	s, err := m.Open(cuda.Options{})
	require.NoError(t, err)
	d := s.Devices()[0]
	b, err := vmm.NewBuffer(d, vmm.BufferOptions{})
	require.NoError(t, err)
	require.NoError(t, b.Close())
	require.NoError(t, s.Close())
	require.ErrorIs(t, gputest.Err(b.Append(nil, []byte{1})), cuda.ErrClosed)
	require.NoError(t, b.Close())
	require.NoError(t, m.Close())
}
