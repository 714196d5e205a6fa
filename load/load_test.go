package load_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/cuvmm/cuvmm/cuda"
	"github.com/cuvmm/cuvmm/cuda/sim"
	"github.com/cuvmm/cuvmm/handles"
	"github.com/cuvmm/cuvmm/internal/test/gputest"
	"github.com/cuvmm/cuvmm/load"
	"github.com/cuvmm/cuvmm/vmm"
	"github.com/stretchr/testify/require"
)

// skipIfDirectIsRefused skips for file systems that have no way past the page cache.
func skipIfDirectIsRefused(t testing.TB, r load.Reading, err error) {
	t.Helper()
	if r == load.Direct && err != nil {
		require.ErrorIs(t, err, cuda.ErrNotSupported)
		t.Skip(err)
	}
}

// cool drops a file from the page cache, as far as the system obeys.
func cool(t testing.TB, path string) {
	t.Helper()
	require.NoError(t, dropFromCache(path))
}

func TestAllTensorsAreLoaded(t *testing.T) {
	tensors := assorted()
	path := write(t, "model.safetensors", fileOf(tensors, map[string]string{"format": "pt"}))
	gputest.Each(t, func(t *testing.T, d *cuda.Device) {
		g := on(t, d)
		m := open(t, path)
		require.Equal(t, map[string]string{"format": "pt"}, m.Metadata())
		for _, align := range []int{0, 16, 4096} {
			for _, how := range readings {
				for _, cold := range []bool{false, true} {
					t.Run(fmt.Sprintf("%d %v cold %v", align, how, cold), func(t *testing.T) {
						g := g
						g.TB = t
						if cold {
							cool(t, path)
						}
						l, err := m.Layout(align)
						require.NoError(t, err)
						b := g.buffer(l.Bytes)
						g.write(b.Ptr(), bytes.Repeat([]byte{0xee}, l.Bytes))
						var last load.Progress
						made, err := m.LoadAll(t.Context(), load.Options{Reading: how, Threads: 3, Progress: func(p load.Progress) { last = p }}, g.stream, l, b.Ptr(), b.Len())
						skipIfDirectIsRefused(t, how, err)
						require.NoError(t, err)
						g.holds(made, b.Ptr(), tensors)
						verified, err := m.Verify(t.Context(), load.Options{Reading: how}, l)
						require.NoError(t, err)
						require.Equal(t, made, verified)
						require.Equal(t, l.Identity(), made.Identity())
						require.NoError(t, made.Match(l))
						require.Equal(t, l.Bytes, last.Done)
						require.Equal(t, l.Bytes, last.Total)
						end := 0
						image := g.read(b.Ptr(), l.Bytes)
						for _, at := range made.Tensors {
							require.Zero(t, at.Offset%max(align, 16))
							require.Equal(t, make([]byte, at.Offset-end), image[end:at.Offset], "the gap is zero")
							end = at.Offset + at.Size()
						}
					})
				}
			}
		}
	})
}

// block is a reference for parts: it returns the bytes of a block of a tensor.
func (g given) block(from, to []int) []byte {
	b, size := g.bytes, g.element()
	var cut func(b []byte, dim int) []byte
	cut = func(b []byte, dim int) []byte {
		if dim == len(g.shape) {
			return b
		}
		stride := size
		for _, d := range g.shape[dim+1:] {
			stride *= d
		}
		var all []byte
		for i := from[dim]; i < to[dim]; i++ {
			all = append(all, cut(b[i*stride:][:stride], dim+1)...)
		}
		return all
	}
	return cut(b, 0)
}

