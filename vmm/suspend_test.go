package vmm_test

import (
	"context"
	"testing"

	"github.com/cuvmm/cuvmm/cuda"
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
	}
	s := w.suspend(b, w.maps[0])
	for name, use := range uses {
		require.ErrorIs(t, use(), cuda.ErrSuspended, name)
	}
	require.ErrorContains(t, uses["graph"](), b.Ptr().String())
	require.NoError(t, undeclared.Launch(w.s))
	require.NoError(t, w.s.Memset(other, 1, 1))
	require.NoError(t, s.Resume(w.ctx()))
	for name, use := range uses {
		if name != "into it" {
			require.NoError(t, use(), name)
		}
	}
}
