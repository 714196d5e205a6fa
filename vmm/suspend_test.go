package vmm_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"runtime"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/cuvmm/cuvmm/csrc/kernels"
	"github.com/cuvmm/cuvmm/cuda"
	"github.com/cuvmm/cuvmm/cuda/sim"
	"github.com/cuvmm/cuvmm/internal/core"
	"github.com/cuvmm/cuvmm/internal/driver"
	"github.com/cuvmm/cuvmm/internal/share"
	"github.com/cuvmm/cuvmm/internal/test/gputest"
	"github.com/cuvmm/cuvmm/vmm"
	"github.com/stretchr/testify/require"
)

// free returns how much of a device's memory is free, in granules.
func (w *world) free(device int) int {
	free, _ := w.m.Memory(device)
	return (free + kib64 - 1) / kib64
}

func (w *world) suspend(m ...vmm.Memory) *vmm.Suspension {
	s, err := vmm.Suspend(w.ctx(), vmm.SuspendOptions{}, m...)
	require.NoError(w.t, err)
	return s
}

func (w *world) ctx() context.Context { return context.Background() }

// bytes returns what is in a buffer.
func (w *world) bytes(b *vmm.Buffer) []byte {
	got, err := w.m.Bytes(b.Ptr(), b.Stats().Committed)
	require.NoError(w.t, err)
	return got
}

func TestSuspendGivesMemoryBackAndResumeBringsItBack(t *testing.T) {
	w := newWorld(t, false)
	defer w.end()
	before := w.free(0)
	b := w.buffer(3, both(w, vmm.ReadWrite)...)
	require.NoError(t, b.Grow(2*kib64))
	want := w.bytes(b)
	stats := b.Stats()
	preview, err := vmm.Preview(vmm.SuspendOptions{}, b)
	require.NoError(t, err)
	require.Zero(t, preview.Out+preview.In, "no rate is known yet")

	s := w.suspend(b)
	require.Equal(t, before, w.free(0))
	require.Equal(t, stats.Committed, b.Stats().Suspended)
	require.ErrorIs(t, gputest.Err(b.Append(nil, []byte{1})), cuda.ErrSuspended)
	require.NoError(t, s.Released().Wait(w.ctx()))
	r := s.Report()
	require.Equal(t, stats.Committed, r.Given)
	require.Zero(t, r.Held)
	require.Equal(t, stats.Committed, r.Host)

	require.NoError(t, s.Resume(w.ctx()))
	require.Equal(t, stats, b.Stats())
	require.Equal(t, want, w.bytes(b))
	require.NoError(t, gputest.Err(b.Append(w.far, []byte{1})), "the peer has its access back")
	require.NoError(t, s.Resume(w.ctx()), "idempotent")
	preview, err = vmm.Preview(vmm.SuspendOptions{}, b)
	require.NoError(t, err)
	require.Zero(t, preview.Out, "the first time pinned as well")
	require.Positive(t, preview.In)
	require.NoError(t, w.suspend(b).Resume(w.ctx()))
	preview, err = vmm.Preview(vmm.SuspendOptions{}, b)
	require.NoError(t, err)
	require.Positive(t, preview.Out)
	require.Equal(t, r.Asked, preview.Asked)
	require.Equal(t, r.Host, preview.Host)
}

// A buffer that its user loses while it sleeps is reported, though its Suspension is not lost.
func TestASleepingBufferThatIsLost(t *testing.T) {
	w := newWorld(t, false)
	defer w.end()
	s := func() *vmm.Suspension {
		b, err := vmm.NewBuffer(w.d, vmm.BufferOptions{Reserve: 16 * kib64, Chunks: vmm.FixedChunks(kib64), Tag: "lost"})
		require.NoError(t, err)
		require.NoError(t, gputest.Err(b.Append(nil, pattern(100, 1))))
		return w.suspend(b)
	}()
	require.Eventually(t, func() bool { runtime.GC(); return w.sys.Stats().Lost == 1 }, testTimeout, time.Millisecond)
	require.NoError(t, s.Resume(w.ctx()))
	lost, ok := vmm.Tagged(w.sys, "lost")[0].(*vmm.Buffer)
	require.True(t, ok)
	require.Equal(t, pattern(100, 1), w.bytes(lost)[:100])
	require.NoError(t, lost.Close())
}

// Chunks of a family go once, if all of it is named.
func TestAFamilySleeps(t *testing.T) {
	w := newWorld(t, false)
	defer w.end()
	before := w.free(0)
	b := w.buffer(4)
	fork, err := b.Fork(nil, 3*kib64+100, vmm.ForkOptions{})
	require.NoError(t, err)
	w.own(fork)
	next, err := fork.Move(vmm.MoveOptions{})
	require.NoError(t, err)
	w.own(next)
	want, wantFork := w.bytes(b), w.bytes(next)

	s := w.suspend(b, fork)
	r := s.Report()
	require.Equal(t, []int{5 * kib64, kib64, 4 * kib64}, []int{r.Asked, r.Given, r.Held})
	require.Contains(t, r.Memory[0].Rest[0].Why, "which was not named")
	require.Equal(t, before-4, w.free(0), "the moved buffer was not named")
	require.Equal(t, wantFork, w.bytes(next))
	require.NoError(t, s.Resume(w.ctx()))

	s = w.suspend(next, b, fork)
	require.Equal(t, before, w.free(0))
	require.Zero(t, s.Report().Held)
	require.NoError(t, s.Resume(w.ctx(), fork))
	require.Equal(t, before-4, w.free(0))
	require.Equal(t, wantFork, w.bytes(fork))
	require.ErrorIs(t, gputest.Err(next.Append(nil, []byte{1})), cuda.ErrSuspended)
	require.NoError(t, s.Resume(w.ctx()))
	require.Equal(t, want, w.bytes(b))
	require.Equal(t, wantFork, w.bytes(next))
}

