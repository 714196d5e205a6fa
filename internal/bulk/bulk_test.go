package bulk_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/cuvmm/cuvmm/cuda"
	"github.com/cuvmm/cuvmm/cuda/sim"
	"github.com/cuvmm/cuvmm/internal/bulk"
	"github.com/cuvmm/cuvmm/internal/core"
	"github.com/cuvmm/cuvmm/internal/driver"
	"github.com/cuvmm/cuvmm/internal/limits"
	"github.com/cuvmm/cuvmm/internal/test/gputest"
	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

const (
	mib  = 1 << 20
	slab = bulk.SlabBytes
)

var o = bulk.Options{Op: "test", Threads: 3}

// gpu is a device whose memory a test writes and reads.
type gpu struct {
	*bulk.Engine
	device *cuda.Device
	stream *cuda.Stream
	ctx    *core.Context
}

func on(t testing.TB, d *cuda.Device) gpu {
	t.Helper()
	c, err := core.ContextOf("test", d)
	require.NoError(t, err)
	s, err := d.NewStream(cuda.StreamOptions{})
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, s.Close()) })
	return gpu{bulk.Of(c), d, s, c}
}

// memory is device memory of a test.
func (g gpu) memory(t testing.TB, n int) driver.Ptr {
	t.Helper()
	drv := g.ctx.System().Drv
	p, r := drv.MemAlloc(g.ctx.Handle, uint64(n))
	require.Equal(t, driver.Success, r)
	t.Cleanup(func() {
		r := drv.MemFree(g.ctx.Handle, p)
		require.True(t, r == driver.Success || r.Lost(), r.String())
	})
	return p
}

func (g gpu) write(t testing.TB, p driver.Ptr, b []byte) {
	t.Helper()
	require.NoError(t, g.stream.Upload(cuda.Ptr(p), b))
	require.NoError(t, g.stream.Synchronize())
}

func (g gpu) read(t testing.TB, p driver.Ptr, n int) []byte {
	t.Helper()
	b := make([]byte, n)
	require.NoError(t, g.stream.Download(b, cuda.Ptr(p)))
	return b
}

func random(n int, seed uint64) []byte {
	b := make([]byte, n)
	c := rand.NewChaCha8([32]byte{byte(seed), byte(seed >> 8), 1})
	_, _ = c.Read(b)
	return b
}

func same(t testing.TB, want, got []byte, at string) {
	t.Helper()
	require.True(t, bytes.Equal(want, got), "%s: the bytes differ", at)
}

// cut returns n bytes from p on as segments, some of them empty, at times in another order.
func cut(r *rand.Rand, p driver.Ptr, n, most int) (segments []bulk.Segment) {
	for at := 0; at < n; {
		part := min(r.IntN(most), n-at)
		segments = append(segments, bulk.Segment{Ptr: p + driver.Ptr(at), Bytes: uint64(part)})
		at += part
	}
	if r.IntN(2) == 0 {
		r.Shuffle(len(segments), func(i, j int) { segments[i], segments[j] = segments[j], segments[i] })
	}
	return segments
}

// gather returns what the segments hold, of memory that begins at p and holds b.
func gather(p driver.Ptr, b []byte, segments []bulk.Segment) (all []byte) {
	for _, s := range segments {
		all = append(all, b[s.Ptr-p:][:s.Bytes]...)
	}
	return all
}

// scatter is the reverse of gather.
func scatter(p driver.Ptr, n int, segments []bulk.Segment, all []byte) []byte {
	b := make([]byte, n)
	for _, s := range segments {
		all = all[copy(b[s.Ptr-p:][:s.Bytes], all):]
	}
	return b
}

