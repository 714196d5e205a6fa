//go:build linux

package vmm_test

import (
	"errors"
	"os"
	"testing"

	"github.com/cuvmm/cuvmm/cuda"
	"github.com/cuvmm/cuvmm/cuda/sim"
	"github.com/cuvmm/cuvmm/internal/core"
	"github.com/cuvmm/cuvmm/internal/phys"
	"github.com/cuvmm/cuvmm/internal/share"
	"github.com/cuvmm/cuvmm/internal/test/gputest"
	"github.com/cuvmm/cuvmm/vmm"
	"github.com/stretchr/testify/require"
)

// imports exports the chunks of the first n bytes and imports them again, as
// another process would.
func imports(t require.TestingT, b *vmm.Buffer, n int) (chunks []*phys.Handle) {
	v, err := share.Of(b).View(testOp, uint64(n))
	require.NoError(t, err)
	defer func() { require.NoError(t, v.Release()) }()
	for _, c := range v.Chunks {
		fd, err := c.Handle.Export(testOp)
		require.NoError(t, err)
		file := os.NewFile(uintptr(fd), "exported")
		h, err := phys.Import(testOp, core.SystemOf(b.Device()), fd, c.Handle.Size)
		require.NoError(t, err)
		require.NoError(t, file.Close())
		chunks = append(chunks, h)
	}
	return chunks
}

// importing describes a buffer of the same kind of memory.
func importing(b *vmm.Buffer, length int, chunks []*phys.Handle) share.ImportOptions {
	about := share.Of(b).About()
	return share.ImportOptions{Device: about.Device, Memory: about.Asked, Granularity: about.Granularity, Length: uint64(length), Chunks: chunks}
}

func imported(t testing.TB, o share.ImportOptions) *vmm.Buffer {
	b, err := share.NewBuffer(testOp, o)
	require.NoError(t, err)
	closed(t, b.(*vmm.Buffer))
	return b.(*vmm.Buffer)
}

// chunked is a buffer of n full chunks.
func chunked(t testing.TB, d *cuda.Device, n int) *vmm.Buffer {
	b, err := vmm.NewBuffer(d, vmm.BufferOptions{Reserve: 16 * kib64, Chunks: vmm.FixedChunks(kib64)})
	require.NoError(t, err)
	closed(t, b)
	require.NoError(t, gputest.Err(b.Append(nil, pattern(n*kib64, 1))))
	return b
}

func contents(t testing.TB, b *vmm.Buffer) []byte {
	got := make([]byte, b.Len())
	part, err := b.Slice(0, b.Len())
	require.NoError(t, err)
	require.NoError(t, part.CopyTo(nil, got))
	return got
}

func small(t testing.TB) (*sim.Machine, *cuda.Device) {
	return open(t, sim.Options{Devices: []sim.DeviceOptions{{Granularity: kib64, Memory: 64 * mib}, {Granularity: kib64, Memory: 64 * mib}}})
}

func TestImportedMemoryIsAnOrdinaryBuffer(t *testing.T) {
	_, d := small(t)
	b := chunked(t, d, 3)
	n := 3*kib64 - 10
	o := importing(b, n, imports(t, b, n))
	i := imported(t, o)
	require.Equal(t, vmm.BufferStats{Reserved: 3 * kib64, Committed: 3 * kib64, Used: n, Chunks: 3, Grown: 1}, i.Stats())
	require.Equal(t, pattern(3*kib64, 1)[:n], contents(t, i))
	require.NoError(t, gputest.Err(i.AppendUndefined(10)), "the rest of the last chunk")
	require.ErrorIs(t, gputest.Err(i.AppendUndefined(1)), cuda.ErrCapacity)
	require.ErrorIs(t, gputest.Err(i.Append(nil, []byte("x"))), cuda.ErrCapacity)
	require.ErrorContains(t, i.Resize(nil, 4*kib64), "another process's")
	part, err := i.Slice(5, 8)
	require.NoError(t, err)
	require.NoError(t, part.CopyFrom(nil, []byte("abc")))
	require.Equal(t, "abc", string(contents(t, b)[5:8]))
	// What was clipped never comes back.
	require.NoError(t, i.Resize(nil, 10))
	require.NoError(t, i.Clip())
	require.Equal(t, kib64, i.Stats().Committed)
	require.ErrorIs(t, gputest.Err(i.AppendUndefined(kib64)), cuda.ErrCapacity)
}

