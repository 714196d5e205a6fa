package vmm_test

import (
	"bytes"
	"fmt"
	"sync"
	"testing"
	"time"

	"github.com/cuvmm/cuvmm/csrc/kernels"
	"github.com/cuvmm/cuvmm/cuda"
	"github.com/cuvmm/cuvmm/cuda/sim"
	"github.com/cuvmm/cuvmm/internal/driver"
	"github.com/cuvmm/cuvmm/internal/test/gputest"
	"github.com/cuvmm/cuvmm/vmm"
	"github.com/stretchr/testify/require"
)

// losing is a machine with several devices, of which the last is lost on
// demand, and a stream on each.
type losing struct {
	t       *testing.T
	m       *sim.Machine
	sys     *cuda.System
	devices []*cuda.Device
	streams []*cuda.Stream
	owned   []closer
}

func newLosing(t *testing.T, n int) *losing {
	devices := make([]sim.DeviceOptions, n)
	for i := range devices {
		devices[i] = sim.DeviceOptions{Granularity: kib64, Memory: 64 * mib}
	}
	m, err := sim.New(sim.Options{Devices: devices})
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, m.Close()) })
	sys, err := m.Open(cuda.Options{})
	require.NoError(t, err)
	l := &losing{t: t, m: m, sys: sys, devices: sys.Devices()}
	for _, d := range l.devices {
		s, err := d.NewStream(cuda.StreamOptions{})
		require.NoError(t, err)
		l.streams = append(l.streams, s)
		l.own(s)
	}
	return l
}

func (l *losing) own(c closer) { l.owned = append(l.owned, c) }

// last is the device that is lost, with its stream.
func (l *losing) last() (*cuda.Device, *cuda.Stream) {
	n := len(l.devices) - 1
	return l.devices[n], l.streams[n]
}

// everybody has access.
func (l *losing) everybody() (all []vmm.Access) {
	for _, d := range l.devices {
		all = append(all, vmm.Access{Location: d.Location(), Mode: vmm.ReadWrite})
	}
	return all
}

// buffer is one of n chunks on a device.
func (l *losing) buffer(d *cuda.Device, chunks int, access ...vmm.Access) *vmm.Buffer {
	l.t.Helper()
	b, err := vmm.NewBuffer(d, vmm.BufferOptions{Reserve: 64 * kib64, Chunks: vmm.FixedChunks(kib64), Access: access})
	require.NoError(l.t, err)
	require.NoError(l.t, gputest.Err(b.Append(nil, pattern(chunks*kib64, 1))))
	l.own(b)
	return b
}

// lose has a kernel of the last device go astray.
func (l *losing) lose() {
	l.t.Helper()
	d, s := l.last()
	mod, err := d.LoadModule(kernels.Basic)
	require.NoError(l.t, err)
	l.own(mod)
	k, err := mod.Kernel(kernels.Fill)
	require.NoError(l.t, err)
	require.NoError(l.t, k.Launch(s, cuda.Threads(1), cuda.Ptr(0x1000), uint64(1), uint32(1), uint32(0)))
	require.ErrorIs(l.t, s.Synchronize(), cuda.ErrDeviceLost)
}

// end closes everything. Nothing is left on the machine.
func (l *losing) end() {
	l.t.Helper()
	for i := len(l.owned) - 1; i >= 0; i-- {
		require.NoError(l.t, l.owned[i].Close())
	}
	require.NoError(l.t, l.sys.Drain(l.t.Context()))
	require.Empty(l.t, l.sys.Live())
	require.NoError(l.t, l.sys.Close())
	for i := range l.devices {
		require.Equal(l.t, 64*mib, l.free(i))
	}
}

func (l *losing) free(device int) int {
	free, _ := l.m.Memory(device)
	return free
}