// Slices and shards of every shape go to memory in any order, and nothing else is touched.
func TestPartsAreLoaded(t *testing.T) {
	tensors := []given{some("a", "F32", 6, 10, 14), some("b", "BF16", 900, 1200), some("c", "I8", 31), some("d", "F64"), some("e", "F16", 2, 3, 4, 5, 6)}
	path := write(t, "model.safetensors", fileOf(tensors, nil))
	gputest.Each(t, func(t *testing.T, d *cuda.Device) {
		g := on(t, d)
		m := open(t, path)
		const room = 64 * mib
		b := g.buffer(room)
		for seed := range uint64(12) {
			r := rand.New(rand.NewPCG(seed, 2))
			g.write(b.Ptr(), bytes.Repeat([]byte{0xee}, 32*mib))
			want := bytes.Repeat([]byte{0xee}, 32*mib)
			type placed struct {
				part  load.Part
				bytes []byte
			}
			var all []placed
			for range 12 {
				of := tensors[r.IntN(len(tensors))]
				p, err := m.Part(of.name)
				require.NoError(t, err)
				from, to := make([]int, len(of.shape)), append([]int{}, of.shape...)
				for dim, n := range of.shape {
					if r.IntN(2) == 0 {
						continue
					}
					from[dim] = r.IntN(n + 1)
					to[dim] = from[dim] + r.IntN(n+1-from[dim])
					p, err = p.Slice(dim, from[dim], to[dim])
					require.NoError(t, err)
				}
				all = append(all, placed{p, of.block(from, to)})
				require.Equal(t, len(all[len(all)-1].bytes), p.Size())
			}
			at, gap := 0, int(seed%3)*77
			var parts []load.Part
			for _, i := range r.Perm(len(all)) {
				p := &all[i]
				p.part = p.part.To(b.Ptr()+cuda.Ptr(at), p.part.Size())
				copy(want[at:], p.bytes)
				at += p.part.Size() + gap
			}
			for _, p := range all {
				parts = append(parts, p.part)
			}
			digests, err := m.Load(t.Context(), load.Options{Reading: readings[seed%2], Threads: 2}, g.stream, parts...)
			require.NoError(t, err)
			require.True(t, bytes.Equal(want, g.read(b.Ptr(), len(want))), "seed %d", seed)
			for i, p := range all {
				require.Equal(t, digestOf(p.bytes), digests[i])
			}
		}
	})
}

func TestShardsMakeTheWhole(t *testing.T) {
	of := some("w", "BF16", 64, 96)
	path := write(t, "model.safetensors", fileOf([]given{of}, nil))
	g := on(t, gputest.Software(t))
	m := open(t, path)
	for dim, n := range of.shape {
		for _, ranks := range []int{1, 2, 32} {
			for rank := range ranks {
				whole, err := m.Part("w")
				require.NoError(t, err)
				p, err := whole.Shard(dim, rank, ranks)
				require.NoError(t, err)
				b := g.buffer(p.Size())
				_, err = m.Load(t.Context(), load.Options{}, g.stream, p.To(b.Ptr(), b.Len()))
				require.NoError(t, err)
				from, to := []int{0, 0}, append([]int{}, of.shape...)
				from[dim], to[dim] = n/ranks*rank, n/ranks*(rank+1)
				require.Equal(t, of.block(from, to), g.read(b.Ptr(), b.Len()))
				require.Equal(t, to[dim]-from[dim], p.Shape()[dim])
			}
		}
	}
}