// Raw addresses of memory that sleeps are refused, and graphs that declare it.
func TestAddressesOfSuspendedMemory(t *testing.T) {
	w := newWorld(t, false)
	defer w.end()
	b := w.buffer(2)
	w.mappings(1, both(w, vmm.ReadWrite)...)
	w.pinned(100)
	graph, err := w.s.WithCapture(cuda.CaptureOptions{Uses: []cuda.Span{{At: b.Ptr() + 100, Bytes: 10}}}, func() error {
		return w.s.Memset(b.Ptr()+100, 7, 10)
	})
	require.NoError(t, err)
	w.own(graph)
	undeclared, err := w.s.WithCapture(cuda.CaptureOptions{}, func() error { return w.s.Memset(w.host.Ptr(), 7, 10) })
	require.NoError(t, err)
	w.own(undeclared)
	at, other := b.Ptr()+kib64, w.host.Ptr()
	module, err := w.d.LoadModule(kernels.Basic)
	require.NoError(t, err)
	w.own(module)
	fill, err := module.Kernel(kernels.Fill)
	require.NoError(t, err)
	uses := map[string]func() error{
		"Memset":       func() error { return w.s.Memset(at, 1, 1) },
		"Copy to":      func() error { return w.s.Copy(at, other, 1) },
		"Copy from":    func() error { return w.s.Copy(other, at, 1) },
		"CopyFromHost": func() error { return w.s.CopyFromHost(at, w.host.All()) },
		"CopyToHost":   func() error { return w.s.CopyToHost(w.host.All(), at) },
		"Upload":       func() error { return w.s.Upload(at, []byte{1}) },
		"Download":     func() error { return w.s.Download(make([]byte, 1), at) },
		"into it":      func() error { return w.s.Memset(b.Ptr()-1, 1, 2) },
		"mapping":      func() error { return w.s.Memset(w.maps[0].Ptr(), 1, 1) },
		"graph":        func() error { return graph.Launch(w.s) },
		"kernel":       func() error { return fill.Launch(w.s, cuda.Threads(1), at, uint64(1), uint32(1), uint32(0)) },
		"an array for a kernel": func() error {
			return fill.Launch(w.s, cuda.Threads(1), [1]cuda.Ptr{at}, uint64(1), uint32(1), uint32(0))
		},
		"a struct for a kernel": func() error {
			return fill.Launch(w.s, cuda.Threads(1), struct{ At cuda.Ptr }{at}, uint64(1), uint32(1), uint32(0))
		},
	}
	s := w.suspend(b, w.maps[0])
	for name, use := range uses {
		require.ErrorIs(t, use(), cuda.ErrSuspended, name)
	}
	require.ErrorContains(t, uses["graph"](), b.Ptr().String())
	require.NoError(t, undeclared.Launch(w.s))
	require.NoError(t, fill.Launch(w.s, cuda.Threads(1), other, uint64(1), uint32(1), uint32(0)))
	require.NoError(t, w.s.Memset(other, 1, 1))
	require.NoError(t, s.Resume(w.ctx()))
	for name, use := range uses {
		if name != "into it" {
			require.NoError(t, use(), name)
		}
	}
}

// However often memory goes and comes back, nothing is left over: no memory of the device or the
// host, no objects, goroutines or file descriptors.
func TestAThousandSuspensions(t *testing.T) {
	w := newWorld(t, false)
	defer w.end()
	w.family()
	want := w.bytes(w.buffers[0])
	var first view
	var host, files int
	for cycle := range 1000 {
		switch {
		case cycle%3 == 2:
			s, err := vmm.SuspendAfter(vmm.SuspendOptions{}, []*cuda.Stream{w.s}, w.memories()...)
			require.NoError(t, err)
			w.sleep = s
		default:
			require.NoError(t, w.suspendFamily(vmm.SuspendOptions{}))
		}
		require.NoError(t, w.sleep.Resume(w.ctx(), w.buffers[cycle%2]))
		require.NoError(t, w.sleep.Resume(w.ctx()))
		if cycle%100 != 10 {
			continue
		}
		now, hostNow, filesNow := w.look(), w.m.Live()[sim.KindRegistration], descriptors(t)
		if cycle == 10 {
			first, host, files = now, hostNow, filesNow
		}
		require.Equal(t, first, now, "cycle %d", cycle)
		require.Equal(t, []int{host, files}, []int{hostNow, filesNow}, "host memory and descriptors in cycle %d", cycle)
		require.Equal(t, want, w.bytes(w.buffers[1]))
	}
}

func descriptors(t *testing.T) int {
	all, err := os.ReadDir("/proc/self/fd")
	require.NoError(t, err)
	return len(all)
}

// While the device has not enough memory Resume waits, until its context ends or there is
// enough; the error says what is missing, and the bytes are kept.
func TestResumeWaitsForMemory(t *testing.T) {
	w := newWorld(t, false)
	defer w.end()
	b := w.buffer(4)
	want := w.bytes(b)
	s := w.suspend(b)
	_, total := w.m.Memory(0)
	filler, err := vmm.Create(w.d, total-2*kib64, vmm.Properties{})
	require.NoError(t, err)
	w.own(filler)

	err = s.Resume(w.ctx())
	require.ErrorIs(t, err, cuda.ErrOutOfMemory, "a context that never ends")
	ctx, cancel := context.WithTimeout(w.ctx(), 50*time.Millisecond)
	defer cancel()
	err = s.Resume(ctx)
	require.ErrorIs(t, err, cuda.ErrOutOfMemory)
	require.ErrorIs(t, err, context.DeadlineExceeded)
	require.Equal(t, 2, w.free(0), "it holds nothing while it waits")
	require.NoError(t, b.Clip(), "and is suspended as before")

	resumed := make(chan error, 1)
	ctx, cancel = context.WithTimeout(w.ctx(), testTimeout)
	defer cancel()
	go func() { resumed <- s.Resume(ctx) }()
	require.Never(t, func() bool { return len(resumed) > 0 }, 10*time.Millisecond, time.Millisecond)
	require.NoError(t, filler.Close())
	require.NoError(t, <-resumed)
	require.Equal(t, want, w.bytes(b))
}