func TestALostDeviceLeavesTheOtherAlone(t *testing.T) {
	for _, n := range []int{2, 3} {
		t.Run(fmt.Sprintf("%d devices", n), func(t *testing.T) {
			l := newLosing(t, n)
			lost, dead := l.last()
			l.buffer(lost, 3)
			before := l.buffer(lost, 2, l.everybody()...)
			for _, d := range l.devices[:n-1] {
				l.buffer(d, 2, l.everybody()...) // the lost one has access
			}
			l.lose()

			require.ErrorIs(t, gputest.Err(before.Append(l.streams[n-1], []byte{1})), cuda.ErrDeviceLost)
			require.ErrorIs(t, gputest.Err(before.AppendUndefined(kib64)), cuda.ErrDeviceLost)
			_, err := vmm.Create(lost, kib64, vmm.Properties{})
			require.ErrorIs(t, err, cuda.ErrDeviceLost)
			for i, d := range l.devices[:n-1] {
				l.works(i, d, dead)
			}
			l.end()
		})
	}
}

// works uses a device as if nothing had happened.
func (l *losing) works(i int, d *cuda.Device, dead *cuda.Stream) {
	t, s := l.t, l.streams[i]
	l.buffer(d, 1) // takes what the device keeps for itself
	free := l.free(i)
	b := l.buffer(d, 4, l.everybody()[:len(l.devices)-1]...)
	require.NoError(t, gputest.Err(b.Append(s, pattern(3*kib64, 2))), "growth and copies")
	part, err := b.Slice(4*kib64, 7*kib64)
	require.NoError(t, err)
	got := make([]byte, part.Len())
	require.NoError(t, part.CopyTo(s, got))
	require.True(t, bytes.Equal(pattern(3*kib64, 2), got))

	// What is waited for is waited for, and the dead stream passes.
	l.m.Hold(s.Handle())
	require.NoError(t, part.Zero(s))
	require.NoError(t, b.CloseAfter(s, dead))
	time.Sleep(5 * time.Millisecond)
	require.Less(t, l.free(i), free, "CloseAfter waits for the work")
	l.m.Release(s.Handle())
	require.NoError(t, l.sys.Drain(t.Context()))
	require.Equal(t, free, l.free(i), "and gives the memory back")

	b = l.buffer(d, 2)
	l.m.Hold(s.Handle())
	require.NoError(t, s.Memset(b.Ptr(), 1, 100))
	closing := make(chan error, 1)
	go func() { closing <- b.Close() }()
	select {
	case err := <-closing:
		t.Fatalf("Close did not wait for a device that lives: %v", err)
	case <-time.After(5 * time.Millisecond):
	}
	l.m.Release(s.Handle())
	require.NoError(t, <-closing)
	require.Equal(t, free, l.free(i))

	b = l.buffer(d, 6)
	require.NoError(t, b.Resize(nil, kib64))
	require.NoError(t, b.ClipAfter(s))
	require.NoError(t, l.sys.Drain(t.Context()))
	require.Equal(t, kib64, b.Stats().Committed)
	require.NoError(t, b.Close())

	host, err := d.NewHostBuffer(100)
	require.NoError(t, err)
	first := &host.Bytes()[0]
	require.NoError(t, host.Close())
	host, err = d.NewHostBuffer(100)
	require.NoError(t, err)
	require.Same(t, first, &host.Bytes()[0], "pinned memory is used again")
	l.own(host)

	b = l.buffer(d, 1)
	g, err := s.WithCapture(cuda.CaptureOptions{}, func() error { return s.Upload(b.Ptr(), []byte{9}) })
	require.NoError(t, err)
	require.NoError(t, g.Launch(s))
	ran := false
	require.NoError(t, g.OnClose(func() { ran = true }))
	require.NoError(t, g.Close())
	require.True(t, ran)
	require.NoError(t, b.Close())
	require.Equal(t, free, l.free(i))
}

