//go:build linux

package vmm_test

import (
	"context"
	"errors"
	"os"
	"runtime"
	"testing"

	"github.com/cuvmm/cuvmm/cuda"
	"github.com/cuvmm/cuvmm/internal/test/gputest"
	"github.com/cuvmm/cuvmm/vmm"
	"github.com/stretchr/testify/require"
)

// A DMA-BUF that is open pins the memory that went, and the report names it; one that is closed when
// the memory is to go, or that was lost, does not.
func TestAReportNamesOpenDMABufs(t *testing.T) {
	gputest.Each(t, func(t *testing.T, d *cuda.Device) {
		const chunk, n = 2 << 20, 3
		b, err := vmm.NewBuffer(d, vmm.BufferOptions{Reserve: n * chunk, Chunks: vmm.FixedChunks(chunk)})
		require.NoError(t, err)
		t.Cleanup(func() { require.NoError(t, b.Close()) })
		require.NoError(t, b.Resize(nil, n*chunk))
		free := func() int {
			free, _, err := d.MemoryInfo()
			require.NoError(t, err)
			return free
		}
		dmabuf := func(chunks int) *os.File {
			f, err := b.DMABuf(0, chunks*chunk, vmm.DMABufOptions{})
			if errors.Is(err, cuda.ErrNotSupported) {
				t.Skip("no DMA-BUFs: ", err)
			}
			require.NoError(t, err)
			return f
		}
		asleep := func() *vmm.Suspension {
			s, err := vmm.Suspend(t.Context(), vmm.SuspendOptions{}, b)
			require.NoError(t, err)
			return s
		}
		held := func(r vmm.Report, bytes int, why ...string) {
			t.Helper()
			require.Equal(t, []int{n * chunk, n*chunk - bytes, bytes}, []int{r.Asked, r.Given, r.Held}, "%+v", r.Memory)
			require.Len(t, r.Memory[0].Rest, len(why))
			for i, want := range why {
				require.Contains(t, r.Memory[0].Rest[i].Why, want)
			}
		}

		first, second := dmabuf(2), dmabuf(1)
		preview, err := vmm.Preview(vmm.SuspendOptions{}, b)
		require.NoError(t, err)
		held(preview, 2*chunk, "2 open DMA-BUFs of ", "1 open DMA-BUF of ")
		s := asleep()
		held(s.Report(), 2*chunk, "2 open DMA-BUFs of ", "1 open DMA-BUF of ")
		before := free()
		require.NoError(t, errors.Join(first.Close(), second.Close()))
		require.GreaterOrEqual(t, free(), before+2*chunk, "they pinned it")
		require.NoError(t, s.Resume(t.Context()))

		// It is other memory: what was made of the one before is no part of it.
		third := dmabuf(3)
		remove, err := vmm.OnSuspend(b, func(context.Context) error { return third.Close() }, func() {})
		require.NoError(t, err)
		s = asleep()
		held(s.Report(), 0)
		require.NoError(t, s.Resume(t.Context()))
		remove()

		dmabuf(3)
		for range 3 {
			runtime.GC() // which closes the file
		}
		s = asleep()
		held(s.Report(), 0)
		require.NoError(t, s.Resume(t.Context()))
	})
}

// A report says of a chunk all that have it, a few of them by name.
func TestAReportNamesRangesAndAllocations(t *testing.T) {
	w := newWorld(t, false)
	defer w.end()
	b := w.buffer(2)
	var forks []*vmm.Buffer
	for range 5 {
		fork, err := b.Fork(nil, kib64, vmm.ForkOptions{})
		require.NoError(t, err)
		forks = append(forks, fork)
	}
	report := func(m vmm.Memory) vmm.Held {
		s := w.suspend(m)
		defer func() { require.NoError(t, s.Resume(w.ctx())) }()
		return s.Report().Memory[0]
	}
	why := report(b).Rest[0].Why
	for _, fork := range forks[:3] {
		require.Contains(t, why, fork.Ptr().String())
	}
	require.Contains(t, why, "; and 2 more")
	require.NotContains(t, why, forks[4].Ptr().String())
	for _, fork := range forks {
		require.NoError(t, fork.Close())
	}
	require.NoError(t, w.drain())
	require.Empty(t, report(b).Rest)
}