// Another process's memory is not this one's to take away, and neither is what is named beside it.
func TestImportedMemoryDoesNotSleep(t *testing.T) {
	w := newWorld(t, false)
	defer w.end()
	b := w.buffer(2)
	made, err := share.NewBuffer(testOp, importing(b, kib64, imports(t, b, kib64)))
	require.NoError(t, err)
	i := made.(*vmm.Buffer)
	w.own(i)
	_, err = vmm.Suspend(w.ctx(), vmm.SuspendOptions{}, b, i)
	require.ErrorIs(t, err, cuda.ErrNotSupported)
	require.ErrorContains(t, err, "imported")
	_, err = vmm.SuspendAfter(vmm.SuspendOptions{}, []*cuda.Stream{w.s}, b, i)
	require.ErrorIs(t, err, cuda.ErrNotSupported)
	require.Equal(t, "active", vmm.StateOf(b))
}

func TestReadOnlyImportsStaySo(t *testing.T) {
	_, d := small(t)
	b := chunked(t, d, 1)
	o := importing(b, kib64, imports(t, b, kib64))
	o.ReadOnly = true
	i := imported(t, o)
	require.Equal(t, pattern(kib64, 1), contents(t, i))
	part, err := i.Slice(0, 1)
	require.NoError(t, err)
	require.ErrorIs(t, part.Zero(nil), cuda.ErrNotPermitted)
	require.ErrorIs(t, i.SetAccess(vmm.Access{Location: d.Location(), Mode: vmm.ReadWrite}), cuda.ErrNotPermitted)
	moved, err := i.Move(vmm.MoveOptions{Reserve: 4 * kib64})
	require.NoError(t, err)
	closed(t, moved)
	require.ErrorIs(t, moved.SetAccess(vmm.Access{Location: d.Location(), Mode: vmm.ReadWrite}), cuda.ErrNotPermitted)
	require.ErrorIs(t, gputest.Err(moved.AppendUndefined(kib64)), cuda.ErrCapacity)
}

func TestFollowedLengths(t *testing.T) {
	_, d := small(t)
	b := chunked(t, d, 4)
	all := imports(t, b, 4*kib64)
	o := importing(b, 0, all[:1])
	o.Reserve, o.Followed = 3*kib64, true
	i := imported(t, o)
	in := share.Of(i)
	require.ErrorIs(t, gputest.Err(i.AppendUndefined(1)), cuda.ErrNotPermitted)
	require.ErrorIs(t, i.Resize(nil, 0), cuda.ErrNotPermitted)
	require.ErrorIs(t, in.SetLen(testOp, kib64+1), cuda.ErrOutOfRange)
	require.NoError(t, in.SetLen(testOp, kib64))
	require.NoError(t, in.Attach(testOp, all[1:3]))
	require.ErrorIs(t, in.Attach(testOp, all[3:]), cuda.ErrOutOfRange)
	require.Zero(t, all[3].Release())
	require.NoError(t, in.SetLen(testOp, 3*kib64))
	require.Equal(t, pattern(3*kib64, 1), contents(t, i))

	// The tail goes behind the work of a stream, and others come in its place.
	h, err := in.Hold(testOp, "the publication that it follows", 3*kib64)
	require.NoError(t, err)
	defer h.Release()
	s := stream(t, d)
	v, err := share.Shrink(testOp, h, kib64, []*cuda.Stream{s})
	require.NoError(t, err)
	require.Len(t, v.Chunks, 2)
	require.NoError(t, v.Release())
	again := imports(t, b, 2*kib64)
	require.Zero(t, again[0].Release())
	require.NoError(t, in.Attach(testOp, again[1:]))
	require.NoError(t, in.SetLen(testOp, 2*kib64))
	require.Equal(t, pattern(2*kib64, 1), contents(t, i))
}

