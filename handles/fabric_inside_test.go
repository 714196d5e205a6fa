//go:build linux

package handles

import (
	"fmt"
	"testing"

	"github.com/cuvmm/cuvmm/cuda"
	"github.com/cuvmm/cuvmm/cuda/sim"
	"github.com/cuvmm/cuvmm/internal/core"
	"github.com/cuvmm/cuvmm/internal/driver"
	"github.com/cuvmm/cuvmm/internal/test/gputest"
	"github.com/cuvmm/cuvmm/vmm"
	"github.com/stretchr/testify/require"
)

// remoteDriver reports another location of imported memory.
type remoteDriver struct {
	driver.Driver
	at driver.Location
}

func (d remoteDriver) MemGetAllocationPropertiesFromHandle(h driver.MemHandle) (driver.AllocationProp, driver.Result) {
	p, r := d.Driver.MemGetAllocationPropertiesFromHandle(h)
	p.Location = d.at
	return p, r
}

// Memory of another host counts as the importing device's, whatever location the driver
// reports: that is in the other host's numbering of devices, or in none.
func TestMemoryOfAnotherHost(t *testing.T) {
	for _, at := range []driver.Location{
		{Type: driver.LocationDevice, ID: 0}, {Type: driver.LocationDevice, ID: 7}, {Type: driver.LocationDevice, ID: -2},
		{Type: driver.LocationNone}, {Type: 5, ID: -2}, // a type of later drivers, for devices that are not visible
	} {
		t.Run(fmt.Sprint(at), func(t *testing.T) {
			var devices []*cuda.Device
			folder := t.TempDir()
			for range 2 {
				_, s := sim.Open(t, sim.Options{Folder: folder, Fabric: sim.Fabric{Channels: []int{0}}, Devices: make([]sim.DeviceOptions, 2)})
				devices = append(devices, s.Devices()[1])
			}
			from, to := devices[0], devices[1]
			sys := core.SystemOf(to)
			sys.Drv = remoteDriver{sys.Drv, at}
			b, err := vmm.NewBuffer(from, vmm.BufferOptions{Reserve: 2 << 20, Memory: vmm.Properties{Handles: vmm.Fabric}})
			require.NoError(t, err)
			require.NoError(t, gputest.Err(b.Append(nil, []byte("from afar"))))
			offerOf := func(l *Lease, err error) Offer {
				require.NoError(t, err)
				t.Cleanup(func() { require.NoError(t, l.Close()) })
				o := l.Offer()
				o.Descriptor.Device = cuda.UUID{0xfa}
				return o
			}
			i, err := ImportBuffer(to, offerOf(LeaseBuffer(b, LeaseOptions{})), ImportOptions{})
			require.NoError(t, err)
			got := make([]byte, 9)
			all, err := i.Slice(0, len(got))
			require.NoError(t, err)
			require.NoError(t, all.CopyTo(nil, got))
			require.Equal(t, "from afar", string(got))
			require.ErrorIs(t, all.Host(func([]byte) error { return nil }), cuda.ErrNotSupported)
			require.NoError(t, i.Close())

			require.NoError(t, b.Close())
		})
	}
}
