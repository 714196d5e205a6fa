package pool_test

import (
	"bytes"
	"errors"
	"log/slog"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/cuvmm/cuvmm/cuda"
	"github.com/cuvmm/cuvmm/cuda/sim"
	"github.com/cuvmm/cuvmm/internal/core"
	"github.com/cuvmm/cuvmm/internal/driver"
	"github.com/cuvmm/cuvmm/internal/test/gputest"
	"github.com/cuvmm/cuvmm/vmm/pool"
	"github.com/stretchr/testify/require"
)

func event(t testing.TB, d *cuda.Device) *cuda.Event {
	t.Helper()
	e, err := d.NewEvent(cuda.EventOptions{})
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, e.Close()) })
	return e
}

// captured is a graph of body, which the test closes.
func captured(t testing.TB, p *pool.Pool, s *cuda.Stream, o pool.CaptureOptions, body func() error) (*cuda.Graph, pool.CaptureStats) {
	t.Helper()
	g, st, err := p.Capture(s, o, body)
	require.NoError(t, err)
	return g, st
}

// A graph keeps the memory of its capture until it is gone; then the pool has it
// back.
func TestAGraphKeepsItsMemory(t *testing.T) {
	gputest.Each(t, func(t *testing.T, d *cuda.Device) {
		s := stream(t, d)
		p := newPool(t, d, pool.Options{})
		out := alloc(t, p, s, 3*mib)
		var inside []pool.Block
		tag := pool.NewTag("capture")
		g, st := captured(t, p, s, pool.CaptureOptions{}, func() error {
			for _, n := range []int{1000, 3 * mib, 3 * mib} {
				b, err := p.Alloc(pool.Request{Bytes: n, Stream: s, Tag: tag})
				if err != nil {
					return err
				}
				inside = append(inside, b)
				if err := errors.Join(s.Memset(b.Ptr(), 7, n), s.Copy(out.Ptr(), b.Ptr(), 1000), p.Free(b)); err != nil {
					return err
				}
			}
			return nil
		})
		require.Equal(t, inside[1].Ptr(), inside[2].Ptr(), "the stream has its memory back within the capture")
		require.Equal(t, 3, st.Served)
		require.Zero(t, st.Refused)
		require.Equal(t, 6*mib+1000, st.Bytes)
		require.Equal(t, []pool.CaptureTag{{Tag: tag, Served: 3, Bytes: 6*mib + 1000}}, st.Tags)
		require.NotZero(t, st.Grown)
		require.Equal(t, 1, p.Stats().Arenas)
		require.ErrorIs(t, p.Close(), cuda.ErrInUse)

		// Others never get those addresses, whatever they ask for.
		other := stream(t, d)
		var theirs []pool.Block
		for range 20 {
			for _, on := range []*cuda.Stream{s, other} {
				b := alloc(t, p, on, 3*mib)
				require.NotEqual(t, inside[1].Ptr(), b.Ptr())
				require.NoError(t, on.Memset(b.Ptr(), 9, 3*mib))
				theirs = append(theirs, b)
			}
		}
		require.NoError(t, g.Launch(s))
		got := make([]byte, 1000)
		require.NoError(t, s.Download(got, out.Ptr()))
		require.Equal(t, bytes.Repeat([]byte{7}, 1000), got)
		_, err := p.Trim(0)
		require.NoError(t, err)
		require.NoError(t, g.Launch(s), "its memory stays mapped")
		require.NoError(t, s.Synchronize())
		require.NoError(t, p.Check())

		require.NoError(t, g.Close())
		require.Zero(t, p.Stats().Arenas)
		for _, b := range theirs {
			free(t, p, b)
		}
		free(t, p, out)
		require.NoError(t, other.Synchronize())
		require.NoError(t, s.Synchronize())
		require.NoError(t, p.Check())
	})
}