// What goes out comes in, from any segments to any others, at any offset.
func TestOutAndIn(t *testing.T) {
	gputest.Each(t, func(t *testing.T, d *cuda.Device) {
		g := on(t, d)
		const size = 2*slab + 3*mib + 17
		from, to := g.memory(t, size), g.memory(t, size)
		b := random(size, 1)
		g.write(t, from, b)
		for seed := range uint64(6) {
			r := rand.New(rand.NewPCG(seed, 1))
			most := []int{size + 1, 9 * mib, 700_000}[seed%3]
			offset := uint64(seed%2) * uint64(r.IntN(slab))
			backing, err := g.Reserve(t.Context(), offset+size, seed%2 == 0, o)
			require.NoError(t, err)
			out, in := cut(r, from, size, most), cut(r, to, size, most)
			var m bulk.Meter
			counted := o
			counted.Meter = &m
			require.NoError(t, backing.Out(t.Context(), out, offset, counted))
			require.NoError(t, backing.In(t.Context(), in, offset, counted))
			same(t, scatter(to, size, in, gather(from, b, out)), g.read(t, to, size), fmt.Sprint("seed ", seed))
			require.GreaterOrEqual(t, backing.Pinned(), backing.Bytes())
			p := m.Progress()
			require.EqualValues(t, 2*size, p.Done)
			require.EqualValues(t, 2*size, p.Total)
			require.Positive(t, p.Rate)
			require.Zero(t, p.Remaining)
			backing.Release()
		}
	})
}

// Memory may be taken behind the bytes that have passed, and made ahead of those that are awaited.
func TestBytesThatPassAndAreAwaited(t *testing.T) {
	gputest.Each(t, func(t *testing.T, d *cuda.Device) {
		g := on(t, d)
		const size = 36 * bulk.PieceBytes // more than are in flight
		p := g.memory(t, size)
		b := random(size, 1)
		g.write(t, p, b)
		all := []bulk.Segment{{Ptr: p, Bytes: size}}
		backing, err := g.Reserve(t.Context(), size, true, o)
		require.NoError(t, err)
		defer backing.Release()
		out := o
		passed, times := uint64(0), 0
		out.Passed = func(n uint64) {
			require.Greater(t, n, passed)
			g.write(t, p+driver.Ptr(passed), make([]byte, n-passed))
			passed = n
			times++
		}
		require.NoError(t, backing.Out(t.Context(), all, 0, out))
		require.EqualValues(t, size, passed)
		require.Greater(t, times, 1)

		in := o
		made := uint64(0)
		in.Await = func(n uint64) error {
			require.LessOrEqual(t, n-made, uint64(bulk.PieceBytes))
			made = n
			return nil
		}
		require.NoError(t, backing.In(t.Context(), all, 0, in))
		require.EqualValues(t, size, made)
		same(t, b, g.read(t, p, size), "in")
		boom := errors.New("boom")
		in.Await = func(n uint64) error {
			if n > 2*bulk.PieceBytes {
				return boom
			}
			return nil
		}
		require.ErrorIs(t, backing.In(t.Context(), all, 0, in), boom)
	})
}

// Runs of several backings are one operation: the copies of the next are submitted while those of the last are in flight,
// whether their memory is pinned or not.
func TestRunsOfSeveralBackings(t *testing.T) {
	m, sys := sim.Open(t)
	g := on(t, sys.Devices()[0])
	sizes := []int{slab + mib + 3, 5, 2 * mib}
	var runs []bulk.Run
	var all []byte
	for i, size := range sizes {
		p := g.memory(t, size)
		b := random(size, uint64(i))
		g.write(t, p, b)
		all = append(all, b...)
		backing, err := g.Reserve(t.Context(), uint64(size)+7, i == 1, o)
		require.NoError(t, err)
		defer backing.Release()
		runs = append(runs, bulk.Run{Backing: backing, Segments: []bulk.Segment{{Ptr: p, Bytes: uint64(size)}}, Offset: 7})
	}
	check := func(what string) {
		var got []byte
		for i, r := range runs {
			got = append(got, g.read(t, r.Segments[0].Ptr, sizes[i])...)
		}
		same(t, all, got, what)
	}
	for _, pinned := range []bool{false, true} {
		out := o
		passed := uint64(0)
		out.Passed = func(n uint64) { passed = n }
		require.NoError(t, bulk.Out(t.Context(), runs, out))
		if pinned {
			require.EqualValues(t, len(all), passed)
		}
		for i, r := range runs {
			g.write(t, r.Segments[0].Ptr, make([]byte, sizes[i]))
		}
		in := o
		in.After = []*core.Stream{core.StreamOf(g.stream)}
		awaited := uint64(0)
		in.Await = func(n uint64) error { awaited = n; return nil }
		release := m.Hold(g.stream.Handle())
		require.NoError(t, g.stream.Memset(cuda.Ptr(runs[0].Segments[0].Ptr), 1, 1)) // which is not done
		copies := m.Count("cuMemcpyHtoDAsync")
		ended := make(chan error)
		go func() { ended <- bulk.In(t.Context(), runs, in) }()
		require.Eventually(t, func() bool { return m.Count("cuMemcpyHtoDAsync") == copies+7 }, time.Minute, time.Millisecond, "all of them")
		release()
		require.NoError(t, <-ended)
		require.EqualValues(t, len(all), awaited)
		check(fmt.Sprint("pinned ", pinned))
	}
	require.NoError(t, bulk.Out(t.Context(), nil, o))
	runs[2].Offset = 8
	require.ErrorIs(t, bulk.In(t.Context(), runs, o), cuda.ErrOutOfRange)
	check("nothing was copied")
}

