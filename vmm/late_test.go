package vmm_test

import (
	"bytes"
	"context"
	"fmt"
	"io"
	"sync"
	"testing"
	"time"

	"github.com/cuvmm/cuvmm/cuda"
	"github.com/cuvmm/cuvmm/cuda/sim"
	"github.com/cuvmm/cuvmm/internal/test/gputest"
	"github.com/cuvmm/cuvmm/vmm"
	"github.com/stretchr/testify/require"
)

// submissions are the operations that submit work without a stream of the caller's, and wait
// for it: each can fail after the driver has accepted the work.
var submissions = []struct {
	name string
	do   func(b, o *vmm.Buffer, h *cuda.HostBuffer) error
}{
	{"Append", func(b, _ *vmm.Buffer, _ *cuda.HostBuffer) error { return gputest.Err(b.Append(nil, []byte("late"))) }},
	{"AppendHost", func(b, _ *vmm.Buffer, h *cuda.HostBuffer) error { return gputest.Err(b.AppendHost(nil, h.All())) }},
	{"AppendSlice", func(b, o *vmm.Buffer, _ *cuda.HostBuffer) error { return gputest.Err(b.AppendSlice(nil, first(o))) }},
	{"AppendPtr", func(b, o *vmm.Buffer, _ *cuda.HostBuffer) error { return gputest.Err(b.AppendPtr(nil, o.Ptr(), 5)) }},
	{"Resize", func(b, _ *vmm.Buffer, _ *cuda.HostBuffer) error { return b.Resize(nil, 100) }},
	{"CopyTo", func(b, _ *vmm.Buffer, _ *cuda.HostBuffer) error { return first(b).CopyTo(nil, make([]byte, 5)) }},
	{"CopyFrom", func(b, _ *vmm.Buffer, _ *cuda.HostBuffer) error { return first(b).CopyFrom(nil, make([]byte, 5)) }},
	{"CopyToHost", func(b, _ *vmm.Buffer, h *cuda.HostBuffer) error { return first(b).CopyToHost(nil, five(h)) }},
	{"CopyFromHost", func(b, _ *vmm.Buffer, h *cuda.HostBuffer) error { return first(b).CopyFromHost(nil, five(h)) }},
	{"CopyFromSlice", func(b, o *vmm.Buffer, _ *cuda.HostBuffer) error { return first(b).CopyFromSlice(nil, first(o)) }},
	{"Zero", func(b, _ *vmm.Buffer, _ *cuda.HostBuffer) error { return first(b).Zero(nil) }},
	{"Reader", func(b, _ *vmm.Buffer, _ *cuda.HostBuffer) error {
		return gputest.Err(vmm.NewReader(b).WriteTo(io.Discard))
	}},
	{"Writer", func(b, _ *vmm.Buffer, _ *cuda.HostBuffer) error {
		return gputest.Err(vmm.NewWriter(b).ReadFrom(bytes.NewReader([]byte("late"))))
	}},
	{"Fork", func(b, _ *vmm.Buffer, _ *cuda.HostBuffer) error {
		f, err := b.Fork(nil, 5, vmm.ForkOptions{})
		if err == nil {
			err = f.Close()
		}
		return err
	}},
}

func first(b *vmm.Buffer) vmm.Slice[byte] {
	s, err := b.Slice(0, 5)
	if err != nil {
		panic(err)
	}
	return s
}

func five(h *cuda.HostBuffer) cuda.HostSlice {
	s, err := h.Slice(0, 5)
	if err != nil {
		panic(err)
	}
	return s
}

// started is a buffer with some bytes.
func started(t *testing.T, d *cuda.Device) *vmm.Buffer {
	t.Helper()
	b, err := vmm.NewBuffer(d, vmm.BufferOptions{Reserve: 8 * mib})
	require.NoError(t, err)
	closed(t, b)
	require.NoError(t, gputest.Err(b.Append(nil, []byte("start"))))
	return b
}

// Work that was submitted before an operation failed stays known: whatever it uses is taken
// away behind it, although its stream is named nowhere.
func TestLateWorkOfAnOperationThatFailed(t *testing.T) {
	for _, call := range []string{"cuEventCreate", "cuEventRecord", "cuEventSynchronize", "cuEventQuery", "cuStreamIsCapturing"} {
		for _, times := range []int{1, 2, -1} {
			for _, op := range submissions {
				t.Run(fmt.Sprintf("%s/%s/%d", op.name, call, times), func(t *testing.T) {
					t.Parallel()
					m, d := open(t)
					transfer, err := d.Transfer()
					require.NoError(t, err)
					named := stream(t, d)
					b, o := started(t, d), started(t, d)
					h, err := d.NewHostBuffer(4096)
					require.NoError(t, err)
					closed(t, h)
					at := h.Ptr()

					release := m.Hold(transfer.Handle())
					m.Inject(sim.Fault{Call: call, Times: times, Result: code})
					failed := make(chan error, 1)
					go func() { failed <- op.do(b, o, h) }()
					select {
					case err = <-failed:
					case <-time.After(20 * time.Millisecond): // it waits for the work, as it should
						release()
						err = <-failed
					}
					m.ClearFaults()
					if err != nil {
						require.NoError(t, b.CloseAfter(named))
						require.NoError(t, o.CloseAfter(named))
						require.NoError(t, h.CloseAfter(named))
						ctx, cancel := context.WithTimeout(t.Context(), 10*time.Millisecond)
						defer cancel()
						_ = d.System().Drain(ctx)
						next, err := d.NewHostBuffer(4096)
						require.NoError(t, err)
						defer func() { require.NoError(t, next.Close()) }()
						copy(next.Bytes(), "other")
						release()
						require.NoError(t, transfer.Synchronize())
						require.Equal(t, "other", string(next.Bytes()[:5]), "a late copy into memory of another owner, %v", next.Ptr() == at)
					}
					require.Empty(t, m.Fault(), "%v", err)
					require.NoError(t, d.System().Drain(t.Context()))
				})
			}
		}
	}
}