// What is closed while Resume waits for memory ends the wait.
func TestClosingEndsTheWaitForMemory(t *testing.T) {
	w := newWorld(t, false)
	defer w.end()
	b := w.buffer(4)
	s := w.suspend(b)
	_, total := w.m.Memory(0)
	filler, err := vmm.Create(w.d, total-2*kib64, vmm.Properties{})
	require.NoError(t, err)
	w.own(filler)
	ctx, cancel := context.WithTimeout(w.ctx(), testTimeout)
	defer cancel()
	resumed := make(chan error, 1)
	go func() { resumed <- s.Resume(ctx) }()
	require.Eventually(t, func() bool { return vmm.StateOf(b) == "resuming" }, testTimeout, time.Millisecond)
	require.NoError(t, b.CloseAfter(w.s))
	require.ErrorIs(t, <-resumed, cuda.ErrClosed)
	require.NoError(t, w.drain())
	require.Zero(t, w.sys.Stats().Suspended)
}

// Wrong arguments are refused before anything is done, with an error that says which.
func TestSuspendRefusesWhatCannotSleep(t *testing.T) {
	w := newWorld(t, false)
	defer w.end()
	b := w.buffer(2)
	a, err := vmm.ArrayOf[byte](b)
	require.NoError(t, err)
	closedOne := w.buffer(1)
	require.NoError(t, closedOne.Close())
	other := newWorld(t, false)
	defer other.end()
	hold, err := share.Of(w.buffer(1)).Hold(testOp, "publication \"w\"", 10)
	require.NoError(t, err)
	published := w.b
	none := func(m ...vmm.Memory) []vmm.Memory { return m }
	o := vmm.SuspendOptions{}
	for name, c := range map[string]struct {
		m    []vmm.Memory
		kind error
		text string
	}{
		"nothing":     {nil, cuda.ErrInvalidArgument, "no memory"},
		"nil":         {none(b, nil), cuda.ErrInvalidArgument, "nil memory"},
		"nil pointer": {none((*vmm.Buffer)(nil)), cuda.ErrInvalidArgument, "nil memory"},
		"nil array":   {none((*vmm.Array[byte])(nil)), cuda.ErrInvalidArgument, "nil memory"},
		"zero":        {none(&vmm.Mapping{}), cuda.ErrInvalidArgument, "nil memory"},
		"twice":       {none(b, a), cuda.ErrInvalidArgument, "twice"},
		"closed":      {none(b, closedOne), cuda.ErrClosed, "closed"},
		"foreign":     {none(b, other.buffer(1)), cuda.ErrForeign, "another System"},
		"published":   {none(b, published), cuda.ErrInUse, "publication \"w\""},
	} {
		_, err := vmm.Suspend(w.ctx(), o, c.m...)
		require.ErrorIs(t, err, c.kind, name)
		require.ErrorContains(t, err, c.text, name)
		_, err = vmm.SuspendAfter(o, []*cuda.Stream{w.s}, c.m...)
		require.ErrorIs(t, err, c.kind, name)
		require.Equal(t, "active", vmm.StateOf(b), name)
	}
	_, err = vmm.SuspendAfter(o, nil, b)
	require.ErrorIs(t, err, cuda.ErrInvalidArgument)
	_, err = vmm.Suspend(w.ctx(), vmm.SuspendOptions{Keep: 7}, b)
	require.ErrorIs(t, err, cuda.ErrInvalidArgument)
	_, err = w.s.WithCapture(cuda.CaptureOptions{}, func() error {
		_, err := vmm.SuspendAfter(o, []*cuda.Stream{w.far, w.s}, b)
		return err
	})
	require.ErrorIs(t, err, cuda.ErrCapturing)
	require.NoError(t, gputest.Err(b.Append(nil, []byte{1})), "nothing has changed")
	hold.Release()
	s := w.suspend(published)
	require.ErrorIs(t, s.Resume(w.ctx(), b), cuda.ErrInvalidArgument)
	require.NoError(t, s.Resume(w.ctx(), published))
	require.ErrorIs(t, (*vmm.Suspension)(nil).Resume(w.ctx()), cuda.ErrInvalidArgument)
}

// A Host function that looks at memory keeps it there.
func TestMemoryThatAFunctionSeesDoesNotSleep(t *testing.T) {
	w := newWorld(t, false)
	defer w.end()
	b, err := vmm.NewBuffer(w.d, vmm.BufferOptions{Reserve: 8 * mib, Memory: vmm.Properties{Location: cuda.OnHostNUMA(0)}})
	require.NoError(t, err)
	w.own(b)
	require.NoError(t, gputest.Err(b.Append(nil, pattern(100, 1))))
	part, err := b.Slice(0, 100)
	require.NoError(t, err)
	require.NoError(t, part.Host(func([]byte) error {
		_, err := vmm.Suspend(w.ctx(), vmm.SuspendOptions{}, b)
		require.ErrorIs(t, err, cuda.ErrInUse)
		return nil
	}))
	s := w.suspend(b)
	require.NoError(t, s.Resume(w.ctx()))
	require.NoError(t, part.Host(func(data []byte) error {
		require.Equal(t, pattern(100, 1), data)
		return nil
	}))
}