func TestMemoryOfAGraphThatIsGoneServesOthers(t *testing.T) {
	patient(t)
	m, d := open(t)
	s := stream(t, d)
	p := newPool(t, d, pool.Options{})
	for _, n := range []int{20 * mib, 70 * mib} {
		var inside pool.Block
		g, _ := captured(t, p, s, pool.CaptureOptions{}, func() (err error) {
			inside, err = p.Alloc(pool.Request{Bytes: n, Stream: s})
			return errors.Join(err, p.Free(inside))
		})
		require.NoError(t, g.Launch(s))
		hold(t, m, s)
		require.NoError(t, g.CloseAfter(s))
		early := alloc(t, p, s, n)
		require.NotEqual(t, inside.Ptr(), early.Ptr(), "its launch has not passed")
		m.Release(s.Handle())
		require.NoError(t, d.System().Drain(t.Context()))
		m.ResetCounts()
		late := alloc(t, p, s, n)
		require.Equal(t, inside.Ptr(), late.Ptr())
		require.Zero(t, m.Count("cuMemMap"))
		free(t, p, early)
		free(t, p, late)
	}
}

// Once a graph is released, what its capture used can be closed at once: the pool lets go
// of it in a function of OnClose, before those that are registered later.
func TestWhatAReleasedGraphUsedCanBeClosed(t *testing.T) {
	_, d := open(t)
	s := stream(t, d)
	p := newPool(t, d, pool.Options{})
	ws, err := p.Prepare(s, pool.Workspace{Name: "gemm", Bytes: 30 * mib})
	require.NoError(t, err)
	g, _ := captured(t, p, s, pool.CaptureOptions{Workspaces: ws}, func() error { return nil })
	var closed error
	require.NoError(t, g.OnClose(func() { closed = errors.Join(ws.Close(), p.Close()) }))
	require.NoError(t, g.Launch(s))
	require.NoError(t, g.CloseAfter(s))
	require.NoError(t, g.Released().Wait(t.Context()))
	require.NoError(t, closed)
}

// Streams that joined by an event take part; others do not.
func TestStreamsThatJoinedTakePart(t *testing.T) {
	gputest.Each(t, func(t *testing.T, d *cuda.Device) {
		s, side, other := stream(t, d), stream(t, d), stream(t, d)
		fork, joined := event(t, d), event(t, d)
		p := newPool(t, d, pool.Options{})
		before := alloc(t, p, side, 3*mib)
		free(t, p, before)
		var b, c, outside pool.Block
		g, st := captured(t, p, s, pool.CaptureOptions{}, func() (err error) {
			if b, err = p.Alloc(pool.Request{Bytes: 3 * mib, Stream: s}); err != nil {
				return err
			}
			if err := errors.Join(s.Memset(b.Ptr(), 1, 100), fork.Record(s), side.Wait(fork), p.Free(b)); err != nil {
				return err
			}
			if c, err = p.Alloc(pool.Request{Bytes: 3 * mib, Stream: side}); err != nil {
				return err
			}
			if outside, err = p.Alloc(pool.Request{Bytes: 3 * mib, Stream: other}); err != nil {
				return err
			}
			return errors.Join(side.Memset(c.Ptr(), 1, 100), p.Free(c), joined.Record(side), s.Wait(joined))
		})
		require.Equal(t, 2, st.Served)
		require.NotEqual(t, b.Ptr(), c.Ptr(), "the graph orders nothing between its streams")
		// What was free before may serve the other stream once the GPU has passed it;
		// what the capture was served may not, for as long as the graph lives.
		require.NotContains(t, []cuda.Ptr{b.Ptr(), c.Ptr()}, outside.Ptr())
		require.NoError(t, p.Check())
		again := alloc(t, p, side, 3*mib)
		require.NotContains(t, []cuda.Ptr{b.Ptr(), c.Ptr()}, again.Ptr(), "the stream takes part no more")
		free(t, p, again)
		free(t, p, outside)
		require.NoError(t, g.Launch(s))
		require.NoError(t, g.Close())
	})
}