// Memory on a device that lives, which the lost one had access to, is waited
// for and given back; memory of both in one range goes as far as it can.
func TestALossInAStripedRange(t *testing.T) {
	l := newLosing(t, 2)
	d, s := l.devices[0], l.streams[0]
	lost, _ := l.last()
	r, err := vmm.Reserve(d, 4*kib64, vmm.ReserveOptions{})
	require.NoError(t, err)
	l.own(r)
	var maps []*vmm.Mapping
	free := l.free(0)
	for i := range 4 {
		a, err := vmm.Create(l.devices[i%2], kib64, vmm.Properties{})
		require.NoError(t, err)
		m, err := r.Map(i*kib64, a)
		require.NoError(t, err)
		require.NoError(t, a.Close())
		maps = append(maps, m)
		l.own(m)
	}
	require.NoError(t, r.SetAccess(0, 4*kib64, l.everybody()...))
	l.m.Hold(s.Handle())
	require.NoError(t, s.Memset(maps[1].Ptr(), 1, kib64), "the lost device's memory, by the other")
	l.lose()
	closing := make(chan error, 1)
	go func() { closing <- maps[1].Close() }()
	select {
	case err := <-closing:
		t.Fatalf("closed under work of the device that lives: %v", err)
	case <-time.After(5 * time.Millisecond):
	}
	l.m.Release(s.Handle())
	require.NoError(t, <-closing)
	l.m.Inject(sim.Fault{Call: "cuMemUnmap", Result: cuda.Code(driver.LaunchFailed), Parts: 2})
	require.NoError(t, maps[3].CloseAfter(s))
	require.NoError(t, l.sys.Drain(t.Context()))

	require.NoError(t, maps[0].Close())
	require.Equal(t, free-kib64, l.free(0))
	a, err := vmm.Create(d, kib64, vmm.Properties{})
	require.NoError(t, err)
	l.own(a)
	_, err = r.Map(kib64, a)
	require.ErrorIs(t, err, cuda.ErrDeviceLost, "perhaps the driver has something there")
	require.ErrorContains(t, err, "reserve another range")
	require.NoError(t, maps[2].SetAccess(vmm.Access{Location: lost.Location(), Mode: vmm.NoAccess}))
	l.end()
}

// Pinned memory that a lost device may have been copying from is not used
// again.
func TestPinnedMemoryOfTheTimeBeforeALoss(t *testing.T) {
	l := newLosing(t, 2)
	d := l.devices[0]
	host, err := d.NewHostBuffer(100)
	require.NoError(t, err)
	first := &host.Bytes()[0]
	l.lose()
	require.NoError(t, host.Close())
	again, err := d.NewHostBuffer(100)
	require.NoError(t, err)
	require.NotSame(t, first, &again.Bytes()[0])
	l.own(again)
	l.end()
}

// Many goroutines use one device while the other is lost.
func TestALossBesideACrowd(t *testing.T) {
	l := newLosing(t, 2)
	d := l.devices[0]
	lost, _ := l.last()
	for range 3 {
		l.buffer(lost, 2, l.everybody()...)
	}
	free := l.free(0)
	stop, errs := make(chan struct{}), make(chan error, 100)
	var wg sync.WaitGroup
	for range 4 {
		wg.Go(func() {
			s, err := d.NewStream(cuda.StreamOptions{})
			if err != nil {
				errs <- err
				return
			}
			defer func() { errs <- s.Close() }()
			for round := 0; ; round++ {
				b, err := vmm.NewBuffer(d, vmm.BufferOptions{Reserve: 8 * kib64, Chunks: vmm.FixedChunks(kib64), Access: l.everybody()})
				if err != nil {
					errs <- err
					return
				}
				want, got := pattern(2*kib64, round), make([]byte, 2*kib64)
				errs2 := []error{gputest.Err(b.Append(s, want))}
				part, err := b.Slice(0, len(want))
				errs2 = append(errs2, err, part.CopyTo(s, got), b.Resize(s, 10), b.ClipAfter(s))
				if !bytes.Equal(want, got) {
					errs2 = append(errs2, fmt.Errorf("other bytes came back"))
				}
				if round%2 == 0 {
					errs2 = append(errs2, b.CloseAfter(s))
				} else {
					errs2 = append(errs2, b.Close())
				}
				for _, err := range errs2 {
					if err != nil {
						errs <- err
						return
					}
				}
				select {
				case <-stop:
					return
				default:
				}
			}
		})
	}
	go func() { // what fails is told while the others go on
		time.Sleep(10 * time.Millisecond)
		l.lose()
		time.Sleep(30 * time.Millisecond)
		close(stop)
	}()
	wg.Wait()
	<-stop
	close(errs)
	for err := range errs {
		require.NoError(t, err)
	}
	require.NoError(t, l.sys.Drain(t.Context()))
	require.LessOrEqual(t, free-l.free(0), mib, "the streams' events and blocks")
	l.end()
}