// A clip that waited for a change is done, though a suspension began meanwhile.
func TestAClipThatWaitedIsDoneBeforeTheSuspension(t *testing.T) {
	w := newWorld(t, false)
	defer w.end()
	b := w.buffer(3)
	require.NoError(t, b.Resize(nil, kib64))
	transfer, err := w.d.Transfer()
	require.NoError(t, err)
	release := w.m.Hold(transfer.Handle())
	fills := w.m.Count("cuMemsetD8Async")
	changed := make(chan error, 1)
	go func() { changed <- b.Resize(nil, kib64+100) }() // waits for its fill
	require.Eventually(t, func() bool { return w.m.Count("cuMemsetD8Async") > fills }, testTimeout, time.Millisecond)
	require.NoError(t, b.ClipAfter(w.s))
	s, err := vmm.SuspendAfter(vmm.SuspendOptions{}, []*cuda.Stream{w.s}, b)
	require.NoError(t, err)
	release()
	require.NoError(t, <-changed)
	require.NoError(t, s.Released().Wait(w.ctx()))
	require.Equal(t, 2*kib64, b.Stats().Committed)
	require.Equal(t, 2*kib64, b.Stats().Suspended)
	require.NoError(t, s.Resume(w.ctx()))
}

// Goroutines append, copy, clip and change access while others suspend and resume: each operation
// is done, or refused as suspended, and no byte is lost.
func TestSuspensionsBesideEverything(t *testing.T) {
	w := newWorld(t, false)
	defer w.end()
	b, err := vmm.NewBuffer(w.d, vmm.BufferOptions{Reserve: 512 * kib64, Chunks: vmm.FixedChunks(kib64)})
	require.NoError(t, err)
	w.own(b)
	fork, err := b.Fork(nil, 0, vmm.ForkOptions{})
	require.NoError(t, err)
	w.own(fork)
	stop := make(chan struct{})
	var all sync.WaitGroup
	beside := func(f func() error) {
		all.Go(func() {
			for {
				select {
				case <-stop:
					return
				default:
				}
				if err := f(); err != nil && !errors.Is(err, cuda.ErrSuspended) {
					t.Error(err)
					return
				}
				time.Sleep(50 * time.Microsecond)
			}
		})
	}
	const record = 1000
	var mu sync.Mutex
	written := map[int]byte{}
	for g := range 3 {
		stream, err := w.d.NewStream(cuda.StreamOptions{})
		require.NoError(t, err)
		w.own(stream)
		beside(func() error {
			at, err := b.Append(stream, bytes.Repeat([]byte{byte(g + 1)}, record))
			if err == nil && at > 20<<20 {
				return nil
			}
			if err != nil {
				return err
			}
			mu.Lock()
			written[at] = byte(g + 1)
			mu.Unlock()
			part, err := b.Slice(at, at+record)
			if err != nil {
				return err
			}
			got := make([]byte, record)
			if err = part.CopyTo(stream, got); err == nil && got[record-1] != byte(g+1) {
				err = fmt.Errorf("record at %d reads %d", at, got[record-1])
			}
			return err
		})
	}
	beside(b.Clip)
	beside(func() error { return b.ClipAfter(w.s) })
	beside(func() error { return b.SetAccess(vmm.Access{Location: w.peer.Location(), Mode: vmm.ReadOnly}) })
	beside(func() error { b.Stats(); return w.s.Memset(fork.Ptr(), 0, 0) })
	for range 2 {
		beside(func() error {
			s, err := vmm.Suspend(w.ctx(), vmm.SuspendOptions{}, fork, b)
			if err != nil {
				return err
			}
			time.Sleep(time.Millisecond)
			return s.Resume(w.ctx())
		})
	}
	beside(func() error {
		s, err := vmm.SuspendAfter(vmm.SuspendOptions{}, []*cuda.Stream{w.s}, b)
		if err != nil {
			return err
		}
		return s.Resume(w.ctx())
	})
	time.Sleep(500 * time.Millisecond)
	close(stop)
	all.Wait()
	require.NotEmpty(t, written)
	got, err := w.m.Bytes(b.Ptr(), b.Len())
	require.NoError(t, err)
	for at, by := range written {
		require.Equal(t, bytes.Repeat([]byte{by}, record), got[at:at+record], "record at %d", at)
	}
}

// Memory of two devices sleeps and wakes together, each device copying its own.
func TestMemoryOfTwoDevicesSleeps(t *testing.T) {
	w := newWorld(t, false)
	defer w.end()
	near := w.buffer(3)
	far, err := vmm.NewBuffer(w.peer, vmm.BufferOptions{Reserve: 16 * kib64, Chunks: vmm.FixedChunks(kib64)})
	require.NoError(t, err)
	w.own(far)
	require.NoError(t, gputest.Err(far.Append(nil, pattern(2*kib64, 9))))
	want, wantFar := w.bytes(near), w.bytes(far)
	before := [2]int{w.free(0), w.free(1)}
	s := w.suspend(near, far)
	require.Equal(t, [2]int{before[0] + 3, before[1] + 2}, [2]int{w.free(0), w.free(1)})
	require.NoError(t, s.Resume(w.ctx()))
	for i, free := range before {
		require.Equal(t, free, w.free(i))
	}
	require.Equal(t, want, w.bytes(near))
	require.Equal(t, wantFar, w.bytes(far))
}

