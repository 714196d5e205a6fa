package multicast_test

import (
	"testing"
	"time"

	"github.com/cuvmm/cuvmm/csrc/kernels"
	"github.com/cuvmm/cuvmm/cuda"
	"github.com/cuvmm/cuvmm/cuda/sim"
	"github.com/cuvmm/cuvmm/multicast"
	"github.com/cuvmm/cuvmm/vmm"
	"github.com/stretchr/testify/require"
)

// bound is an object of one device with memory bound to it.
func bound(t *testing.T) (m *sim.Machine, d *cuda.Device, o *multicast.Object, a *vmm.Allocation, b *multicast.Binding) {
	m, devices := open(t, 1)
	o = complete(t, devices, unit)
	a = allocation(t, devices[0], unit)
	b = must(o.Bind(devices[0], 0, a, 0, unit))(t)
	closed(t, b)
	return m, devices[0], o, a, b
}

// The rows of docs/closing.md: what Close does while something depends on
// the object.
func TestCloseAgainstLiveDependants(t *testing.T) {
	t.Run("an object that is mapped, or bound to", func(t *testing.T) {
		m, d, o, _, b := bound(t)
		mp := mapped(t, o, d)
		require.NoError(t, o.Close())
		require.Equal(t, 1, m.Live()[sim.KindMulticast], "it lives")
		_, err := o.Bind(d, 0, allocation(t, d, unit), 0, unit)
		require.ErrorIs(t, err, cuda.ErrClosed)
		require.NoError(t, mp.Close())
		require.Equal(t, 1, m.Live()[sim.KindMulticast], "for the binding")
		require.NoError(t, b.Close())
		require.Zero(t, m.Live()[sim.KindMulticast])
	})
	t.Run("an allocation that is bound", func(t *testing.T) {
		m, d, o, a, b := bound(t)
		require.NoError(t, a.Close())
		require.Equal(t, 1, d.System().Stats().Allocations, "the memory lives")
		launch(t, d, mapped(t, o, d).Ptr())
		require.Empty(t, m.Fault())
		require.NoError(t, b.Close())
		require.Zero(t, d.System().Stats().Allocations)
	})
	t.Run("a mapping that memory was bound by", func(t *testing.T) {
		m, d, o, _, b := bound(t)
		require.NoError(t, b.Close())
		a, err := vmm.Create(d, unit, vmm.Properties{})
		require.NoError(t, err)
		own := mapped(t, a, d)
		require.NoError(t, a.Close())
		b = must(o.BindMapping(d, 0, own, 0, unit))(t)
		require.NoError(t, own.Close())
		launch(t, d, mapped(t, o, d).Ptr())
		require.Empty(t, m.Fault(), "the memory lives until it is unbound")
		require.NoError(t, b.Close())
	})
	t.Run("a binding that GPU work uses", func(t *testing.T) {
		m, d, o, _, b := bound(t)
		s := stream(t, d)
		mc := mapped(t, o, d).Ptr()
		m.Hold(s.Handle())
		run(t, d, s, mc)
		closing := make(chan error, 1)
		go func() { closing <- b.Close() }()
		for !b.Closing() {
			time.Sleep(time.Millisecond)
		}
		require.Empty(t, closing)
		require.Zero(t, m.Count("cuMulticastUnbind"))
		m.Release(s.Handle())
		require.NoError(t, <-closing)
		require.Empty(t, m.Fault())
	})
	t.Run("a binding, after a stream", func(t *testing.T) {
		m, d, o, _, b := bound(t)
		s := stream(t, d)
		mc := mapped(t, o, d).Ptr()
		m.Hold(s.Handle())
		run(t, d, s, mc)
		require.ErrorIs(t, b.CloseAfter(), cuda.ErrInvalidArgument)
		require.NoError(t, b.CloseAfter(s))
		require.Zero(t, m.Count("cuMulticastUnbind"))
		m.Release(s.Handle())
		require.NoError(t, d.System().Drain(t.Context()))
		require.Equal(t, 1, m.Count("cuMulticastUnbind"))
		require.Empty(t, m.Fault())
	})
	t.Run("a System", func(t *testing.T) {
		_, d, _, _, _ := bound(t)
		err := d.System().Close()
		require.ErrorIs(t, err, cuda.ErrInUse)
		require.ErrorContains(t, err, "multicast object of 2 MiB")
		require.ErrorContains(t, err, "multicast binding of 2 MiB")
	})
}

// run has a kernel reduce at the multicast address.
func run(t *testing.T, d *cuda.Device, s *cuda.Stream, mc cuda.Ptr) {
	t.Helper()
	mod := made[*cuda.Module](t)(d.LoadModule(kernels.Multimem))
	k, err := mod.Kernel(kernels.F32.AllReduce())
	require.NoError(t, err)
	require.NoError(t, k.Launch(s, cuda.Threads(100), mc, uint64(100)))
}

func launch(t *testing.T, d *cuda.Device, mc cuda.Ptr) {
	t.Helper()
	s := stream(t, d)
	run(t, d, s, mc)
	require.NoError(t, s.Synchronize())
}

func TestALostObjectIsReported(t *testing.T) {
	m, err := sim.New(sim.WithMulticast(1))
	require.NoError(t, err)
	sys, err := m.Open(cuda.Options{TraceLeaks: true})
	require.NoError(t, err)
	o, err := multicast.Create(sys, unit, multicast.Properties{Devices: 1})
	require.NoError(t, err)
	require.Contains(t, sys.Live()[0], "TestALostObjectIsReported")
	require.NoError(t, o.Close())
	require.NoError(t, sys.Close())
	require.NoError(t, m.Close())
}

// Memory that was bound for a lost device is unbound, and nothing is bound to it again.
func TestALostDevice(t *testing.T) {
	m, sys := sim.Open(t, sim.WithMulticast(2))
	devices := sys.Devices()
	o := complete(t, devices, unit)
	a, b := allocation(t, devices[0], unit), allocation(t, devices[1], unit)
	first := must(o.Bind(devices[0], 0, a, 0, unit))(t)
	second := must(o.Bind(devices[1], 0, b, 0, unit))(t)
	s := stream(t, devices[0])
	require.NoError(t, s.Memset(mapped(t, o, devices[0]).Ptr(), 1, 1)) // undefined: it loses the context
	require.ErrorIs(t, s.Synchronize(), cuda.ErrDeviceLost)
	unbinds := m.Count("cuMulticastUnbind")
	require.NoError(t, first.Close())
	require.NoError(t, second.Close())
	require.Equal(t, unbinds+2, m.Count("cuMulticastUnbind"))
	_, err := o.Bind(devices[0], 0, a, 0, unit)
	require.ErrorIs(t, err, cuda.ErrDeviceLost)
	again := must(o.Bind(devices[1], 0, b, 0, unit))(t)
	require.NoError(t, again.Close())
}