// Blocks from before that are freed meanwhile wait for the end.
func TestFreesOfOutsideBlocksWaitForTheEndOfTheCapture(t *testing.T) {
	gputest.Each(t, func(t *testing.T, d *cuda.Device) {
		s, other := stream(t, d), stream(t, d)
		p := newPool(t, d, pool.Options{})
		own, theirs := alloc(t, p, s, 3*mib), alloc(t, p, other, 5*mib)
		var inside []pool.Block
		g, _ := captured(t, p, s, pool.CaptureOptions{}, func() error {
			if err := errors.Join(s.Memset(own.Ptr(), 1, 100), p.Free(own), p.Free(theirs, s)); err != nil {
				return err
			}
			require.Equal(t, 1, p.Stats().Waiting)
			for range 3 {
				for on, n := range map[*cuda.Stream]int{s: 3 * mib, other: 5 * mib} {
					b, err := p.Alloc(pool.Request{Bytes: n, Stream: on})
					if err != nil {
						return err
					}
					require.NotEqual(t, own.Ptr(), b.Ptr())
					require.NotEqual(t, theirs.Ptr(), b.Ptr())
					inside = append(inside, b)
				}
			}
			return nil
		})
		require.NoError(t, s.Synchronize())
		require.Equal(t, own.Ptr(), alloc2(t, p, s, 3*mib))
		for _, b := range inside {
			free(t, p, b)
		}
		require.NoError(t, g.Close())
	})
}

func TestCapturesShareAnArena(t *testing.T) {
	gputest.Each(t, func(t *testing.T, d *cuda.Device) {
		s, side := stream(t, d), stream(t, d)
		p := newPool(t, d, pool.Options{})
		a, err := p.NewArena()
		require.NoError(t, err)
		one := func(on *cuda.Stream) (*cuda.Graph, pool.CaptureStats, cuda.Ptr) {
			var at cuda.Ptr
			g, st := captured(t, p, on, pool.CaptureOptions{Arena: a}, func() error {
				b, err := p.Alloc(pool.Request{Bytes: 20 * mib, Stream: on})
				if err != nil {
					return err
				}
				at = b.Ptr()
				return errors.Join(on.Memset(at, 1, 20*mib), p.Free(b))
			})
			return g, st, at
		}
		first, st, at := one(s)
		require.NotZero(t, st.Grown)
		second, st, same := one(s)
		require.Equal(t, at, same)
		require.Zero(t, st.Grown)
		third, st, same := one(side)
		require.Equal(t, at, same, "also on another stream")
		require.Zero(t, st.Grown)
		require.Equal(t, 1, p.Stats().Arenas)
		nested, _ := captured(t, p, s, pool.CaptureOptions{Arena: a}, func() error {
			_, _, err := p.Capture(side, pool.CaptureOptions{Arena: a}, func() error { return nil })
			require.ErrorIs(t, err, cuda.ErrInUse)
			return nil
		})
		for _, g := range []*cuda.Graph{first, second, nested} {
			require.NoError(t, g.Launch(s))
			require.NoError(t, g.Close())
		}
		released := a.Released()
		require.NoError(t, a.Close())
		require.NoError(t, a.Close())
		require.Equal(t, 1, p.Stats().Arenas, "the third graph keeps it")
		select {
		case <-released.Done():
			require.FailNow(t, "released while a graph keeps it")
		default:
		}
		_, _, err = p.Capture(s, pool.CaptureOptions{Arena: a}, func() error { return nil })
		require.ErrorIs(t, err, cuda.ErrClosed)
		require.NoError(t, third.Close())
		require.NoError(t, released.Wait(t.Context()))
		require.NoError(t, a.Released().Wait(t.Context()))
		require.Zero(t, p.Stats().Arenas)
	})
}

// What a capture leaves live is freed later, and serves no other capture before
// its stream has passed.
func TestBlocksThatOutliveTheirCapture(t *testing.T) {
	m, d := open(t)
	s, side := stream(t, d), stream(t, d)
	p := newPool(t, d, pool.Options{Wait: -1})
	a, err := p.NewArena()
	require.NoError(t, err)
	var left pool.Block
	g, _ := captured(t, p, s, pool.CaptureOptions{Arena: a}, func() (err error) {
		left, err = p.Alloc(pool.Request{Bytes: 20 * mib, Stream: s})
		return err
	})
	hold(t, m, s)
	require.NoError(t, s.Memset(left.Ptr(), 1, 20*mib))
	free(t, p, left)
	other := func() (at cuda.Ptr) {
		g, _ := captured(t, p, side, pool.CaptureOptions{Arena: a}, func() error {
			b, err := p.Alloc(pool.Request{Bytes: 20 * mib, Stream: side})
			at = b.Ptr()
			return errors.Join(err, p.Free(b))
		})
		require.NoError(t, g.Close())
		return at
	}
	require.NotEqual(t, left.Ptr(), other())
	require.NoError(t, p.Check())
	m.Release(s.Handle())
	require.NoError(t, s.Synchronize())
	require.NoError(t, g.Close())
	require.NoError(t, a.Close())
}