// What devices do for their memory they do side by side: copies, and the driver's calls before and
// after them. Peers have their access again ahead of the copies, by one call for a run.
func TestDevicesSleepSideBySide(t *testing.T) {
	w := newWorld(t, false)
	defer w.end()
	near := w.buffer(3, both(w, vmm.ReadWrite)...)
	far, err := vmm.NewBuffer(w.peer, vmm.BufferOptions{Reserve: 16 * kib64, Chunks: vmm.FixedChunks(kib64), Access: both(w, vmm.ReadWrite)})
	require.NoError(t, err)
	w.own(far)
	require.NoError(t, far.Resize(nil, 2*kib64))
	require.NoError(t, w.suspend(near, far).Resume(w.ctx())) // pins
	cycle := func(o vmm.SuspendOptions) []string {
		s, err := vmm.Suspend(w.ctx(), o, near, far)
		require.NoError(t, err)
		in, err := w.watch(func() error { return s.Resume(w.ctx()) })
		require.NoError(t, err)
		return in
	}
	for _, o := range []vmm.SuspendOptions{{}, {Keep: vmm.Drop}} {
		calls := []string{"cuMemUnmap", "cuMemRelease", "cuMemcpyDtoHAsync"}
		for _, call := range calls[:len(calls)-int(o.Keep)] {
			meet(t, w, call, func() {
				s, err := vmm.Suspend(w.ctx(), o, near, far)
				require.NoError(t, err)
				w.sleep = s
			})
			require.NoError(t, w.sleep.Resume(w.ctx()))
		}
		calls = []string{"cuMemCreate", "cuMemMap", "cuMemSetAccess", "cuMemcpyHtoDAsync"}
		for _, call := range calls[:len(calls)-int(o.Keep)] {
			s, err := vmm.Suspend(w.ctx(), o, near, far)
			require.NoError(t, err)
			meet(t, w, call, func() { require.NoError(t, s.Resume(w.ctx())) })
		}
	}
	in := cycle(vmm.SuspendOptions{})
	copied, granted := slices.Index(in, "cuMemcpyHtoDAsync"), slices.Index(in, "cuMemSetAccess")
	require.Less(t, granted, copied)
	require.Len(t, slices.DeleteFunc(in, func(call string) bool { return call != "cuMemSetAccess" }), 2, "one for each range, whatever its chunks and peers")
}

// meet fails the test unless two goroutines are in a driver call at the same time.
func meet(t *testing.T, w *world, call string, do func()) {
	t.Helper()
	both, n := make(chan struct{}), atomic.Int32{}
	w.m.OnCall(func(c string) {
		if c != call {
			return
		}
		switch n.Add(1) {
		case 1:
			select {
			case <-both:
			case <-time.After(testTimeout):
				t.Errorf("%s of one device waits for that of the other", call)
			}
		case 2:
			close(both)
		}
	})
	do()
	w.m.OnCall(nil)
	require.GreaterOrEqual(t, n.Load(), int32(2), call)
}

// A device that may not write the memory brings the bytes back all the same, and may not
// afterwards; memory that no device may read keeps its bytes only if it stays.
func TestSuspendKeepsAccess(t *testing.T) {
	w := newWorld(t, false)
	defer w.end()
	b := w.buffer(2)
	want := w.bytes(b)
	mode := func(mode vmm.AccessMode) {
		require.NoError(t, b.SetAccess(vmm.Access{Location: w.d.Location(), Mode: mode}))
	}
	mode(vmm.ReadOnly)
	s := w.suspend(b)
	require.NoError(t, s.Resume(w.ctx()))
	require.Equal(t, want, w.bytes(b))
	part, err := b.Slice(0, 10)
	require.NoError(t, err)
	require.ErrorIs(t, part.Zero(nil), cuda.ErrNotPermitted)
	access := w.look().access
	require.Equal(t, driver.AccessRead, access[0][0], "in the driver, too")

	s = w.suspend(b)
	mode(vmm.NoAccess) // while it is away
	require.ErrorIs(t, b.SetAccess(vmm.Access{Location: w.d.Location(), Mode: vmm.ReadWrite}), cuda.ErrSuspended)
	require.NoError(t, s.Resume(w.ctx()))
	require.Equal(t, driver.AccessNone, w.look().access[0][0])
	_, err = vmm.Suspend(w.ctx(), vmm.SuspendOptions{}, b)
	require.ErrorIs(t, err, cuda.ErrNotPermitted)
	require.ErrorContains(t, err, "Drop the bytes")
	mode(vmm.ReadOnly)
	require.Equal(t, want, w.bytes(b))
}

// A SuspendAfter that fails leaves everything as it was, and its completion says why, whenever it
// is asked.
func TestSuspendAfterThatFails(t *testing.T) {
	w := newWorld(t, false)
	defer w.end()
	b := w.buffer(2)
	want := w.bytes(b)
	w.m.Inject(sim.Fault{Call: "cuMemcpyDtoHAsync", Result: code})
	s, err := vmm.SuspendAfter(vmm.SuspendOptions{}, []*cuda.Stream{w.s}, b)
	require.NoError(t, err)
	require.NoError(t, w.drain())
	for range 2 {
		require.ErrorContains(t, s.Released().Wait(w.ctx()), "cuMemcpyDtoHAsync")
	}
	require.Equal(t, want, w.bytes(b))
	require.NoError(t, gputest.Err(b.Append(nil, []byte{1})))
	require.NoError(t, s.Resume(w.ctx()), "nothing sleeps")
	require.Empty(t, s.Report().Memory)
}

// What the driver refuses to take is held, counted and tried again, and Resume takes it back.
func TestMemoryThatTheDriverDoesNotTake(t *testing.T) {
	w := newWorld(t, false)
	defer w.end()
	b := w.buffer(2)
	want := w.bytes(b)
	for _, call := range []string{"cuMemRelease", "cuMemUnmap"} {
		for _, drained := range []bool{false, true} {
			w.m.Inject(sim.Fault{Call: call, Times: -1, Result: code})
			s := w.suspend(b)
			r := s.Report()
			require.Equal(t, 2*kib64, r.Held, call)
			require.Contains(t, r.Memory[0].Rest[0].Why, call)
			select {
			case <-s.Released().Done():
				t.Fatal("the memory is not free")
			default:
			}
			w.m.ClearFaults()
			if drained {
				require.NoError(t, w.drain())
				require.NoError(t, s.Released().Wait(w.ctx()))
				require.Zero(t, s.Report().Held)
			}
			require.NoError(t, s.Resume(w.ctx()))
			require.Equal(t, want, w.bytes(b))
			require.NoError(t, w.drain())
		}
	}
}