func TestWhatIsPublishedStays(t *testing.T) {
	_, d := small(t)
	s := stream(t, d)
	b := chunked(t, d, 4)
	in := share.Of(b)
	_, err := in.Hold(testOp, "x", 4*kib64+1)
	require.ErrorIs(t, err, cuda.ErrOutOfRange)
	h, err := in.Hold(testOp, `publication "weights"`, 2*kib64)
	require.NoError(t, err)
	for _, err := range []error{b.Close(), b.CloseAfter(s)} {
		require.ErrorIs(t, err, cuda.ErrInUse)
		require.ErrorContains(t, err, `publication "weights"`)
	}
	require.NoError(t, gputest.Err(b.AppendUndefined(kib64)))
	require.NoError(t, b.Resize(nil, 2*kib64))
	require.NoError(t, b.Clip(), "what lies behind may go")
	require.NoError(t, b.Resize(nil, 10))
	require.ErrorIs(t, b.Clip(), cuda.ErrInUse)
	require.ErrorIs(t, b.ClipAfter(s), cuda.ErrInUse)
	require.Equal(t, 2*kib64, b.Stats().Committed)
	require.ErrorIs(t, h.Cover(testOp, 11), cuda.ErrOutOfRange)
	require.NoError(t, h.Cover(testOp, 10))
	require.NoError(t, b.Clip())
	require.Equal(t, kib64, b.Stats().Committed)
	h.Release()
	h.Release()
	require.ErrorIs(t, h.Cover(testOp, 0), cuda.ErrClosed)
	require.NoError(t, b.CloseAfter(s))
	_, err = in.Hold(testOp, "x", 0)
	require.ErrorIs(t, err, cuda.ErrClosed)
}

func TestShrinkingTakesTheTailOutAtOnce(t *testing.T) {
	for _, after := range []bool{false, true} {
		m, d := small(t)
		s := stream(t, d)
		b := chunked(t, d, 4)
		in := share.Of(b)
		h, err := in.Hold(testOp, "ours", 4*kib64)
		require.NoError(t, err)
		other, err := in.Hold(testOp, "another", 3*kib64)
		require.NoError(t, err)
		var streams []*cuda.Stream
		if after {
			streams = append(streams, s)
		}
		_, err = share.Shrink(testOp, h, 2*kib64, streams)
		require.ErrorIs(t, err, cuda.ErrInUse)
		require.ErrorContains(t, err, "another")
		require.Equal(t, 4*kib64, b.Len())
		other.Release()

		before, err := in.View(testOp, 4*kib64)
		require.NoError(t, err)
		free, _ := m.Memory(0)
		v, err := share.Shrink(testOp, h, kib64+1, streams)
		require.NoError(t, err)
		require.Equal(t, kib64+1, b.Len())
		require.Equal(t, 2*kib64, b.Stats().Committed)
		require.Equal(t, before.Chunks[2:], v.Chunks)
		require.NoError(t, before.Release())
		require.NoError(t, gputest.Err(b.AppendUndefined(kib64)))
		now, err := in.View(testOp, uint64(b.Len()))
		require.NoError(t, err)
		require.Len(t, now.Chunks, 3)
		require.Equal(t, v.Chunks[0].Offset, now.Chunks[2].Offset)
		require.NotEqual(t, v.Chunks[0].Handle.ID(), now.Chunks[2].Handle.ID(), "a chunk at the same place is another one")
		require.NoError(t, now.Release())
		held, _ := m.Memory(0)
		require.Equal(t, free-kib64, held, "what went stays taken")
		require.NoError(t, v.Release())
		released, _ := m.Memory(0)
		require.Equal(t, free+kib64, released)
		h.Release()
	}
}

// A driver that refuses a release several times gets it again, and nothing is lost.
func TestAReleaseIsTriedAgain(t *testing.T) {
	m, d := small(t)
	b := chunked(t, d, 2)
	h, err := share.Of(b).Hold(testOp, "ours", 2*kib64)
	require.NoError(t, err)
	gone, err := share.Shrink(testOp, h, kib64, nil)
	require.NoError(t, err)
	m.Inject(sim.Fault{Call: "cuMemRelease", Times: -1, Result: code})
	require.ErrorContains(t, gone.Release(), "System.Drain tries again")
	for range 9 {
		require.ErrorContains(t, d.System().Drain(t.Context()), "64 KiB of memory is left of an operation")
	}
	require.Equal(t, kib64, d.System().Stats().LeftoverBytes)
	m.ClearFaults()
	require.NoError(t, d.System().Drain(t.Context()))
	require.Empty(t, d.System().Leftovers())
	require.Equal(t, 1, d.System().Stats().Allocations)
	h.Release()
}