func TestWhatCannotBeLoadedIsRefused(t *testing.T) {
	path := write(t, "model.safetensors", fileOf([]given{some("w", "F32", 8, 6), some("v", "F32", 4)}, nil))
	g := on(t, gputest.Software(t))
	m, other := open(t, path), open(t, path)
	b := g.buffer(kib)
	g.write(b.Ptr(), make([]byte, kib))
	w, err := m.Part("w")
	require.NoError(t, err)
	v, err := m.Part("v")
	require.NoError(t, err)
	foreign, err := other.Part("w")
	require.NoError(t, err)

	_, err = m.Part("x")
	require.ErrorIs(t, err, load.ErrNoTensor)
	require.ErrorContains(t, err, path)
	for _, f := range []func() error{
		func() error { return gputest.Err(w.Slice(2, 0, 1)) },
		func() error { return gputest.Err(w.Slice(-1, 0, 1)) },
		func() error { return gputest.Err(w.Shard(0, 0, 0)) },
		func() error { return gputest.Err(w.Shard(0, 2, 2)) },
		func() error { return gputest.Err(w.Shard(0, 0, 3)) },
		func() error { return gputest.Err(w.Shard(0, -1, 2)) },
		func() error { return gputest.Err(load.Part{}.Slice(0, 0, 0)) },
		func() error { return gputest.Err(load.Part{}.Shard(0, 0, 1)) },
		func() error { return gputest.Err(m.Layout(8)) },
		func() error { return gputest.Err(m.Layout(48)) },
	} {
		require.ErrorIs(t, f(), cuda.ErrInvalidArgument)
	}
	for _, bounds := range [][2]int{{-1, 2}, {0, 9}, {3, 2}, {1 << 62, 1 << 62}} {
		require.ErrorIs(t, gputest.Err(w.Slice(0, bounds[0], bounds[1])), cuda.ErrOutOfRange)
	}

	all := func(p ...load.Part) error { return gputest.Err(m.Load(t.Context(), load.Options{}, g.stream, p...)) }
	require.ErrorIs(t, all(w.To(b.Ptr(), 191)), cuda.ErrOutOfRange)
	require.ErrorIs(t, all(w.To(0, 192)), cuda.ErrOutOfRange)
	require.ErrorIs(t, all(w), cuda.ErrOutOfRange)
	require.ErrorIs(t, all(load.Part{}), cuda.ErrInvalidArgument)
	require.ErrorIs(t, all(foreign.To(b.Ptr(), 192)), cuda.ErrInvalidArgument)
	require.ErrorIs(t, all(w.To(b.Ptr(), 192), v.To(b.Ptr()+191, 16)), cuda.ErrInvalidArgument)
	require.ErrorIs(t, all(v.To(b.Ptr()+191, 16), w.To(b.Ptr(), 192)), cuda.ErrInvalidArgument)
	empty, err := w.Slice(0, 3, 3)
	require.NoError(t, err)
	err = all(v.To(b.Ptr()+100, 16), empty.To(b.Ptr()+96, 0), w.To(b.Ptr(), 192))
	require.ErrorIs(t, err, cuda.ErrInvalidArgument, "an empty part lies between them")
	require.ErrorContains(t, err, `"w"`)
	require.ErrorContains(t, err, `"v"`)
	require.NoError(t, all(w.To(b.Ptr(), 192), empty.To(b.Ptr()+96, 0), v.To(b.Ptr()+192, 16)))
	require.NoError(t, all())

	with := func(ctx context.Context, o load.Options, s *cuda.Stream) error {
		return gputest.Err(m.Load(ctx, o, s, v.To(b.Ptr(), 16)))
	}
	require.ErrorIs(t, with(nil, load.Options{}, g.stream), cuda.ErrInvalidArgument)
	require.ErrorIs(t, with(t.Context(), load.Options{}, nil), cuda.ErrInvalidArgument)
	require.ErrorIs(t, with(t.Context(), load.Options{Reading: 3}, g.stream), cuda.ErrInvalidArgument)
	require.ErrorIs(t, with(t.Context(), load.Options{Threads: -1}, g.stream), cuda.ErrInvalidArgument)
	closed, err := g.device.NewStream(cuda.StreamOptions{})
	require.NoError(t, err)
	require.NoError(t, closed.Close())
	require.ErrorIs(t, with(t.Context(), load.Options{}, closed), cuda.ErrClosed)
	stopped, cancel := context.WithCancel(t.Context())
	cancel()
	require.ErrorIs(t, with(stopped, load.Options{}, g.stream), context.Canceled)

	l, err := m.Layout(0)
	require.NoError(t, err)
	into := func(l *handles.Manifest, n int) error {
		return gputest.Err(m.LoadAll(t.Context(), load.Options{}, g.stream, l, b.Ptr(), n))
	}
	require.ErrorIs(t, into(l, l.Bytes-1), cuda.ErrOutOfRange)
	require.ErrorIs(t, into(nil, kib), cuda.ErrInvalidArgument)
	require.ErrorIs(t, into(&handles.Manifest{Bytes: -1}, kib), handles.ErrManifest)
	twice := *l
	twice.Bytes, twice.Tensors = kib, append([]handles.Tensor{}, l.Tensors...)
	twice.Tensors[1] = twice.Tensors[0]
	twice.Tensors[1].Offset = 512
	require.ErrorIs(t, into(&twice, kib), handles.ErrManifest)
	wrong := *l
	wrong.Tensors = append([]handles.Tensor{}, l.Tensors...)
	wrong.Tensors[0].Shape = []int{6, 8}
	require.ErrorIs(t, into(&wrong, kib), handles.ErrMismatch)
	wrong.Tensors[0] = l.Tensors[0]
	wrong.Tensors[0].Strides = make([]int, len(wrong.Tensors[0].Shape))
	require.ErrorIs(t, into(&wrong, kib), handles.ErrMismatch)
	wrong.Tensors[0] = l.Tensors[0]
	wrong.Tensors[1].Offset = 8
	require.ErrorIs(t, into(&wrong, kib), handles.ErrManifest)
	wrong.Tensors[0].Alias, wrong.Tensors[1].Alias = 1, 1
	require.ErrorContains(t, into(&wrong, kib), "shares memory with another")

	verified := func(ctx context.Context) error { return gputest.Err(m.Verify(ctx, load.Options{}, l)) }
	require.ErrorIs(t, verified(stopped), context.Canceled)
	require.ErrorIs(t, verified(nil), cuda.ErrInvalidArgument)
	require.ErrorIs(t, gputest.Err(m.Verify(t.Context(), load.Options{Threads: 2000}, l)), cuda.ErrInvalidArgument)

	z, err := vmm.Suspend(t.Context(), vmm.SuspendOptions{}, b)
	require.NoError(t, err)
	require.ErrorIs(t, all(v.To(b.Ptr(), 16)), cuda.ErrSuspended)
	require.NoError(t, z.Resume(t.Context()))

	require.NoError(t, m.Close())
	require.NoError(t, m.Close())
	require.ErrorIs(t, all(v.To(b.Ptr(), 16)), cuda.ErrClosed)
	require.ErrorIs(t, into(l, kib), cuda.ErrClosed)
	require.ErrorIs(t, gputest.Err(m.Verify(t.Context(), load.Options{}, l)), cuda.ErrClosed)
}

