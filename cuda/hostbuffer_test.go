package cuda_test

import (
	"context"
	"fmt"
	"math"
	"testing"

	"github.com/cuvmm/cuvmm/csrc/kernels"
	"github.com/cuvmm/cuvmm/cuda"
	"github.com/cuvmm/cuvmm/cuda/sim"
	"github.com/cuvmm/cuvmm/internal/core"
	"github.com/cuvmm/cuvmm/internal/driver"
	"github.com/cuvmm/cuvmm/internal/test/gputest"
	"github.com/stretchr/testify/require"
)

func TestCopiesFromAndToHostBuffers(t *testing.T) {
	gputest.Each(t, func(t *testing.T, d *cuda.Device) {
		s, p := stream(t, d), memory(t, d, 100_000)
		h, err := d.NewHostBuffer(100_000)
		require.NoError(t, err)
		closed(t, h)
		require.Equal(t, 100_000, h.Len())
		copy(h.Bytes(), pattern(100_000, 4))
		part, err := h.Slice(10, 510)
		require.NoError(t, err)
		require.Equal(t, pattern(100_000, 4)[10:510], part.Bytes())
		require.NoError(t, s.CopyFromHost(p, h.All()))
		require.NoError(t, s.CopyFromHost(p+1000, part))
		require.NoError(t, s.Synchronize())
		clear(h.Bytes())
		empty, err := h.Slice(100_000, 100_000)
		require.NoError(t, err)
		require.NoError(t, s.CopyToHost(empty, p))
		require.NoError(t, s.CopyToHost(h.All(), p))
		require.NoError(t, s.Synchronize())
		want := pattern(100_000, 4)
		copy(want[1000:], pattern(100_000, 4)[10:510])
		require.Equal(t, want, h.Bytes())
	})
}

// Kernels of every device reach pinned memory at its address.
func TestKernelsReachHostBuffers(t *testing.T) {
	gputest.Each(t, func(t *testing.T, d *cuda.Device) {
		for _, dev := range d.System().Devices() {
			h, err := d.NewHostBuffer(8)
			require.NoError(t, err)
			closed(t, h)
			m, err := dev.LoadModule(kernels.Basic)
			require.NoError(t, err)
			closed(t, m)
			k, err := m.Kernel(kernels.Fill)
			require.NoError(t, err)
			s := stream(t, dev)
			require.NoError(t, k.Launch(s, cuda.Threads(2), h.Ptr(), uint64(2), uint32(7), uint32(1)))
			require.NoError(t, s.Synchronize())
			require.Equal(t, []byte{7, 0, 0, 0, 8, 0, 0, 0}, h.Bytes())
		}
	})
}

func TestHostBufferSizesAndSlices(t *testing.T) {
	_, d := open(t)
	for _, n := range []int{0, -1} {
		_, err := d.NewHostBuffer(n)
		require.ErrorIs(t, err, cuda.ErrInvalidArgument)
	}
	for _, n := range []int{math.MaxInt, 1 << 51, 1 << 45} {
		_, err := d.NewHostBuffer(n)
		require.ErrorIs(t, err, cuda.ErrOutOfMemory)
	}
	h, err := d.NewHostBuffer(10)
	require.NoError(t, err)
	closed(t, h)
	for _, c := range []struct {
		from, to int
		ok       bool
	}{
		{0, 10, true}, {10, 10, true}, {3, 10, true}, {-1, 0, false}, {0, -1, false}, {0, 11, false}, {11, 11, false},
		{5, 3, false}, {1, math.MaxInt, false}, {math.MaxInt, math.MaxInt, false},
	} {
		part, err := h.Slice(c.from, c.to)
		if !c.ok {
			require.ErrorIs(t, err, cuda.ErrOutOfRange, "%+v", c)
			require.ErrorContains(t, err, fmt.Sprintf("%d to %d of 10", c.from, c.to))
			continue
		}
		require.NoError(t, err, "%+v", c)
		require.Equal(t, c.to-c.from, part.Len())
		require.Len(t, part.Bytes(), c.to-c.from)
	}
	require.Nil(t, cuda.HostSlice{}.Bytes())
}

// Pinning is slow and unpinning stalls launches: a closed buffer's memory is
// the next one's, and nothing is unpinned unasked.
func TestHostBuffersComeFromAPool(t *testing.T) {
	m, d := open(t)
	h, err := d.NewHostBuffer(100_000)
	require.NoError(t, err)
	first := &h.Bytes()[0]
	require.NoError(t, h.Close())
	require.NoError(t, h.Close())
	pinned := m.Count("cuMemHostAlloc")
	for _, n := range []int{99_000, 100_000, 106_000} {
		h, err := d.NewHostBuffer(n)
		require.NoError(t, err)
		require.Same(t, first, &h.Bytes()[0])
		require.Len(t, h.Bytes(), n)
		require.NoError(t, h.Close())
	}
	require.Equal(t, pinned, m.Count("cuMemHostAlloc"))
	require.Zero(t, m.Count("cuMemFreeHost"))
	require.GreaterOrEqual(t, d.System().TrimHost(), 100_000)
	require.Equal(t, 1, m.Count("cuMemFreeHost"))
	require.Zero(t, d.System().TrimHost())
}