// What goes to the host has two pieces in flight, since small copies of other streams wait for them.
func TestFewBytesAreInFlightToTheHost(t *testing.T) {
	m, sys := sim.Open(t)
	g := on(t, sys.Devices()[0])
	const size = 40 * bulk.PieceBytes
	p := g.memory(t, size)
	backing, err := g.Reserve(t.Context(), size, true, o)
	require.NoError(t, err)
	defer backing.Release()
	var submitted, passed, most int
	m.OnCall(func(call string) {
		if call == "cuMemcpyDtoHAsync" {
			submitted += bulk.PieceBytes
			most = max(most, submitted-passed)
		}
	})
	out := o
	out.Passed = func(n uint64) { passed = int(n) }
	require.NoError(t, backing.Out(t.Context(), []bulk.Segment{{Ptr: p, Bytes: size}}, 0, out))
	m.OnCall(nil)
	require.Equal(t, size, submitted)
	require.LessOrEqual(t, most, 2*bulk.PieceBytes)
}

// A stream of bytes is read into any segments, and written from them, whatever the alignment
// of the reader.
func TestFillAndDrain(t *testing.T) {
	gputest.Each(t, func(t *testing.T, d *cuda.Device) {
		g := on(t, d)
		for i, size := range []int{1, mib, 3*mib + 5, 40*mib + 17} {
			r := rand.New(rand.NewPCG(uint64(i), 2))
			p := g.memory(t, size)
			segments, b := cut(r, p, size, size/3+2), random(size, uint64(i))
			err := g.Fill(t.Context(), segments, func(_ context.Context, buf []byte, offset uint64, n int) (int, error) {
				skip := int(offset % 4096) // as of a file that is read by whole blocks
				require.GreaterOrEqual(t, len(buf), n+bulk.Slack)
				copy(buf[skip:], b[offset:][:n])
				return skip, nil
			}, o)
			require.NoError(t, err)
			same(t, scatter(p, size, segments, b), g.read(t, p, size), "fill")

			var mu sync.Mutex
			got := make([]byte, size)
			require.NoError(t, g.Drain(t.Context(), segments, func(_ context.Context, piece []byte, offset uint64) error {
				mu.Lock()
				defer mu.Unlock()
				require.Equal(t, len(piece), copy(got[offset:], piece))
				return nil
			}, o))
			same(t, b, got, "drain")

			inOrder := uint64(0)
			require.NoError(t, g.Drain(t.Context(), segments, func(_ context.Context, piece []byte, offset uint64) error {
				require.Equal(t, inOrder, offset)
				inOrder += uint64(len(piece))
				return nil
			}, bulk.Options{Op: "test", Threads: 1}))
			require.EqualValues(t, size, inOrder)
		}
	})
}

// An error of a reader or a writer ends the operation, and is returned.
func TestReadersAndWritersFail(t *testing.T) {
	g := on(t, gputest.Software(t))
	const size = 40 * mib
	p, boom := g.memory(t, size), errors.New("boom")
	all := []bulk.Segment{{Ptr: p, Bytes: size}}
	calls := 0
	err := g.Fill(t.Context(), all, func(_ context.Context, _ []byte, offset uint64, _ int) (int, error) {
		if offset > 0 {
			return 0, boom
		}
		calls++
		return 0, nil
	}, o)
	require.ErrorIs(t, err, boom)
	require.Equal(t, 1, calls)
	require.ErrorIs(t, g.Drain(t.Context(), all, func(context.Context, []byte, uint64) error { return boom }, o), boom)
	for _, at := range []int{-1, bulk.PieceBytes} {
		err = g.Fill(t.Context(), all, func(context.Context, []byte, uint64, int) (int, error) { return at, nil }, o)
		require.ErrorIs(t, err, cuda.ErrInvalidArgument)
	}
}