// A load waits for the work on the stream, and on one that captures it is refused.
func TestTheStreamComesFirst(t *testing.T) {
	path := write(t, "model.safetensors", fileOf([]given{some("w", "F32", 8, 6)}, nil))
	m, sys := sim.Open(t)
	g := on(t, sys.Devices()[0])
	model := open(t, path)
	b := g.buffer(192)
	w, err := model.Part("w")
	require.NoError(t, err)
	release := m.Hold(g.stream.Handle())
	require.NoError(t, g.stream.Memset(b.Ptr(), 1, 192))
	done := make(chan error, 1)
	go func() {
		_, err := model.Load(t.Context(), load.Options{}, g.stream, w.To(b.Ptr(), 192))
		done <- err
	}()
	select {
	case err := <-done:
		t.Errorf("it did not wait: %v", err)
	case <-time.After(50 * time.Millisecond):
	}
	release()
	require.NoError(t, <-done)
	require.Equal(t, some("w", "F32", 8, 6).bytes, g.read(b.Ptr(), 192))

	graph, err := g.stream.WithCapture(cuda.CaptureOptions{}, func() error {
		_, err := model.Load(t.Context(), load.Options{}, g.stream, w.To(b.Ptr(), 192))
		require.ErrorIs(t, err, cuda.ErrCapturing)
		return nil
	})
	require.NoError(t, err)
	require.NoError(t, graph.Close())
}

