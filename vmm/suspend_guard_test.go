package vmm_test

import (
	"testing"

	"github.com/cuvmm/cuvmm/cuda"
	"github.com/cuvmm/cuvmm/cuda/sim"
	"github.com/cuvmm/cuvmm/internal/core"
	"github.com/cuvmm/cuvmm/internal/driver"
	"github.com/cuvmm/cuvmm/internal/test/gputest"
	"github.com/cuvmm/cuvmm/vmm"
	"github.com/stretchr/testify/require"
)

// guarded is how much a guard covers at once on the machines of a world.
const guarded = 32 * kib64

// long makes a buffer of so many bytes in few chunks.
func (w *world) long(bytes int, access ...vmm.Access) *vmm.Buffer {
	b, err := vmm.NewBuffer(w.d, vmm.BufferOptions{Reserve: 8 * guarded, Chunks: vmm.FixedChunks(guarded / 2), Access: access})
	require.NoError(w.t, err)
	w.own(b)
	w.buffers = append(w.buffers, b)
	require.NoError(w.t, b.Resize(nil, bytes))
	require.NoError(w.t, w.s.Memset(b.Ptr()+1, 5, bytes-1))
	require.NoError(w.t, w.s.Synchronize())
	return b
}

func (w *world) guard(m ...vmm.Memory) *vmm.Suspension {
	s, err := vmm.Suspend(w.ctx(), vmm.SuspendOptions{Guard: true}, m...)
	require.NoError(w.t, err)
	return s
}

// stray is work of another library, which does not know what sleeps. It returns the driver's result.
func (w *world) stray(d *cuda.Device, on *cuda.Stream, at cuda.Ptr) driver.Result {
	c, err := core.ContextOf(testOp, d)
	require.NoError(w.t, err)
	if r := driver.Of(w.m).MemsetD8Async(c.Handle, driver.Ptr(at), 7, 1, driver.Stream(on.Handle())); r != driver.Success {
		return r
	}
	require.NoError(w.t, on.Synchronize())
	return driver.Success
}

// Work on addresses whose memory is away hits the guard, on every device that has access, and
// changes nothing; what the guard does not cover fails, as it does without one.
func TestAGuard(t *testing.T) {
	w := newWorld(t, false)
	defer w.end()
	b := w.long(2*guarded+guarded/2, both(w, vmm.ReadOnly)...)
	want := w.bytes(b)
	free := w.free(0) + w.buffers[0].Stats().Committed/kib64
	s := w.guard(b)
	require.Equal(t, vmm.Guard{Memory: guarded, Covered: 2 * guarded}, s.Report().Guard)
	require.Equal(t, free-guarded/kib64, w.free(0), "its memory")
	require.Equal(t, guarded, s.Report().Outside[0].Own)
	require.Equal(t, driver.Success, w.stray(w.d, w.s, b.Ptr()+2*guarded-1))
	require.Equal(t, driver.Success, w.stray(w.peer, w.far, b.Ptr()))
	require.NotEqual(t, driver.Success, w.stray(w.d, w.s, b.Ptr()+2*guarded), "behind the last whole one")
	require.NoError(t, s.Resume(w.ctx()))
	require.Equal(t, want, w.bytes(b))
	require.Equal(t, free-b.Stats().Committed/kib64, w.free(0))

	s = w.suspend(b)
	require.NotEqual(t, driver.Success, w.stray(w.d, w.s, b.Ptr()), "without a guard")
	require.NoError(t, s.Resume(w.ctx()))
}

// What is closed, clipped or resumed loses its guard, and the guard's memory goes with the last.
func TestWhatAGuardLiesUnder(t *testing.T) {
	w := newWorld(t, false)
	defer w.end()
	a, b := w.long(2*guarded), w.long(2*guarded)
	want := w.bytes(a)
	free := w.free(0) + 4*guarded/kib64
	s := w.guard(a, b)
	require.Equal(t, vmm.Guard{Memory: guarded, Covered: 4 * guarded}, s.Report().Guard)
	require.NoError(t, a.Resize(nil, guarded+1))
	require.NoError(t, a.Clip(), "half of the second place")
	require.Equal(t, driver.Success, w.stray(w.d, w.s, a.Ptr()))
	require.NoError(t, s.Resume(w.ctx(), a))
	require.Equal(t, want[:guarded+1], w.bytes(a)[:guarded+1])
	require.Equal(t, driver.Success, w.stray(w.d, w.s, b.Ptr()))
	require.Equal(t, free-(a.Stats().Committed+guarded)/kib64, w.free(0))
	require.NoError(t, b.Close())
	require.Equal(t, free-a.Stats().Committed/kib64, w.free(0))
}