// captureElsewhere captures the stream as another library would, in relaxed mode.
func captureElsewhere(t *testing.T, s *cuda.Stream) (id uint64, end func()) {
	t.Helper()
	in := core.StreamOf(s)
	drv, ctx := in.Ctx.System().Drv, in.Ctx.Handle
	s.Handle() // as the other library has it
	require.Equal(t, driver.Success, drv.StreamBeginCapture(ctx, in.Handle, driver.CaptureRelaxed))
	_, id, r := drv.StreamGetCaptureInfo(ctx, in.Handle)
	require.Equal(t, driver.Success, r)
	return id, func() {
		t.Helper()
		g, r := drv.StreamEndCapture(ctx, in.Handle)
		require.Equal(t, driver.Success, r, "the capture lived")
		require.Equal(t, driver.Success, drv.GraphDestroy(g))
	}
}

func TestCapturesOfOthers(t *testing.T) {
	gputest.Each(t, func(t *testing.T, d *cuda.Device) {
		s := stream(t, d)
		p := newPool(t, d, pool.Options{})
		_, err := p.BeginCapture(s, pool.CaptureOptions{})
		require.ErrorIs(t, err, cuda.ErrInvalidArgument)
		require.NotErrorIs(t, err, cuda.ErrCapturing, "nothing captures")
		for _, late := range []bool{false, true} {
			id, end := captureElsewhere(t, s)
			_, err := p.Alloc(pool.Request{Bytes: 100, Stream: s})
			require.ErrorIs(t, err, cuda.ErrCapturing)
			c, err := p.BeginCapture(s, pool.CaptureOptions{})
			require.NoError(t, err)
			require.Equal(t, id, c.ID())
			_, err = p.BeginCapture(s, pool.CaptureOptions{})
			require.ErrorIs(t, err, cuda.ErrInUse)
			b := alloc(t, p, s, 3*mib)
			require.NoError(t, s.Memset(b.Ptr(), 1, 100))
			require.ErrorIs(t, c.Close(), cuda.ErrInUse)
			st, err := c.End()
			require.NoError(t, err)
			require.Equal(t, 1, st.Served)
			_, err = p.Alloc(pool.Request{Bytes: 100, Stream: s})
			require.ErrorIs(t, err, cuda.ErrCapturing)
			end()
			free(t, p, b)
			require.ErrorIs(t, c.CloseAfter(), cuda.ErrInvalidArgument)
			if late {
				require.NoError(t, c.CloseAfter(s))
				require.NoError(t, d.System().Drain(t.Context()))
			} else {
				require.NoError(t, c.Close())
			}
			require.Zero(t, p.Stats().Arenas)
		}
	})
}

// A capture that fails leaves nothing behind.
func TestACaptureThatFails(t *testing.T) {
	_, d := open(t)
	s := stream(t, d)
	p := newPool(t, d, pool.Options{})
	why := errors.New("why not")
	_, st, err := p.Capture(s, pool.CaptureOptions{}, func() error {
		b, err := p.Alloc(pool.Request{Bytes: 3 * mib, Stream: s})
		return errors.Join(err, p.Free(b), why)
	})
	require.ErrorIs(t, err, why)
	require.Equal(t, 1, st.Served)
	require.Zero(t, p.Stats().Arenas)
	require.PanicsWithValue(t, "no", func() {
		_, _, _ = p.Capture(s, pool.CaptureOptions{}, func() error { panic("no") })
	})
	require.Zero(t, p.Stats().Arenas)
	capturing, err := s.Capturing()
	require.NoError(t, err)
	require.False(t, capturing)
	_, _, err = p.Capture(nil, pool.CaptureOptions{}, nil)
	require.ErrorIs(t, err, cuda.ErrInvalidArgument)
}