// A tag names a family: it sleeps and wakes as one, and its names are in reports and errors.
func TestWhatATagNames(t *testing.T) {
	w := newWorld(t, false)
	defer w.end()
	before := w.free(0)
	b, err := vmm.NewBuffer(w.d, vmm.BufferOptions{Reserve: 16 * kib64, Chunks: vmm.FixedChunks(kib64), Name: "weights", Tag: "llm"})
	require.NoError(t, err)
	w.own(b)
	require.NoError(t, gputest.Err(b.Append(nil, pattern(3*kib64, 1))))
	fork, err := b.Fork(nil, 2*kib64, vmm.ForkOptions{})
	require.NoError(t, err)
	w.own(fork)
	other := w.buffer(1)
	gone, err := vmm.NewBuffer(w.d, vmm.BufferOptions{Tag: "llm"})
	require.NoError(t, err)
	require.NoError(t, gone.Close())

	require.Empty(t, vmm.Tagged(w.sys, "other"))
	require.Empty(t, vmm.Tagged(nil, "llm"))
	family := vmm.Tagged(w.sys, "llm")
	require.Len(t, family, 2)
	s := w.suspend(family...)
	require.Equal(t, before-1, w.free(0))
	require.Equal(t, "active", vmm.StateOf(other))
	require.Contains(t, s.Report().Memory[0].Name, `buffer "weights" tagged "llm"`)
	require.ErrorContains(t, b.Grow(1000*kib64), `"weights"`)
	require.ErrorContains(t, w.s.Memset(b.Ptr(), 0, 1), `"weights"`)
	require.NoError(t, s.Resume(w.ctx(), vmm.Tagged(w.sys, "llm")...))
	require.Equal(t, pattern(3*kib64, 1), w.bytes(b))
	lost := w.sys.Stats().Lost
	for range 5 {
		runtime.GC()
	}
	require.Equal(t, lost, w.sys.Stats().Lost, "what Tagged returned is no object that one loses")
}

// Suspended memory is not charged to its budget, which has to have room for it again.
func TestSuspendedMemoryIsNotCharged(t *testing.T) {
	w := newWorld(t, false)
	defer w.end()
	limit := cuda.NewBudget(4*kib64, cuda.BudgetOptions{Name: "tenants"})
	var all []*vmm.Buffer
	for range 2 {
		b, err := vmm.NewBuffer(w.d, vmm.BufferOptions{Reserve: 16 * kib64, Chunks: vmm.FixedChunks(kib64), Budget: limit})
		require.NoError(t, err)
		w.own(b)
		all = append(all, b)
	}
	require.NoError(t, gputest.Err(all[0].Append(nil, pattern(3*kib64, 1))))
	s := w.suspend(all[0])
	require.NoError(t, gputest.Err(all[1].Append(nil, pattern(3*kib64, 2))))
	err := s.Resume(w.ctx())
	require.ErrorIs(t, err, cuda.ErrBudget)
	require.ErrorContains(t, err, "tenants")
	require.NoError(t, all[1].Resize(nil, 10))
	require.NoError(t, all[1].Clip())
	require.NoError(t, s.Resume(w.ctx()))
	require.Equal(t, pattern(3*kib64, 1), w.bytes(all[0]))
}

// On every driver: a family goes to the last byte and comes back at its addresses, where a graph
// that was captured before finds it.
func TestSuspendOnEachDriver(t *testing.T) {
	gputest.Each(t, func(t *testing.T, d *cuda.Device) {
		const n = 24 << 20
		data := pattern(n, 1)
		b, err := vmm.NewBuffer(d, vmm.BufferOptions{Reserve: 2 * n, Chunks: vmm.FixedChunks(4 << 20)})
		require.NoError(t, err)
		closed(t, b)
		require.NoError(t, gputest.Err(b.Append(nil, data)))
		fork, err := b.Fork(nil, n/2+1000, vmm.ForkOptions{})
		require.NoError(t, err)
		closed(t, fork)
		next, err := fork.Move(vmm.MoveOptions{})
		require.NoError(t, err)
		closed(t, next)
		s, err := d.NewStream(cuda.StreamOptions{})
		require.NoError(t, err)
		closed(t, s)
		graph, err := s.WithCapture(cuda.CaptureOptions{Uses: []cuda.Span{{At: next.Ptr(), Bytes: next.Len()}}}, func() error {
			return s.Memset(next.Ptr(), 7, 1000)
		})
		require.NoError(t, err)
		closed(t, graph)
		contents := func(b *vmm.Buffer) []byte {
			got := make([]byte, b.Len())
			all, err := b.Slice(0, b.Len())
			require.NoError(t, err)
			require.NoError(t, all.CopyTo(nil, got))
			return got
		}
		free := func() int {
			free, _, err := d.MemoryInfo()
			require.NoError(t, err)
			return free
		}
		ctx := t.Context()
		for i, o := range []vmm.SuspendOptions{{}, {Source: vmm.SourceAt(bytes.NewReader(data))}, {}} {
			before := free()
			z, err := vmm.Suspend(ctx, o, next, b, fork)
			require.NoError(t, err)
			r := z.Report()
			require.Zero(t, r.Held, "%+v", r)
			if i > 0 { // the first makes streams and pins, which may take memory
				require.GreaterOrEqual(t, free()-before, r.Given)
			}
			require.ErrorIs(t, graph.Launch(s), cuda.ErrSuspended)
			require.NoError(t, z.Resume(ctx, next))
			require.Equal(t, data[:n/2+1000], contents(next))
			require.NoError(t, z.Resume(ctx))
			require.Equal(t, data, contents(b))
			require.Equal(t, data[:n/2+1000], contents(fork))
		}
		z, err := vmm.SuspendAfter(vmm.SuspendOptions{}, []*cuda.Stream{s}, b, fork, next)
		require.NoError(t, err)
		require.NoError(t, z.Released().Wait(ctx))
		require.NoError(t, z.Resume(ctx))
		require.NoError(t, graph.Launch(s))
		require.NoError(t, s.Synchronize())
		copy(data, bytes.Repeat([]byte{7}, 1000))
		require.Equal(t, data, contents(b), "the first bytes are shared")
		z, err = vmm.Suspend(ctx, vmm.SuspendOptions{Keep: vmm.Drop}, b, fork, next)
		require.NoError(t, err)
		require.NoError(t, z.Resume(ctx))
		require.NoError(t, gputest.Err(b.Append(nil, data[:100])))
	})
}