func TestJoin(t *testing.T) {
	all := []bulk.Segment{{Ptr: 100, Bytes: 10}, {}, {Ptr: 110, Bytes: 5}, {Ptr: 118, Bytes: 2}, {Ptr: 124, Bytes: 1}, {Ptr: 90, Bytes: 5}, {Ptr: 92, Bytes: 9}}
	require.Equal(t, []bulk.Segment{{Ptr: 100, Bytes: 15}, {Ptr: 118, Bytes: 2}, {Ptr: 124, Bytes: 1}, {Ptr: 90, Bytes: 5}, {Ptr: 92, Bytes: 9}}, bulk.Join(all, 0))
	require.Equal(t, []bulk.Segment{{Ptr: 100, Bytes: 20}, {Ptr: 124, Bytes: 1}, {Ptr: 90, Bytes: 5}, {Ptr: 92, Bytes: 9}}, bulk.Join(all, 3), "a gap of 4 stays, and so do overlaps")
	require.Equal(t, bulk.Segment{Ptr: 100, Bytes: 10}, all[0], "the list is not changed")
	require.Empty(t, bulk.Join(nil, 5))
}

// Segments that follow each other are one copy, up to the size of a piece, and small ones
// share an event and, where the driver has it, a call.
func TestSmallSegmentsAreFewCalls(t *testing.T) {
	t.Run("in batches", func(t *testing.T) { fewCalls(t, 13000, 0, 16) })
	t.Run("one by one", func(t *testing.T) { fewCalls(t, 12090, 1000, 0) })
}

func fewCalls(t *testing.T, version, apartCopies, apartBatches int) {
	m, sys := sim.Open(t, sim.Options{DriverVersion: version})
	g := on(t, sys.Devices()[0])
	const count, n = 1000, 4096
	p := g.memory(t, 2*count*n)
	b, err := g.Reserve(t.Context(), 2*count*n, true, o)
	require.NoError(t, err)
	defer b.Release()
	var side, apart []bulk.Segment
	for i := range count {
		side = append(side, bulk.Segment{Ptr: p + driver.Ptr(i*n), Bytes: n})
		apart = append(apart, bulk.Segment{Ptr: p + driver.Ptr(2*i*n), Bytes: n})
	}
	for _, c := range []struct {
		segments               []bulk.Segment
		copies, batches, marks int
	}{{side, 1, 0, 1}, {apart, apartCopies, apartBatches, 16}, {bulk.Join(apart, n), 2, 0, 2}} {
		copies, batches, marks := m.Count("cuMemcpyDtoHAsync"), m.Count("cuMemcpyBatchAsync"), m.Count("cuEventRecord")
		require.NoError(t, b.Out(t.Context(), c.segments, 0, o))
		require.Equal(t, c.copies, m.Count("cuMemcpyDtoHAsync")-copies)
		require.Equal(t, c.batches, m.Count("cuMemcpyBatchAsync")-batches)
		require.Equal(t, c.marks, m.Count("cuEventRecord")-marks)
	}
}

func TestNothingAndTooMuch(t *testing.T) {
	g := on(t, gputest.Software(t))
	for _, n := range []uint64{0, 1<<50 + 1} {
		_, err := g.Reserve(t.Context(), n, false, o)
		require.ErrorIs(t, err, cuda.ErrInvalidArgument)
	}
	b, err := g.Reserve(t.Context(), 10, false, o)
	require.NoError(t, err)
	defer b.Release()
	require.NoError(t, b.Out(t.Context(), []bulk.Segment{{}, {Ptr: 5}}, 10, o))
	for _, c := range []struct{ bytes, offset uint64 }{{11, 0}, {1, 10}, {0, 11}, {^uint64(0), 5}} {
		require.ErrorIs(t, b.In(t.Context(), []bulk.Segment{{Ptr: 5, Bytes: c.bytes}}, c.offset, o), cuda.ErrOutOfRange)
	}
	require.NoError(t, g.Fill(t.Context(), nil, nil, o))
	require.NoError(t, g.Drain(t.Context(), []bulk.Segment{{Ptr: 5}}, nil, o))
}