// What is written while it is loaded is an error that names the file.
func TestAFileThatChanges(t *testing.T) {
	tensors := []given{some("w", "F32", 3*mib/4), some("v", "F32", 4)}
	whole := fileOf(tensors, nil)
	for name, change := range map[string]func(path string) error{
		"shorter":  func(path string) error { return os.Truncate(path, int64(len(whole))-mib) },
		"empty":    func(path string) error { return os.Truncate(path, 0) },
		"longer":   func(path string) error { return os.Truncate(path, int64(len(whole))+1) },
		"modified": func(path string) error { return os.Chtimes(path, time.Time{}, time.Now().Add(time.Hour)) },
	} {
		t.Run(name, func(t *testing.T) {
			for _, during := range []bool{false, true} {
				g := on(t, gputest.Software(t))
				path := write(t, "model.safetensors", whole)
				m := open(t, path)
				l, err := m.Layout(0)
				require.NoError(t, err)
				b := g.buffer(l.Bytes)
				o := load.Options{Threads: 1}
				if during {
					o.Progress = func(p load.Progress) { require.NoError(t, change(path)) }
				} else {
					require.NoError(t, change(path))
				}
				_, err = m.LoadAll(t.Context(), o, g.stream, l, b.Ptr(), b.Len())
				require.ErrorIs(t, err, load.ErrChanged)
				var e *load.Error
				require.ErrorAs(t, err, &e)
				require.Equal(t, path, e.File)
				require.NotEmpty(t, e.Hint)
			}
		})
	}
	t.Run("shorter while it is read", func(t *testing.T) {
		m, sys := sim.Open(t)
		g := on(t, sys.Devices()[0])
		path := write(t, "model.safetensors", fileOf([]given{some("w", "U8", 32*mib)}, nil))
		model := open(t, path)
		l, err := model.Layout(0)
		require.NoError(t, err)
		b := g.buffer(l.Bytes)
		release := m.Hold(g.stream.Handle())
		require.NoError(t, g.stream.Memset(b.Ptr(), 1, l.Bytes))
		var once sync.Once
		_, err = model.LoadAll(t.Context(), load.Options{Threads: 1, Progress: func(load.Progress) { // two pieces are read
			once.Do(func() {
				require.NoError(t, os.Truncate(path, 16*mib))
				release()
			})
		}}, g.stream, l, b.Ptr(), b.Len())
		require.ErrorIs(t, err, load.ErrChanged)
		require.ErrorContains(t, err, "shorter than it was")
		var e *load.Error
		require.ErrorAs(t, err, &e)
		require.Equal(t, "w", e.Tensor)
	})
	t.Run("replaced", func(t *testing.T) {
		g := on(t, gputest.Software(t))
		path := write(t, "model.safetensors", whole)
		m := open(t, path)
		require.NoError(t, os.Rename(write(t, filepath.Join(filepath.Dir(path), "new"), []byte("other")), path))
		l, err := m.Layout(0)
		require.NoError(t, err)
		b := g.buffer(l.Bytes)
		made, err := m.LoadAll(t.Context(), load.Options{}, g.stream, l, b.Ptr(), b.Len())
		require.NoError(t, err, "the file that was opened is the same as before")
		g.holds(made, b.Ptr(), tensors)
	})
}

// A load ends within a tenth of a second of its context, even if the GPU is held up, and the copies
// that it submitted disturb no later one. The best of some attempts counts: the machine may be busy.
func TestALoadIsCanceled(t *testing.T) {
	m, sys := sim.Open(t)
	g := on(t, sys.Devices()[0])
	tensors := []given{some("w", "U8", 64*mib)}
	path := write(t, "model.safetensors", fileOf(tensors, nil))
	model := open(t, path)
	l, err := model.Layout(0)
	require.NoError(t, err)
	b := g.buffer(l.Bytes)
	best := time.Hour
	for range 5 {
		release := m.Hold(g.stream.Handle())
		require.NoError(t, g.stream.Memset(b.Ptr(), 1, l.Bytes))
		ctx, cancel := context.WithCancelCause(t.Context())
		reason := errors.New("a reason")
		var at time.Time
		_, err = model.LoadAll(ctx, load.Options{Threads: 2, Progress: func(p load.Progress) {
			require.Zero(t, p.Done)
			require.Equal(t, l.Bytes, p.Total)
			if at.IsZero() {
				at = time.Now()
				cancel(reason)
			}
		}}, g.stream, l, b.Ptr(), b.Len())
		best = min(best, time.Since(at))
		require.ErrorIs(t, err, reason)
		release()
	}
	require.Less(t, best, 100*time.Millisecond)
	made, err := model.LoadAll(t.Context(), load.Options{}, g.stream, l, b.Ptr(), b.Len())
	require.NoError(t, err)
	g.holds(made, b.Ptr(), tensors)
	require.NoError(t, sys.Drain(t.Context()))
}

// A load from slow storage is canceled within 100 ms, too, though a canceled load waits for the reads under
// way: a stand-in for the file has 64 MiB a second for 16 threads.
func TestASlowLoadIsCanceled(t *testing.T) {
	g := on(t, gputest.Software(t))
	model := open(t, write(t, "model.safetensors", fileOf([]given{some("w", "U8", 48*mib)}, nil)))
	model.Slow(64 * mib)
	l, err := model.Layout(0)
	require.NoError(t, err)
	b := g.buffer(l.Bytes)
	for _, how := range readings {
		best := time.Hour
		for i := 0; i < 3 && best > 100*time.Millisecond; i++ {
			ctx, cancel := context.WithCancel(t.Context())
			var at time.Time
			time.AfterFunc(200*time.Millisecond, func() { at = time.Now(); cancel() })
			_, err = model.LoadAll(ctx, load.Options{Reading: how, Threads: 16}, g.stream, l, b.Ptr(), b.Len())
			require.ErrorIs(t, err, context.Canceled)
			best = min(best, time.Since(at))
		}
		require.Less(t, best, 100*time.Millisecond, "%v", how)
	}
}