// Memory that the driver did not unmap for one member stays taken when another's Resume fails,
// and is not counted as given while it is mapped.
func TestMemoryPinnedByAnotherMember(t *testing.T) {
	w := newWorld(t, false)
	defer w.end()
	b := w.buffer(2)
	want := w.bytes(b)
	next, err := b.Move(vmm.MoveOptions{})
	require.NoError(t, err)
	w.own(next)
	// The run of b is refused, and each of its chunks; that of next is taken; all else is refused.
	w.m.Inject(sim.Fault{Call: "cuMemUnmap", Times: 3, Result: code})
	w.m.Inject(sim.Fault{Call: "cuMemUnmap", After: 1, Times: -1, Result: code})
	s := w.suspend(b, next)
	require.Equal(t, 2, w.m.Live()[sim.KindMapping])
	w.m.Inject(sim.Fault{Call: "cuMemMap", Result: code})
	require.ErrorContains(t, s.Resume(w.ctx(), next), "cuMemMap")
	require.Equal(t, 2*kib64, s.Report().Held)
	require.Zero(t, w.sys.Stats().Suspended, "b still maps the memory")
	w.m.ClearFaults()
	require.NoError(t, w.drain())
	require.Zero(t, s.Report().Held)
	require.Zero(t, w.m.Live()[sim.KindMapping])
	require.Zero(t, w.m.Live()[sim.KindAllocation])
	require.NoError(t, s.Resume(w.ctx()))
	require.Equal(t, want, w.bytes(b))
	require.Equal(t, want, w.bytes(next))
}

// A source that panics, or ends its goroutine, is one that failed, and the memory can be resumed
// again.
func TestASourceThatDoesNotReturn(t *testing.T) {
	w := newWorld(t, false)
	defer w.end()
	b := w.buffer(1)
	end := func() {}
	s, err := vmm.Suspend(w.ctx(), vmm.SuspendOptions{Source: sourceFunc(func() { end() })}, b)
	require.NoError(t, err)
	for text, how := range map[string]func(){"Source.Fill panicked: no file": func() { panic("no file") }, "Goexit": runtime.Goexit} {
		end = how
		require.ErrorContains(t, s.Resume(w.ctx()), text)
		require.NotZero(t, b.Stats().Suspended)
	}
	end = func() {}
	require.NoError(t, s.Resume(w.ctx()))
	require.Zero(t, b.Stats().Suspended)
	require.NoError(t, gputest.Err(b.Append(nil, []byte{1})))
}

// A report has one entry for each reason, however many chunks there are, and what the driver
// refused for no reason that is known says what to do.
func TestReportsAndErrorsAreShort(t *testing.T) {
	w := newWorld(t, false)
	defer w.end()
	b := w.buffer(6)
	fork, err := b.Fork(nil, 4*kib64, vmm.ForkOptions{})
	require.NoError(t, err)
	w.own(fork)
	w.m.Inject(sim.Fault{Call: "cuMemRelease", Times: -1, Result: code})
	s := w.suspend(b)
	w.m.ClearFaults()
	rest := s.Report().Memory[0].Rest
	require.Len(t, rest, 2)
	require.Equal(t, 4*kib64, rest[0].Bytes)
	require.Contains(t, rest[0].Why, fork.Ptr().String())
	require.Equal(t, 2*kib64, rest[1].Bytes)
	require.NoError(t, w.drain())
	w.m.Inject(sim.Fault{Call: "cuMemMap", Result: code})
	require.ErrorContains(t, s.Resume(w.ctx()), "call Resume again")
	require.NoError(t, s.Resume(w.ctx()))
}

// A declared use ends within the address space, and one up to its end is compared as others are.
func TestUsesUpToTheLastAddress(t *testing.T) {
	w := newWorld(t, false)
	defer w.end()
	b := w.buffer(1)
	w.pinned(1)
	last := ^cuda.Ptr(0)
	capture := func(u cuda.Span) (*cuda.Graph, error) {
		return w.s.WithCapture(cuda.CaptureOptions{Uses: []cuda.Span{u}}, func() error { return w.s.Memset(w.host.Ptr(), 1, 1) })
	}
	_, err := capture(cuda.Span{At: last, Bytes: 2})
	require.ErrorIs(t, err, cuda.ErrInvalidArgument)
	far, err := capture(cuda.Span{At: last - 9, Bytes: 10})
	require.NoError(t, err)
	w.own(far)
	near, err := capture(cuda.Span{At: b.Ptr() - 1, Bytes: 2})
	require.NoError(t, err)
	w.own(near)
	s := w.suspend(b)
	require.ErrorIs(t, near.Launch(w.s), cuda.ErrSuspended)
	require.NoError(t, far.Launch(w.s))
	require.NoError(t, s.Resume(w.ctx()))
}

type sourceFunc func()

func (f sourceFunc) Fill(context.Context, *cuda.Stream, vmm.Memory, cuda.Ptr, int) error {
	f()
	return nil
}

