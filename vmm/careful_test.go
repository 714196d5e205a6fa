package vmm_test

import (
	"context"
	"testing"
	"time"

	"github.com/cuvmm/cuvmm/cuda"
	"github.com/cuvmm/cuvmm/cuda/sim"
	"github.com/cuvmm/cuvmm/internal/driver"
	"github.com/cuvmm/cuvmm/internal/test/gputest"
	"github.com/cuvmm/cuvmm/vmm"
	"github.com/stretchr/testify/require"
)

func TestMemoryThatIsBeingGivenBackIsWaitedFor(t *testing.T) {
	m, d := open(t, sim.Options{Devices: []sim.DeviceOptions{{Granularity: kib64, Memory: 4 * kib64}}})
	s := stream(t, d)
	b, err := vmm.NewBuffer(d, vmm.BufferOptions{Reserve: 8 * kib64, Chunks: vmm.FixedChunks(kib64)})
	require.NoError(t, err)
	require.NoError(t, gputest.Err(b.AppendUndefined(3*kib64)))
	m.Inject(sim.Fault{Call: "cuMemUnmap", Delay: 100 * time.Millisecond})
	require.NoError(t, b.CloseAfter(s))
	time.Sleep(20 * time.Millisecond) // the reclaimer is in cuMemUnmap
	a, err := vmm.Create(d, 2*kib64, vmm.Properties{})
	require.NoError(t, err)
	require.NoError(t, a.Close())
}

func TestCloseAfterThatFailedCanBeClosedAgain(t *testing.T) {
	m, d := open(t)
	s := stream(t, d)
	b, err := vmm.NewBuffer(d, vmm.BufferOptions{Reserve: 8 * mib})
	require.NoError(t, err)
	require.NoError(t, gputest.Err(b.AppendUndefined(1)))
	m.Inject(sim.Fault{Call: "cuMemUnmap", Result: 999})
	require.NoError(t, b.CloseAfter(s))
	require.Error(t, d.System().Drain(t.Context()))
	require.NoError(t, b.Close())
	require.Zero(t, d.System().Stats().Mappings, "Close goes on")
}

func TestAStreamThatIsBeingClosedIsWaitedFor(t *testing.T) {
	m, err := sim.New(sim.Options{})
	require.NoError(t, err)
	sys, err := m.Open(cuda.Options{NamedStreamsOnly: true})
	require.NoError(t, err)
	d := sys.Devices()[0]
	s, err := d.NewStream(cuda.StreamOptions{})
	require.NoError(t, err)
	b, err := vmm.NewBuffer(d, vmm.BufferOptions{Reserve: 8 * mib})
	require.NoError(t, err)
	require.NoError(t, gputest.Err(b.AppendUndefined(100)))
	m.Hold(s.Handle())
	require.NoError(t, s.Memset(b.Ptr(), 1, 100))
	streamClosed := make(chan error, 1)
	go func() { streamClosed <- s.Close() }()
	time.Sleep(50 * time.Millisecond)
	done := make(chan error, 1)
	go func() { done <- b.Close() }()
	select {
	case <-done:
		t.Error("Close returned while the stream's work runs")
	case <-time.After(100 * time.Millisecond):
	}
	m.Release(s.Handle())
	t.Log("stream close:", <-streamClosed)
}

func TestASystemThatIsClosedAnswersErrClosed(t *testing.T) {
	m, err := sim.New(sim.Options{})
	require.NoError(t, err)
	sys, err := m.Open(cuda.Options{})
	require.NoError(t, err)
	d := sys.Devices()[0]
	s, err := d.NewStream(cuda.StreamOptions{})
	require.NoError(t, err)
	require.NoError(t, s.Close())
	require.NoError(t, sys.Close())
	_, err = d.NewStream(cuda.StreamOptions{})
	t.Log(err)
	require.ErrorIs(t, err, cuda.ErrClosed)
}
func TestASystemThatIsClosedAnswersErrClosed2(t *testing.T) {
	m, err := sim.New(sim.Options{})
	require.NoError(t, err)
	sys, err := m.Open(cuda.Options{})
	require.NoError(t, err)
	d := sys.Devices()[0]
	require.NoError(t, sys.Close())
	s, err := d.NewStream(cuda.StreamOptions{})
	t.Log(s, err)
	_, err = vmm.Create(d, 2*mib, vmm.Properties{})
	t.Log(err)
	require.ErrorIs(t, err, cuda.ErrClosed)
	require.NoError(t, m.Close())
}