// A guard needs no room that Resume needs, and none is no error.
func TestAGuardWithoutRoom(t *testing.T) {
	w := newWorld(t, false)
	defer w.end()
	b := w.long(guarded)
	w.m.Inject(sim.Fault{Call: "cuMemCreate", Result: cuda.Code(driver.OutOfMemory)})
	s := w.guard(b)
	require.Zero(t, s.Report().Guard.Memory+s.Report().Guard.Covered)
	require.Contains(t, s.Report().Guard.Why, "cuMemCreate")
	require.NoError(t, s.Resume(w.ctx()))

	s = w.guard(b)
	filler, err := vmm.Create(w.d, (w.free(0)-1)*kib64, vmm.Properties{})
	require.NoError(t, err)
	require.NoError(t, s.Resume(w.ctx()), "in the room of its guard")
	require.NoError(t, filler.Close())
}

// Whichever call for a guard fails, nothing is lost or left.
func TestEveryFailureOfAGuard(t *testing.T) {
	for _, end := range []string{"resume", "close"} {
		for k, more := 0, true; more; k++ {
			w := newWorld(t, false)
			b := w.long(2*guarded + guarded/2)
			want := w.bytes(b)
			calls, err := w.watch(func() error {
				w.m.Inject(sim.Fault{After: k, Result: code})
				s, err := vmm.Suspend(w.ctx(), vmm.SuspendOptions{Guard: true}, b)
				if err == nil && end == "resume" {
					err = s.Resume(w.ctx())
				} else if err == nil {
					err = b.Close()
				}
				w.sleep = s
				return err
			})
			w.m.ClearFaults()
			more = len(calls) > k
			if err != nil {
				require.ErrorContains(t, err, "999", "call %d", k)
			}
			switch {
			case w.sleep != nil && end == "resume":
				require.NoError(t, w.sleep.Resume(w.ctx()), "call %d", k)
				require.Equal(t, want, w.bytes(b), "call %d", k)
			case w.sleep == nil:
				require.Equal(t, want, w.bytes(b), "call %d", k)
			}
			w.end()
		}
	}
}

// On every driver: a buffer whose length is no multiple of what a guard covers.
func TestAGuardOnEachDriver(t *testing.T) {
	gputest.Each(t, func(t *testing.T, d *cuda.Device) {
		const n = 68 << 20
		b, err := vmm.NewBuffer(d, vmm.BufferOptions{Reserve: n, Chunks: vmm.FixedChunks(4 << 20)})
		require.NoError(t, err)
		closed(t, b)
		require.NoError(t, b.Resize(nil, n))
		s, err := d.NewStream(cuda.StreamOptions{})
		require.NoError(t, err)
		closed(t, s)
		c, err := core.ContextOf(testOp, d)
		require.NoError(t, err)
		for _, o := range []vmm.SuspendOptions{{Guard: true}, {Guard: true, Keep: vmm.Drop}} {
			z, err := vmm.Suspend(t.Context(), o, b)
			require.NoError(t, err)
			r := z.Report()
			require.Equal(t, vmm.Guard{Memory: 64 << 20, Covered: 64 << 20}, r.Guard)
			require.GreaterOrEqual(t, r.Outside[0].Own, r.Guard.Memory)
			drv, on := c.System().Drv, driver.Stream(s.Handle())
			require.Equal(t, driver.Success, drv.MemsetD8Async(c.Handle, driver.Ptr(b.Ptr()), 7, 64<<20, on))
			require.NoError(t, s.Synchronize(), "work that does not know what sleeps")
			require.NoError(t, z.Resume(t.Context()))
			if o.Keep == vmm.Drop {
				continue
			}
			got := make([]byte, n)
			all, err := b.Slice(0, n)
			require.NoError(t, err)
			require.NoError(t, all.CopyTo(nil, got))
			require.Equal(t, make([]byte, n), got)
		}
	})
}