// Pinned memory is used again by later operations, whichever they are, and given back beyond
// the limit, by TrimHost and at the end.
func TestPinnedMemoryIsRetained(t *testing.T) {
	m, sys := sim.Open(t)
	g := on(t, sys.Devices()[0])
	const size = 3*slab + 5*mib // the rest takes 8 MiB
	p := g.memory(t, size)
	all := []bulk.Segment{{Ptr: p, Bytes: size}}
	cycle := func() {
		b, err := g.Reserve(t.Context(), size, false, o)
		require.NoError(t, err)
		require.NoError(t, b.Out(t.Context(), all, 0, o))
		require.NoError(t, b.In(t.Context(), all, 0, o))
		require.Equal(t, 1, countKind(sys.Live(), "host backing"))
		b.Release()
		require.Zero(t, countKind(sys.Live(), "host backing"))
	}
	cycle()
	require.EqualValues(t, 3*slab+8*mib, g.Retained())
	require.Equal(t, 4, m.Count("cuMemHostRegister"))
	cycle()
	require.Equal(t, 4, m.Count("cuMemHostRegister"))
	require.Zero(t, m.Count("cuMemHostUnregister"))
	require.Equal(t, 3, m.Count("cuStreamCreate"), "a stream of the test, and two that are used again")
	g.Retain(slab)
	cycle()
	require.LessOrEqual(t, g.Retained(), uint64(slab))
	require.NotZero(t, g.Retained())
	retained := g.Retained()
	require.EqualValues(t, retained, sys.TrimHost())
	require.Zero(t, g.Retained())
	require.Zero(t, m.Live()[sim.KindRegistration])
	cycle()
	require.Zero(t, bulk.Promised())
}

func countKind(live []string, kind string) (n int) {
	for _, l := range live {
		if len(l) >= len(kind) && bytes.Contains([]byte(l), []byte(kind)) {
			n++
		}
	}
	return n
}

// Memory is counted before it is taken, what another backing was promised too; retained memory
// is given back for it.
func TestLimits(t *testing.T) {
	_, sys := sim.Open(t)
	g := on(t, sys.Devices()[0])
	remaining := uint64(4 * slab)
	bulk.WithLimits(t, func() (limits.Host, error) {
		return limits.Host{{File: "/sys/fs/cgroup/memory.max", Group: "/", Bytes: 100 * slab, Used: 100*slab - remaining}}, errors.New("another limit is not known")
	})
	refused := func(n uint64, says string) {
		t.Helper()
		_, err := g.Reserve(t.Context(), n, false, o)
		require.ErrorIs(t, err, cuda.ErrOutOfMemory)
		require.EqualError(t, err, says)
		var e *limits.Exceeded
		require.ErrorAs(t, err, &e)
		require.Equal(t, n, e.Asked)
	}
	const remedy = "; ask for less, or raise the limit of the control group (memory.max; --memory of a container; MemoryMax of a service)"
	refused(5*slab, "test: out of memory: 80 MiB of host memory, and 64 MiB of 1600 MiB remain (/sys/fs/cgroup/memory.max)"+remedy)
	first, err := g.Reserve(t.Context(), 3*slab, false, o)
	require.NoError(t, err)
	refused(2*slab, "test: out of memory: 32 MiB of host memory, and 16 MiB of 1600 MiB remain (/sys/fs/cgroup/memory.max)"+remedy)
	second, err := g.Reserve(t.Context(), slab, true, o)
	require.NoError(t, err)
	require.EqualValues(t, 3*slab, bulk.Promised(), "what is pinned is counted by the system")
	first.Release()
	second.Release()
	require.Zero(t, bulk.Promised())

	require.EqualValues(t, slab, g.Retained())
	remaining = 3 * slab
	two, err := g.Reserve(t.Context(), 2*slab, false, o)
	require.NoError(t, err)
	require.Zero(t, g.Retained(), "it takes what is retained")
	two.Release()
	third, err := g.Reserve(t.Context(), slab, true, o)
	require.NoError(t, err)
	third.Release()
	require.EqualValues(t, slab, g.Retained())
	_, err = g.Reserve(t.Context(), 5*slab, false, o)
	require.ErrorIs(t, err, cuda.ErrOutOfMemory)
}