func TestRefusedRequestsOfACaptureAreCountedAndLogged(t *testing.T) {
	m, err := sim.New(sim.Options{Devices: []sim.DeviceOptions{{Memory: 66 * mib}}})
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, m.Close()) })
	var log bytes.Buffer
	sys, err := m.Open(cuda.Options{Logger: slog.New(slog.NewTextHandler(&log, nil))})
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, sys.Close()) })
	d := sys.Devices()[0]
	s := stream(t, d)
	p := newPool(t, d, pool.Options{Wait: -1})
	g, st := captured(t, p, s, pool.CaptureOptions{}, func() error {
		_, err := p.Alloc(pool.Request{Bytes: 100 * mib, Stream: s})
		require.ErrorIs(t, err, cuda.ErrOutOfMemory)
		return nil
	})
	require.Equal(t, 1, st.Refused)
	require.Contains(t, log.String(), "refused a request of a capture")
	require.NoError(t, g.Close())
}

// A capture whose workspaces were prepared requests nothing of the pool.
func TestWorkspacesBeforeACapture(t *testing.T) {
	gputest.Each(t, func(t *testing.T, d *cuda.Device) {
		s := stream(t, d)
		p := newPool(t, d, pool.Options{Limit: 100 * mib, Wait: -1})
		ws, err := p.Prepare(s, pool.Workspace{Name: "gemm", Bytes: 30 * mib}, pool.Workspace{Name: "huge", Bytes: 200 * mib}, pool.Workspace{Name: "norm", Bytes: 1000, Align: 4096})
		require.ErrorIs(t, err, cuda.ErrBudget)
		require.ErrorContains(t, err, `workspace "huge" of 200 MiB`)
		_, ok := ws.Get("huge")
		require.False(t, ok)
		gemm, ok := ws.Get("gemm")
		require.True(t, ok)
		g, st := captured(t, p, s, pool.CaptureOptions{Workspaces: ws}, func() error { return s.Memset(gemm.Ptr(), 1, 30*mib) })
		require.Equal(t, pool.CaptureStats{ID: st.ID}, st, "nothing was asked for")
		released := ws.Released()
		require.ErrorIs(t, ws.Close(), cuda.ErrInUse)
		require.ErrorIs(t, released.Wait(t.Context()), cuda.ErrInUse)
		released = ws.Released()
		require.NoError(t, g.Launch(s))
		require.NoError(t, g.Close())
		require.NoError(t, ws.Close(s))
		require.NoError(t, released.Wait(t.Context()))
		require.NoError(t, ws.Close())
		require.NoError(t, ws.Released().Wait(t.Context()))
		require.Zero(t, p.Stats().Blocks)
		_, err = p.Prepare(s, pool.Workspace{Name: "a"}, pool.Workspace{Name: "a"})
		require.ErrorIs(t, err, cuda.ErrInvalidArgument)
		_, _, err = p.Capture(s, pool.CaptureOptions{Workspaces: ws}, func() error { return nil })
		require.ErrorIs(t, err, cuda.ErrClosed)
	})
}

func TestACaptureThatOutlivesItsLimitIsReported(t *testing.T) {
	m, err := sim.New(sim.Options{})
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, m.Close()) })
	log := make(chan string, 100)
	sys, err := m.Open(cuda.Options{Logger: slog.New(slog.NewTextHandler(lines(log), nil))})
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, sys.Close()) })
	d := sys.Devices()[0]
	s := stream(t, d)
	p := newPool(t, d, pool.Options{CaptureLimit: time.Millisecond})
	g, _ := captured(t, p, s, pool.CaptureOptions{}, func() error {
		b, err := p.Alloc(pool.Request{Bytes: 1000, Stream: s})
		for line := ""; !strings.Contains(line, "served=1 bytes=1000"); {
			line = <-log
			require.Contains(t, line, "a capture takes long")
		}
		return errors.Join(err, p.Free(b))
	})
	require.NoError(t, g.Close())
}

type lines chan string

func (l lines) Write(p []byte) (int, error) {
	select {
	case l <- string(p):
	default:
	}
	return len(p), nil
}

// Closing an arena is safe from any goroutine.
func TestAnArenaIsClosedOnce(t *testing.T) {
	_, d := open(t)
	p := newPool(t, d, pool.Options{})
	a, err := p.NewArena()
	require.NoError(t, err)
	var g sync.WaitGroup
	for range 4 {
		g.Go(func() { _ = a.Close() })
	}
	g.Wait()
	require.Zero(t, p.Stats().Arenas)
}