// Suspended memory gets its bytes from the files again, in whatever runs it comes back.
func TestASourceOfSuspendedMemory(t *testing.T) {
	tensors := assorted()
	gputest.Each(t, func(t *testing.T, d *cuda.Device) {
		g := on(t, d)
		b := g.buffer(12*mib + 777) // bytes behind the layout are no one's
		m := open(t, write(t, "model.safetensors", fileOf(tensors, nil)))
		l, err := m.Layout(0)
		require.NoError(t, err)
		made, err := m.LoadAll(t.Context(), load.Options{}, g.stream, l, b.Ptr(), b.Len())
		require.NoError(t, err)
		path := filepath.Join(t.TempDir(), "saved.safetensors") // with digests
		require.NoError(t, load.SaveSafetensors(t.Context(), load.SaveOptions{}, g.stream, path, load.SavingsOf(made, b.Ptr())...))
		m = open(t, path)
		source, err := m.Source(load.Options{}, made)
		require.NoError(t, err)
		for range 2 {
			z, err := vmm.Suspend(t.Context(), vmm.SuspendOptions{Source: source}, b)
			require.NoError(t, err)
			require.Zero(t, z.Report().Host)
			require.NoError(t, z.Resume(t.Context()))
			g.holds(made, b.Ptr(), tensors)
		}
		r := rand.New(rand.NewPCG(1, 3))
		g.write(b.Ptr(), bytes.Repeat([]byte{0xee}, b.Len()))
		for at := 0; at < b.Len(); {
			n := min(1+r.IntN(3*mib), b.Len()-at)
			require.NoError(t, source.Fill(t.Context(), g.stream, b, b.Ptr()+cuda.Ptr(at), n))
			at += n
		}
		g.holds(made, b.Ptr(), tensors)
		require.Equal(t, bytes.Repeat([]byte{0xee}, b.Len()-l.Bytes), g.read(b.Ptr()+cuda.Ptr(l.Bytes), b.Len()-l.Bytes))

		z, err := vmm.Suspend(t.Context(), vmm.SuspendOptions{Source: source}, b)
		require.NoError(t, err)
		require.NoError(t, os.Chtimes(path, time.Time{}, time.Now().Add(time.Hour)))
		require.ErrorIs(t, z.Resume(t.Context()), load.ErrChanged)
	})
}

// Every driver call of a load fails, and nothing is left; the next load succeeds.
func TestEveryFailureLeavesNothing(t *testing.T) {
	path := write(t, "model.safetensors", fileOf([]given{some("w", "U8", 3*mib), some("v", "F32", 100)}, nil))
	m, sys := sim.Open(t)
	g := on(t, sys.Devices()[0])
	model := open(t, path)
	l, err := model.Layout(0)
	require.NoError(t, err)
	b := g.buffer(l.Bytes)
	target := filepath.Join(t.TempDir(), "saved")
	for name, run := range map[string]func() error{
		"load": func() error {
			return gputest.Err(model.LoadAll(t.Context(), load.Options{Threads: 2}, g.stream, l, b.Ptr(), b.Len()))
		},
		"save": func() error {
			return load.SaveSafetensors(t.Context(), load.SaveOptions{Threads: 2}, g.stream, target, load.SavingsOf(l, b.Ptr())...)
		},
	} {
		require.NoError(t, run())
		for after, struck := 0, true; struck; after++ {
			sys.TrimHost()
			calls := 0
			for _, n := range m.Counts() {
				calls += n
			}
			remove := m.Inject(sim.Fault{After: after, Result: 999})
			err := run()
			remove()
			struck = err != nil || after < 8
			if err != nil {
				var e *cuda.Error
				require.ErrorAs(t, err, &e, "%s %d", name, after)
			}
			left, _ := filepath.Glob(filepath.Join(filepath.Dir(target), ".*"))
			require.Empty(t, left)
			require.NoError(t, sys.Drain(t.Context()))
			require.NoError(t, run())
			require.Less(t, after, 1000)
		}
	}
}