func TestAContextThatWentAfterItsBorrowedStream(t *testing.T) {
	m, d := open(t)
	drv := driver.Of(m).Foreign()
	c, r := drv.CtxCreate(0, 0)
	require.Zero(t, r)
	h, r := drv.StreamCreate(c, 1)
	require.Zero(t, r)
	s, err := d.BorrowStream(uintptr(h))
	require.NoError(t, err)
	require.NoError(t, s.Close())
	require.Zero(t, drv.StreamDestroy(c, h))
	require.Zero(t, drv.CtxDestroy(c))
	b, err := vmm.NewBuffer(d, vmm.BufferOptions{Reserve: 8 * mib})
	require.NoError(t, err)
	require.NoError(t, gputest.Err(b.AppendUndefined(1)))
	require.NoError(t, b.Close())
}

func TestTheTransferStreamOfABorrowedContextGoes(t *testing.T) {
	m, err := sim.New(sim.Options{})
	require.NoError(t, err)
	drv := driver.Of(m).Foreign()
	require.Zero(t, drv.Init())
	c, r := drv.CtxCreate(0, 0)
	require.Zero(t, r)
	sys, err := m.Open(cuda.Options{})
	require.NoError(t, err)
	d, err := sys.Devices()[0].WithContext(uintptr(c))
	require.NoError(t, err)
	b, err := vmm.NewBuffer(d, vmm.BufferOptions{Reserve: 8 * mib})
	require.NoError(t, err)
	require.NoError(t, gputest.Err(b.Append(nil, []byte("x"))))
	require.NoError(t, b.Close())
	require.NoError(t, sys.Close())
	t.Log(m.Live())
	require.Zero(t, drv.CtxDestroy(c))
	require.NoError(t, m.Close())
}

func TestThePrimaryContextIsReleased(t *testing.T) {
	m, err := sim.New(sim.Options{})
	require.NoError(t, err)
	drv := driver.Of(m).Foreign()
	require.Zero(t, drv.Init())
	c, r := drv.DevicePrimaryCtxRetain(0)
	require.Zero(t, r)
	sys, err := m.Open(cuda.Options{})
	require.NoError(t, err)
	d := sys.Devices()[0]
	_, err = d.WithContext(uintptr(c))
	require.NoError(t, err)
	_, err = d.Context()
	require.NoError(t, err)
	require.NoError(t, sys.Close())
	require.Zero(t, drv.DevicePrimaryCtxRelease(0))
	_, active, r := drv.DevicePrimaryCtxGetState(0)
	require.Zero(t, r)
	require.False(t, active, "the System's retain was released")
}

func TestClosingNeedsNoMemory(t *testing.T) {
	m, d := open(t)
	b, err := vmm.NewBuffer(d, vmm.BufferOptions{Reserve: 8 * mib})
	require.NoError(t, err)
	require.NoError(t, gputest.Err(b.AppendUndefined(1)))
	c, err := vmm.NewBuffer(d, vmm.BufferOptions{Reserve: 8 * mib})
	require.NoError(t, err)
	require.NoError(t, gputest.Err(c.AppendUndefined(1)))
	remove := m.Inject(sim.Fault{Call: "cuMemAlloc", Result: 2, Times: -1}) // another process takes all that is free
	err = b.Close()
	t.Log(err)
	err = c.Close()
	t.Log(err)
	remove()
	require.NoError(t, c.Close())
	require.NoError(t, err)
}

func TestTheOldestDriverOpens(t *testing.T) {
	m, err := sim.New(sim.OlderDriver(11030))
	require.NoError(t, err)
	sys, err := m.Open(cuda.Options{})
	require.NoError(t, err)
	require.NoError(t, sys.Close())
}