func TestShrinkingBehindACaptureChangesNothing(t *testing.T) {
	_, d := small(t)
	s := stream(t, d)
	b := chunked(t, d, 2)
	h, err := share.Of(b).Hold(testOp, "ours", 2*kib64)
	require.NoError(t, err)
	defer h.Release()
	g, err := s.WithCapture(cuda.CaptureOptions{}, func() error {
		_, err := share.Shrink(testOp, h, 0, []*cuda.Stream{s})
		require.ErrorIs(t, err, cuda.ErrCapturing)
		return nil
	})
	require.NoError(t, err)
	require.NoError(t, g.Close())
	require.Equal(t, 2*kib64, b.Len())
	require.NoError(t, b.Resize(nil, 0))
	require.ErrorIs(t, b.Clip(), cuda.ErrInUse)
}

// What publishers and followers do to a buffer is walked as the rest is.
func init() {
	scenarios = append(scenarios, shrinking(false), shrinking(true), attaching(), importingAnew())
}

// shrinking takes the tail of a published buffer.
func shrinking(after bool) scenario {
	var hold share.Hold
	var gone share.View
	sc := scenario{name: "Hold.Shrink", tears: true}
	sc.setup = func(w *world) {
		b := w.buffer(5)
		var err error
		hold, err = share.Of(b).Hold(testOp, "the test", uint64(b.Len()))
		require.NoError(w.t, err)
		gone = share.View{}
		w.own(closerFunc(func() error {
			hold.Release()
			return gone.Release()
		}))
	}
	sc.op = func(w *world) error {
		var streams []*cuda.Stream
		if after {
			streams = append(streams, w.s)
		}
		v, err := share.Shrink(testOp, hold, kib64, streams)
		gone.Chunks = append(gone.Chunks, v.Chunks...)
		if err == nil && after {
			err = w.drain()
		}
		return errors.Join(err, gone.Release())
	}
	sc.retry = func(w *world) error {
		if w.b.Len() > kib64 {
			if err := sc.op(w); err != nil {
				return err
			}
		}
		return errors.Join(w.b.Clip(), gone.Release(), w.drain()) // the reclaimer has what Release could not
	}
	if after {
		sc.name, sc.async = "Hold.Shrink after a stream", true
	}
	return sc
}

// attaching adds chunks to a buffer that follows another.
func attaching() scenario {
	var chunks []*phys.Handle
	var to share.Memory
	sc := scenario{name: "Attach"}
	sc.setup = func(w *world) {
		b := w.buffer(3)
		all := imports(w.t, b, 2*kib64)
		o := importing(b, 10, all[:1])
		o.Reserve, o.Followed = 3*kib64, true
		i, err := share.NewBuffer(testOp, o)
		require.NoError(w.t, err)
		w.own(i.(*vmm.Buffer))
		to, chunks = share.Of(i.(*vmm.Buffer)), all[1:]
		w.own(closerFunc(func() error {
			for _, h := range chunks {
				require.Zero(w.t, h.Release())
			}
			return nil
		}))
	}
	sc.op = func(*world) error {
		err := to.Attach(testOp, chunks)
		if err == nil {
			chunks = nil
		}
		return err
	}
	return sc
}

// importingAnew makes a buffer of imported memory.
func importingAnew() scenario {
	var chunks []*phys.Handle
	var from *vmm.Buffer
	sc := scenario{name: "share.NewBuffer"}
	sc.setup = func(w *world) {
		from = w.buffer(3)
		chunks = imports(w.t, from, 3*kib64-100)
		w.own(closerFunc(func() error {
			for _, h := range chunks {
				require.Zero(w.t, h.Release())
			}
			return nil
		}))
	}
	sc.op = func(w *world) error {
		o := importing(from, 10, chunks)
		o.Device, o.ReadOnly = w.peer, true
		b, err := share.NewBuffer(testOp, o)
		if err == nil {
			chunks = nil
			w.own(b.(*vmm.Buffer))
		}
		return err
	}
	return sc
}

type closerFunc func() error

func (f closerFunc) Close() error { return f() }