// onFirstCopy calls f at the next copy, which is submitted all the same.
func onFirstCopy(m *sim.Machine, f func()) {
	var once sync.Once
	m.OnCall(func(call string) {
		if strings.HasPrefix(call, "cuMemcpy") {
			once.Do(f)
		}
	})
}

// An operation whose context ends returns soon, also while its copies cannot end. Their memory
// is not used again before they have.
func TestCancel(t *testing.T) {
	m, sys := sim.Open(t)
	g := on(t, sys.Devices()[0])
	const size = 3 * slab
	p := g.memory(t, size)
	all := []bulk.Segment{{Ptr: p, Bytes: size}}
	behind := o
	behind.After = []*core.Stream{core.StreamOf(g.stream)}
	for name, run := range map[string]func(ctx context.Context) error{
		"out": func(ctx context.Context) error {
			b, err := g.Reserve(context.Background(), size, true, o)
			if err != nil {
				return err
			}
			defer b.Release()
			return b.Out(ctx, all, 0, behind)
		},
		"in": func(ctx context.Context) error {
			b, err := g.Reserve(context.Background(), size, true, o)
			if err != nil {
				return err
			}
			defer b.Release()
			return b.In(ctx, all, 0, behind)
		},
		"fill": func(ctx context.Context) error {
			return g.Fill(ctx, all, func(context.Context, []byte, uint64, int) (int, error) { return 0, nil }, behind)
		},
		"drain": func(ctx context.Context) error {
			return g.Drain(ctx, all, func(context.Context, []byte, uint64) error { return nil }, behind)
		},
	} {
		t.Run(name, func(t *testing.T) {
			sys.TrimHost()
			defer m.Hold(g.stream.Handle())()
			require.NoError(t, g.stream.Memset(cuda.Ptr(p), 1, 1)) // which is not done
			ctx, cancel := context.WithCancelCause(t.Context())
			boom := errors.New("boom")
			var ended time.Time
			onFirstCopy(m, func() { ended = time.Now(); cancel(boom) })
			require.ErrorIs(t, run(ctx), boom)
			require.Less(t, time.Since(ended), 5*time.Second) // the machine may be busy
			require.Zero(t, g.Retained(), "the memory is in use")
			require.NotZero(t, m.Live()[sim.KindRegistration])
			require.NotZero(t, sys.Stats().Pending)
			m.Release(g.stream.Handle())
			require.NoError(t, sys.Drain(context.Background()))
			require.NotZero(t, g.Retained())
		})
	}
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	_, err := g.Reserve(ctx, size, true, o)
	require.ErrorIs(t, err, context.Canceled)
	require.ErrorIs(t, g.Fill(ctx, all, nil, o), context.Canceled)
	require.ErrorIs(t, g.Drain(ctx, all, nil, o), context.Canceled)
}

// What an operation that was cancelled may still copy lands before what the next one copies.
func TestTheNextOperationComesBehindOneThatWasCancelled(t *testing.T) {
	m, sys := sim.Open(t)
	g := on(t, sys.Devices()[0])
	const size = 3 * mib
	p, old, want := g.memory(t, size), random(size, 1), random(size, 2)
	all := []bulk.Segment{{Ptr: p, Bytes: size}}
	g.write(t, p, old)
	b, err := g.Reserve(t.Context(), size, true, o)
	require.NoError(t, err)
	defer b.Release()
	require.NoError(t, b.Out(t.Context(), all, 0, o))

	defer m.Hold(g.stream.Handle())()
	require.NoError(t, g.stream.Memset(cuda.Ptr(p), 1, 1))
	ctx, cancel := context.WithCancel(t.Context())
	onFirstCopy(m, cancel)
	behind := o
	behind.After = []*core.Stream{core.StreamOf(g.stream)}
	require.ErrorIs(t, b.In(ctx, all, 0, behind), context.Canceled)
	filled := make(chan error, 1)
	go func() {
		filled <- g.Fill(t.Context(), all, func(_ context.Context, buf []byte, offset uint64, n int) (int, error) {
			copy(buf, want[offset:][:n])
			return 0, nil
		}, o)
	}()
	select {
	case err := <-filled:
		t.Fatal("it did not wait: ", err)
	case <-time.After(50 * time.Millisecond):
	}
	m.Release(g.stream.Handle())
	require.NoError(t, <-filled)
	require.NoError(t, sys.Drain(t.Context()))
	same(t, want, g.read(t, p, size), "the second operation")
}