func TestSystemCloseThatIsRefusedChangesNothing(t *testing.T) {
	m, d := open(t)
	_ = m
	b, err := vmm.NewBuffer(d, vmm.BufferOptions{Reserve: 64 * mib})
	require.NoError(t, err)
	closed(t, b)
	tr, err := d.Transfer()
	require.NoError(t, err)
	require.ErrorIs(t, d.System().Close(), cuda.ErrInUse)
	require.NoError(t, gputest.Err(b.Append(tr, []byte("x"))))
}

func TestAHookMayCloseABuffer(t *testing.T) {
	m, err := sim.New(sim.Options{})
	require.NoError(t, err)
	sys, err := m.Open(cuda.Options{})
	require.NoError(t, err)
	d := sys.Devices()[0]
	s, err := d.NewStream(cuda.StreamOptions{})
	require.NoError(t, err)
	b, err := vmm.NewBuffer(d, vmm.BufferOptions{Reserve: 64 * mib, Chunks: vmm.FixedChunks(2 * mib)})
	require.NoError(t, err)
	require.NoError(t, gputest.Err(b.Append(nil, make([]byte, 6*mib))))
	g, err := s.WithCapture(cuda.CaptureOptions{}, func() error { return s.Memset(b.Ptr(), 1, 10) })
	require.NoError(t, err)
	require.NoError(t, g.OnClose(func() { _ = b.Close() }))
	require.NoError(t, g.Launch(s))
	require.NoError(t, b.Resize(nil, 10))
	m.Hold(s.Handle())
	require.NoError(t, s.Memset(b.Ptr(), 1, 1))
	require.NoError(t, g.CloseAfter(s))
	require.NoError(t, b.ClipAfter(s))
	m.Release(s.Handle())
	ctx, cancel := context.WithTimeout(t.Context(), testTimeout)
	defer cancel()
	drained := make(chan error, 1)
	go func() { drained <- sys.Drain(ctx) }()
	select {
	case err := <-drained:
		require.NoError(t, err)
	case <-time.After(2 * testTimeout):
		t.Fatal("Drain hangs beyond its context")
	}
}

func TestCloseAfterNeverBlocks(t *testing.T) {
	m, d := open(t)
	s, other := stream(t, d), stream(t, d)
	b, err := vmm.NewBuffer(d, vmm.BufferOptions{Reserve: 64 * mib})
	require.NoError(t, err)
	require.NoError(t, gputest.Err(b.AppendUndefined(10)))
	m.Hold(s.Handle())
	require.NoError(t, s.Memset(b.Ptr(), 1, 10))
	closes := make(chan error, 1)
	go func() { closes <- b.Close() }()
	time.Sleep(30 * time.Millisecond)
	done := make(chan error, 1)
	go func() { done <- b.CloseAfter(other) }()
	select {
	case <-done:
	case <-time.After(testTimeout):
		t.Error("CloseAfter waits for the GPU, behind a Close")
	}
	m.Release(s.Handle())
	require.NoError(t, <-closes)
}

func TestCloseAfterSaysNilOnlyWhereItCloses(t *testing.T) {
	m, d := open(t)
	s, other := stream(t, d), stream(t, d)
	b, err := vmm.NewBuffer(d, vmm.BufferOptions{Reserve: 64 * mib})
	require.NoError(t, err)
	closed(t, b)
	second := make(chan error, 1)
	g, err := s.WithCapture(cuda.CaptureOptions{}, func() error {
		first := true
		m.OnCall(func(call string) {
			if call == "cuStreamIsCapturing" && first {
				first = false
				m.OnCall(nil)
				go func() { second <- b.CloseAfter(other) }()
				time.Sleep(20 * time.Millisecond)
			}
		})
		require.ErrorIs(t, b.CloseAfter(s), cuda.ErrCapturing)
		return nil
	})
	require.NoError(t, err)
	require.NoError(t, g.Close())
	require.NoError(t, <-second)
	require.ErrorIs(t, gputest.Err(b.AppendUndefined(1)), cuda.ErrClosed, "CloseAfter returned nil")
}