func TestPinnedMemoryThatTheDriverDoesNotTakeIsTriedAgain(t *testing.T) {
	m, d := open(t)
	h, err := d.NewHostBuffer(100_000)
	require.NoError(t, err)
	require.NoError(t, h.Close())
	m.Inject(sim.Fault{Call: "cuMemFreeHost", Result: cuda.Code(driver.Unknown), Times: 2})
	require.Zero(t, d.System().TrimHost())
	require.Error(t, d.System().Close())
	require.GreaterOrEqual(t, d.System().TrimHost(), 100_000)
}

func TestAHostBufferIsNotReusedWhileItsWorkRuns(t *testing.T) {
	m, d := open(t)
	s, p := stream(t, d), memory(t, d, 4096)
	for name, give := range map[string]func(h *cuda.HostBuffer) error{
		"CloseAfter": func(h *cuda.HostBuffer) error { return h.CloseAfter(s) },
		"Close":      (*cuda.HostBuffer).Close,
	} {
		t.Run(name, func(t *testing.T) {
			h, err := d.NewHostBuffer(4096)
			require.NoError(t, err)
			copy(h.Bytes(), pattern(4096, 1))
			part := h.All()
			m.Hold(s.Handle())
			require.NoError(t, s.CopyFromHost(p, part))
			release := func() { m.Release(s.Handle()) }
			if name == "Close" {
				waits(t, func() error { return give(h) }, release)
			} else {
				require.ErrorIs(t, h.CloseAfter(), cuda.ErrInvalidArgument)
				require.NoError(t, give(h))
				require.NoError(t, h.Close())
				require.Equal(t, 1, d.System().Stats().Pending)
				ctx, cancel := context.WithTimeout(t.Context(), glance)
				defer cancel()
				require.ErrorIs(t, d.System().Drain(ctx), context.DeadlineExceeded)
				second, err := d.NewHostBuffer(4096)
				require.NoError(t, err)
				clear(second.Bytes())
				require.NoError(t, second.CloseAfter(stream(t, d)))
				release()
				require.NoError(t, d.System().Drain(t.Context()))
			}
			require.ErrorIs(t, s.CopyFromHost(p, part), cuda.ErrClosed)
			require.Equal(t, pattern(4096, 1), read(t, s, p, 4096))
			require.Zero(t, d.System().Stats().HostBuffers)
		})
	}
}

// A stream that captures may have work from before that still runs, and no
// event tells of it: the whole context is waited for, even where the caller
// promised that its streams are all there are.
func TestCloseWaitsForWorkBehindWhichACaptureBegan(t *testing.T) {
	for name, o := range map[string]cuda.Options{"": {}, "named streams only": {NamedStreamsOnly: true}} {
		t.Run(name, func(t *testing.T) {
			m, err := sim.New(sim.Options{})
			require.NoError(t, err)
			closed(t, m)
			sys, err := m.Open(o)
			require.NoError(t, err)
			closed(t, sys)
			d := sys.Devices()[0]
			s, p := stream(t, d), memory(t, d, 64)
			h, err := d.NewHostBuffer(64)
			require.NoError(t, err)
			m.Hold(s.Handle())
			require.NoError(t, s.CopyFromHost(p, h.All()))
			in, drv := core.StreamOf(s), core.SystemOf(sys).Drv
			require.Equal(t, driver.Success, drv.StreamBeginCapture(in.Ctx.Handle, in.Handle, driver.CaptureRelaxed))
			waits(t, h.Close, func() { m.Release(s.Handle()) })
			g, r := drv.StreamEndCapture(in.Ctx.Handle, in.Handle)
			require.Equal(t, driver.Success, r, "and the capture has survived")
			require.Equal(t, driver.Success, drv.GraphDestroy(g))
		})
	}
}

// A closed buffer's memory is the next one's: nothing of it is given any more.
func TestAClosedHostBufferGivesNothing(t *testing.T) {
	_, d := open(t)
	s := stream(t, d)
	for name, end := range map[string]func(h *cuda.HostBuffer) error{
		"Close":      (*cuda.HostBuffer).Close,
		"CloseAfter": func(h *cuda.HostBuffer) error { return h.CloseAfter(s) },
	} {
		t.Run(name, func(t *testing.T) {
			h, err := d.NewHostBuffer(64)
			require.NoError(t, err)
			part, err := h.Slice(0, 10)
			require.NoError(t, err)
			all := h.All()
			require.NoError(t, end(h))
			next, err := d.NewHostBuffer(64)
			require.NoError(t, err)
			closed(t, next)
			require.Nil(t, h.Bytes())
			require.Zero(t, h.Ptr())
			require.Nil(t, part.Bytes())
			require.Nil(t, all.Bytes())
			require.Nil(t, h.All().Bytes())
			_, err = h.Slice(0, 10)
			require.ErrorIs(t, err, cuda.ErrClosed)
			require.ErrorIs(t, s.CopyFromHost(0x1000, part), cuda.ErrClosed)
		})
	}
}