// The context ends while memory is pinned: what is pinned by then is retained, and what is only
// promised is given back.
func TestCancelWhilePinning(t *testing.T) {
	m, sys := sim.Open(t)
	g := on(t, sys.Devices()[0])
	const size = 20 * slab
	p := g.memory(t, size)
	for _, ahead := range []bool{true, false} {
		sys.TrimHost()
		ctx, cancel := context.WithCancelCause(t.Context())
		boom := errors.New("boom")
		var pins atomic.Int64
		m.OnCall(func(call string) {
			if call == "cuMemHostRegister" && pins.Add(1) == 4 {
				cancel(boom)
			}
		})
		b, err := g.Reserve(ctx, size, ahead, o)
		if !ahead {
			require.NoError(t, err)
			err = b.Out(ctx, []bulk.Segment{{Ptr: p, Bytes: size}}, 0, o)
			require.Less(t, b.Pinned(), uint64(size))
			b.Release()
			require.NoError(t, sys.Drain(t.Context())) // copies may be in flight
		}
		m.OnCall(nil)
		require.ErrorIs(t, err, boom)
		require.Zero(t, bulk.Promised())
		require.NotZero(t, g.Retained())
		require.LessOrEqual(t, g.Retained(), uint64(4+o.Threads)*slab)
	}
}

// Copies come behind the named streams, which must not capture.
func TestAfter(t *testing.T) {
	gputest.Each(t, func(t *testing.T, d *cuda.Device) {
		g := on(t, d)
		const size = 3 * mib
		p := g.memory(t, size)
		all := []bulk.Segment{{Ptr: p, Bytes: size}}
		behind := o
		behind.After = []*core.Stream{core.StreamOf(g.stream)}
		want := bytes.Repeat([]byte{7}, size)
		require.NoError(t, g.stream.Memset(cuda.Ptr(p), 7, size))
		var got []byte
		require.NoError(t, g.Drain(t.Context(), all, func(_ context.Context, piece []byte, _ uint64) error {
			got = append(got, piece...)
			return nil
		}, bulk.Options{Op: "test", Threads: 1, After: behind.After}))
		same(t, want, got, "drain")
		graph, err := g.stream.WithCapture(cuda.CaptureOptions{}, func() error {
			b, err := g.Reserve(t.Context(), size, true, o)
			require.NoError(t, err)
			defer b.Release()
			require.ErrorIs(t, b.Out(t.Context(), all, 0, behind), cuda.ErrCapturing)
			require.NoError(t, b.Out(t.Context(), all, 0, o), "beside a capture")
			return g.stream.Memset(cuda.Ptr(p), 8, size)
		})
		require.NoError(t, err)
		require.NoError(t, graph.Close())
	})
}

// Whatever the length and the number of threads, the pieces fit into their room, and none is lost.
func TestPiecesOfAStream(t *testing.T) {
	for _, n := range []uint64{1, 4095, 4097, mib, 15*mib + 1, 100 * mib, 5 << 30} {
		for _, threads := range []int{1, 2, 3, 7, 16, 241, 1024} {
			lengths, most := bulk.Pieces(n, threads)
			sum := uint64(0)
			for i, l := range lengths {
				require.LessOrEqual(t, l, most)
				if i < len(lengths)-1 {
					require.Zero(t, l%4096)
				}
				sum += l
			}
			require.Equal(t, n, sum)
		}
	}
	lengths, most := bulk.Pieces(5<<30, 16)
	require.Less(t, lengths[0], most/15, "the first is short, so that the link has work soon")
	require.NotEqual(t, lengths[0], lengths[1], "and the workers are out of step")
}