// The text of an error names what can be acted upon, and controls no terminal.
func TestErrorsArePlain(t *testing.T) {
	_, err := load.OpenSafetensors("no\x1b[2Jfile")
	require.ErrorIs(t, err, os.ErrNotExist)
	require.NotContains(t, err.Error(), "\x1b")
	require.Contains(t, err.Error(), "; ", "it says what to do")
}

// Many small tensors, each at an address of its own or in another order than the file's, have their bytes
// and digests, gaps in a layout are zero, and what lies between parts stays. The device distributes them.
func TestManySmallTensors(t *testing.T) {
	r := rand.New(rand.NewPCG(4, 4))
	var tensors []given
	for i := range 5000 { // which are prepared in parallel
		tensors = append(tensors, some(fmt.Sprintf("t%d", i), "U8", r.IntN(1000)))
	}
	path := write(t, "small.safetensors", fileOf(tensors, nil))
	gputest.Each(t, func(t *testing.T, d *cuda.Device) {
		g, m := on(t, d), open(t, path)
		natural, err := m.Layout(0)
		require.NoError(t, err)
		l := &handles.Manifest{Bytes: 100}
		for _, i := range r.Perm(len(natural.Tensors)) {
			x := natural.Tensors[i]
			x.Offset = l.Bytes
			l.Bytes += (x.Size()+15)/16*16 + 16*r.IntN(3)
			l.Tensors = append(l.Tensors, x)
		}
		l.Bytes += 50
		b := g.buffer(2 * l.Bytes)
		g.write(b.Ptr(), bytes.Repeat([]byte{0xee}, b.Len()))
		made, err := m.LoadAll(t.Context(), load.Options{Threads: 3}, g.stream, l, b.Ptr(), b.Len())
		require.NoError(t, err)
		g.holds(made, b.Ptr(), tensors)
		image := g.read(b.Ptr(), b.Len())
		end := 0
		for _, x := range made.Tensors {
			require.Equal(t, make([]byte, x.Offset-end), image[end:x.Offset], "the gap is zero")
			end = x.Offset + x.Size()
		}
		require.Equal(t, make([]byte, l.Bytes-end), image[end:l.Bytes])
		require.Equal(t, bytes.Repeat([]byte{0xee}, b.Len()-l.Bytes), image[l.Bytes:])

		want := bytes.Repeat([]byte{0xee}, b.Len())
		g.write(b.Ptr(), want)
		var parts []load.Part
		at := 3
		for _, i := range r.Perm(len(tensors)) {
			p, err := m.Part(tensors[i].name)
			require.NoError(t, err)
			parts = append(parts, p.To(b.Ptr()+cuda.Ptr(at), p.Size()))
			copy(want[at:], tensors[i].bytes)
			at += p.Size() + r.IntN(9)
		}
		digests, err := m.Load(t.Context(), load.Options{Threads: 3}, g.stream, parts...)
		require.NoError(t, err)
		require.True(t, bytes.Equal(want, g.read(b.Ptr(), b.Len())))
		slices.Sort(digests)
		for _, x := range made.Tensors {
			_, there := slices.BinarySearch(digests, x.Digest)
			require.True(t, there || x.Size() == 0, x.Name)
		}
	})
}

// The bytes of small tensors take few copies, however they lie.
func TestSmallTensorsAreFewCopies(t *testing.T) {
	machine, sys := sim.Open(t)
	g := on(t, sys.Devices()[0])
	var tensors []given
	for i := range 500 {
		tensors = append(tensors, some(fmt.Sprintf("t%d", i), "U8", 4096))
	}
	m := open(t, write(t, "small.safetensors", fileOf(tensors, nil)))
	b := g.buffer(2 * 500 * 4096)
	var parts []load.Part
	for i, x := range tensors {
		p, err := m.Part(x.name)
		require.NoError(t, err)
		parts = append(parts, p.To(b.Ptr()+cuda.Ptr(2*i*4096), 4096))
	}
	copies := machine.Count("cuMemcpyHtoDAsync")
	_, err := m.Load(t.Context(), load.Options{}, g.stream, parts...)
	require.NoError(t, err)
	require.LessOrEqual(t, machine.Count("cuMemcpyHtoDAsync")-copies, 4)
}