func TestWhatSuspendRefusesAtOnce(t *testing.T) {
	w := newWorld(t, false)
	defer w.end()
	b := w.buffer(1)
	var none context.Context
	_, err := vmm.Suspend(none, vmm.SuspendOptions{}, b)
	require.ErrorIs(t, err, cuda.ErrInvalidArgument)
	_, err = vmm.Suspend(w.ctx(), vmm.SuspendOptions{Source: vmm.SourceAt(nil)}, b)
	require.ErrorIs(t, err, cuda.ErrInvalidArgument)
	s := w.suspend(b)
	require.ErrorIs(t, s.Resume(none), cuda.ErrInvalidArgument)
	require.NoError(t, s.Resume(w.ctx()))
	hold, err := share.Of(b).Hold("test", "publication", 1)
	require.NoError(t, err)
	defer hold.Release()
	_, err = vmm.Preview(vmm.SuspendOptions{}, b)
	require.ErrorIs(t, err, cuda.ErrInUse, "as Suspend")
}

// The end of the context ends the wait for the GPU, and all is as before.
func TestSuspendWaitsWithinItsContext(t *testing.T) {
	w := newWorld(t, false)
	defer w.end()
	b := w.buffer(1)
	want := w.bytes(b)
	release := w.m.Hold(w.s.Handle())
	require.NoError(t, w.s.Memset(b.Ptr(), want[0], 1)) // which is not done
	ctx, cancel := context.WithTimeout(w.ctx(), 20*time.Millisecond)
	defer cancel()
	_, err := vmm.Suspend(ctx, vmm.SuspendOptions{}, b)
	require.ErrorIs(t, err, context.DeadlineExceeded)
	require.ErrorContains(t, err, "waiting for work of the GPU")
	require.NoError(t, gputest.Err(b.Slice(0, 1)))
	release()
	require.Equal(t, want, w.bytes(b))
	require.NoError(t, w.suspend(b).Resume(w.ctx()))
}

// A budget asks its owners before it refuses a Resume.
func TestResumeAsksTheOwnersOfItsBudget(t *testing.T) {
	w := newWorld(t, false)
	defer w.end()
	room := cuda.NewBudget(3*kib64, cuda.BudgetOptions{Name: "room"})
	buffer := func() *vmm.Buffer {
		b, err := vmm.NewBuffer(w.d, vmm.BufferOptions{Reserve: 16 * kib64, Chunks: vmm.FixedChunks(kib64), Budget: room})
		require.NoError(t, err)
		return b
	}
	b := buffer()
	defer func() { require.NoError(t, b.Close()) }()
	require.NoError(t, b.Grow(3*kib64))
	s := w.suspend(b)
	other := buffer()
	require.NoError(t, other.Grow(2*kib64))
	require.ErrorIs(t, s.Resume(context.Background()), cuda.ErrBudget)
	asked := 0
	remove, err := room.OnPressure(0, func(need int) int {
		asked++
		require.GreaterOrEqual(t, need, 2*kib64)
		require.NoError(t, other.Close())
		return 2 * kib64
	})
	require.NoError(t, err)
	defer remove()
	require.NoError(t, s.Resume(context.Background()))
	require.Equal(t, 1, asked)
}

// Default pools are trimmed on request alone, and a driver that refuses does no harm.
func TestPoolsAreTrimmedOnRequest(t *testing.T) {
	w := newWorld(t, false)
	defer w.end()
	b := w.buffer(1)
	for i, o := range []vmm.SuspendOptions{{}, {TrimPools: true}, {TrimPools: true, Keep: vmm.Drop}} {
		w.m.Inject(sim.Fault{Call: "cuMemPoolTrimTo", Result: code})
		s, err := vmm.Suspend(w.ctx(), o, b)
		require.NoError(t, err)
		require.Equal(t, i, w.m.Count("cuMemPoolTrimTo"))
		require.NoError(t, s.Resume(w.ctx()))
	}
	w.m.ClearFaults()
}

// A report says what else is taken of each device, and what other libraries allocate in stream
// order is among it.
func TestWhatLiesOutside(t *testing.T) {
	gputest.Each(t, func(t *testing.T, d *cuda.Device) {
		const n = 8 << 20
		b, err := vmm.NewBuffer(d, vmm.BufferOptions{Reserve: n, Chunks: vmm.FixedChunks(2 << 20)})
		require.NoError(t, err)
		closed(t, b)
		stays, err := vmm.NewBuffer(d, vmm.BufferOptions{Reserve: n, Chunks: vmm.FixedChunks(2 << 20)})
		require.NoError(t, err)
		closed(t, stays)
		require.NoError(t, errors.Join(b.Resize(nil, n), stays.Resize(nil, n)))
		c, err := core.ContextOf(testOp, d)
		require.NoError(t, err)
		s, err := d.NewStream(cuda.StreamOptions{})
		require.NoError(t, err)
		closed(t, s)
		drv := c.System().Drv
		p, r := drv.MemAllocAsync(c.Handle, n, driver.Stream(s.Handle()))
		require.Equal(t, driver.Success, r)
		require.NoError(t, s.Synchronize())

		z, err := vmm.Suspend(t.Context(), vmm.SuspendOptions{TrimPools: true}, b)
		require.NoError(t, err)
		outside := z.Report().Outside
		require.Len(t, outside, 1)
		o := outside[0]
		require.Equal(t, o.Total, d.TotalMemory())
		require.GreaterOrEqual(t, o.Own, n, "the other buffer")
		require.GreaterOrEqual(t, o.PoolUsed, n)
		require.GreaterOrEqual(t, o.Pool, o.PoolUsed)
		require.Equal(t, o.Total, o.Free+o.Own+o.Pool+o.Rest)
		require.Equal(t, driver.Success, drv.MemFreeAsync(c.Handle, p, driver.Stream(s.Handle())))
		require.NoError(t, s.Synchronize())
		after := z.Report().Outside[0]
		require.Equal(t, o.PoolUsed-n, after.PoolUsed)
		require.NoError(t, z.Resume(t.Context()))
		require.GreaterOrEqual(t, z.Report().Outside[0].Own, o.Own+n)
	})
}
