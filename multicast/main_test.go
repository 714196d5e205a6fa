package multicast_test

import (
	"testing"

	"github.com/cuvmm/cuvmm/cuda"
	"github.com/cuvmm/cuvmm/cuda/sim"
	"github.com/cuvmm/cuvmm/multicast"
	"github.com/cuvmm/cuvmm/vmm"
	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

const mib = 1 << 20

// unit is the granularity of multicast objects on software machines.
const unit = 2 * mib

// open gives a test a machine of its own with so many devices that have
// multicast. Everything must be closed when the test ends.
func open(t testing.TB, devices int) (*sim.Machine, []*cuda.Device) {
	t.Helper()
	m, s := sim.Open(t, sim.WithMulticast(devices))
	return m, s.Devices()
}

type closer interface{ Close() error }

func closed(t testing.TB, c closer) {
	t.Helper()
	t.Cleanup(func() { require.NoError(t, c.Close()) })
}

// made keeps what a call made until the test ends.
func made[C closer](t testing.TB) func(c C, err error) C {
	return func(c C, err error) C {
		t.Helper()
		require.NoError(t, err)
		closed(t, c)
		return c
	}
}

func object(t testing.TB, devices []*cuda.Device, size int, handles vmm.HandleTypes) *multicast.Object {
	t.Helper()
	return made[*multicast.Object](t)(multicast.Create(devices[0].System(), size, multicast.Properties{Devices: len(devices), Handles: handles}))
}

// complete is an object with all of its devices added.
func complete(t testing.TB, devices []*cuda.Device, size int) *multicast.Object {
	t.Helper()
	o := object(t, devices, size, 0)
	for _, d := range devices {
		require.NoError(t, o.AddDevice(d))
	}
	return o
}

func allocation(t testing.TB, d *cuda.Device, size int) *vmm.Allocation {
	t.Helper()
	return made[*vmm.Allocation](t)(vmm.Create(d, size, vmm.Properties{}))
}

// mapped maps memory for devices at a range of its own.
func mapped(t testing.TB, p vmm.Physical, devices ...*cuda.Device) *vmm.Mapping {
	t.Helper()
	r := made[*vmm.Reservation](t)(vmm.Reserve(devices[0], p.Size(), vmm.ReserveOptions{}))
	m := made[*vmm.Mapping](t)(r.Map(0, p))
	var access []vmm.Access
	for _, d := range devices {
		access = append(access, vmm.Access{Location: d.Location(), Mode: vmm.ReadWrite})
	}
	require.NoError(t, m.SetAccess(access...))
	return m
}

func stream(t testing.TB, d *cuda.Device) *cuda.Stream {
	t.Helper()
	return made[*cuda.Stream](t)(d.NewStream(cuda.StreamOptions{}))
}