// An append whose undo cannot wait leaves its copy on the stream: the next append, which
// gets the same place, comes behind it.
func TestAnAppendBehindALateCopy(t *testing.T) {
	m, d := open(t)
	busy, other := stream(t, d), stream(t, d)
	b := started(t, d)
	release := lateAppend(t, m, b, busy)
	require.Equal(t, 5, b.Len())
	at, err := b.Append(other, bytes.Repeat([]byte{'B'}, 100))
	require.NoError(t, err)
	require.Equal(t, 5, at)
	done, err := other.Done()
	require.NoError(t, err)
	require.False(t, done, "it waits for the late copy")
	release()
	require.NoError(t, other.Synchronize())
	require.NoError(t, busy.Synchronize())
	s, err := b.Slice(at, at+100)
	require.NoError(t, err)
	got := make([]byte, 100)
	require.NoError(t, s.CopyTo(nil, got))
	require.Equal(t, string(bytes.Repeat([]byte{'B'}, 100)), string(got))

	// Once a wait has succeeded, appends on other streams are ordered with nothing.
	release = m.Hold(busy.Handle())
	require.NoError(t, gputest.Err(b.Append(other, []byte("free"))))
	require.NoError(t, other.Synchronize())
	release()
}

// lateAppend has an append fail whose copy and whose undo's wait stay behind a busy stream.
func lateAppend(t *testing.T, m *sim.Machine, b *vmm.Buffer, busy *cuda.Stream) (release func()) {
	t.Helper()
	release = sync.OnceFunc(m.Hold(busy.Handle()))
	t.Cleanup(release)
	m.Inject(sim.Fault{Call: "cuEventRecord", Times: -1, Result: code})
	require.Error(t, gputest.Err(b.Append(busy, bytes.Repeat([]byte{'A'}, 100))))
	m.ClearFaults()
	return release
}

// AppendUndefined gives its caller the place of a late copy once that has landed, since no
// stream tells on which the caller writes there.
func TestAnUndefinedAppendBehindALateCopy(t *testing.T) {
	m, d := open(t)
	busy := stream(t, d)
	b := started(t, d)
	release := lateAppend(t, m, b, busy)
	appended := make(chan error, 1)
	go func() { appended <- gputest.Err(b.AppendUndefined(100)) }()
	select {
	case <-appended:
		require.Fail(t, "the late copy still writes there")
	case <-time.After(20 * time.Millisecond):
	}
	release()
	require.NoError(t, <-appended)
	require.Equal(t, 105, b.Len())
}

// A capture can hold no order behind the late copy, so an append in it waits.
func TestACapturedAppendBehindALateCopy(t *testing.T) {
	m, d := open(t)
	busy, s := stream(t, d), stream(t, d)
	b := started(t, d)
	release := lateAppend(t, m, b, busy)
	time.AfterFunc(20*time.Millisecond, release)
	g, err := s.WithCapture(cuda.CaptureOptions{}, func() error {
		return gputest.Err(b.Append(s, bytes.Repeat([]byte{'B'}, 100)))
	})
	require.NoError(t, err)
	closed(t, g)
	require.NoError(t, g.Launch(s))
	require.NoError(t, s.Synchronize())
	got := make([]byte, 105)
	all, err := b.Slice(0, 105)
	require.NoError(t, err)
	require.NoError(t, all.CopyTo(nil, got))
	require.Equal(t, "start"+string(bytes.Repeat([]byte{'B'}, 100)), string(got))
}

// Drain returns when its context ends, whatever the GPU does, and what other streams have
// passed is given back meanwhile: the reclaimer does not wait for the GPU.
func TestDrainBesideAForkThatFailed(t *testing.T) {
	m, d := open(t)
	idle, busy := stream(t, d), stream(t, d)
	b, other := started(t, d), started(t, d)
	release := m.Hold(busy.Handle()) // of no concern to the rest
	require.NoError(t, busy.Memset(b.Ptr()+5, 1, 1))
	m.Inject(sim.Fault{Call: "cuEventSynchronize", Times: -1, Result: code})
	_, err := b.Fork(nil, 5, vmm.ForkOptions{})
	require.Error(t, err)
	m.ClearFaults()
	require.NoError(t, other.CloseAfter(idle))
	require.NoError(t, d.System().Drain(t.Context()), "neither the fork nor the other buffer is behind that stream")
	require.Equal(t, 1, d.System().Stats().Reservations)
	release()
}
