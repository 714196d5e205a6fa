//go:build linux && cgo && (amd64 || arm64) && !cuvmm_nocgo && cuvmm_libcuda

package main

import (
	"encoding/json"
	"testing"
	"time"

	"github.com/cuvmm/cuvmm/cuda/sim"
	"github.com/cuvmm/cuvmm/internal/driver"
	"github.com/cuvmm/cuvmm/internal/test/drivertest"
	"github.com/stretchr/testify/require"
)

// The conformance suite calls the exports through csrc, linked into the test:
// Go to C to Go. It needs the build tag cuvmm_libcuda, with which csrc does not promise
// that C calls never call back.

const conformanceChild = "conformance on the exports"

func init() {
	sim.RegisterKernel(drivertest.NothingKernel, func(*sim.Kernel) {})
	sim.RegisterKernel(drivertest.HoldKernel, func(k *sim.Kernel) {
		for k.LoadWord(sim.Param[uint64](k, 0)) == 0 {
			k.Sleep(100 * time.Microsecond)
		}
	})
	sim.RegisterKernel(drivertest.MeetKernel, func(k *sim.Kernel) {
		if uint32(k.SharedBytes) == sim.Param[uint32](k, 2) {
			sim.Store(k, sim.Param[uint64](k, 0), []uint32{uint32(k.Grid[0]), uint32(k.Grid[0])})
		}
	})
	drivertest.RegisterChild(conformanceChild, func(args []string) (driver.Driver, error) {
		var o sim.Options
		if err := json.Unmarshal([]byte(args[0]), &o); err != nil {
			return nil, err
		}
		m, err := sim.New(o)
		if err != nil {
			return nil, err
		}
		return linked(m)
	})
}

// exported is the exports as csrc calls them, with the description of the software driver.
type exported struct {
	driver.Driver
	software driver.Driver
}

func linked(m *sim.Machine) (driver.Driver, error) {
	use(m)
	d, err := openLinked()
	if err != nil {
		return nil, err
	}
	return exported{driver.Of(d), driver.Of(m)}, nil
}

func (e exported) Describe() driver.Description { return e.software.Describe() }

func (e exported) HostTouch(p driver.Ptr, n uint64, write bool) driver.Result {
	return e.software.(driver.HostTouched).HostTouch(p, n, write)
}

func (e exported) Culprit(c driver.Context) string { return e.software.(driver.Culprit).Culprit(c) }

// The machines are those of cuda/sim's conformance test.
func TestConformance(t *testing.T) {
	multicast := sim.DeviceOptions{ContextMemory: 527 << 20, Attributes: map[int]int{int(driver.AttrMulticast): 1}}
	usual := drivertest.Machine{Granularity: 2 << 20, HostGranularity: 2 << 20}
	folder, other, two := usual, usual, usual
	folder.IMEXChannel, folder.Together = true, true
	other.Granularity = 64 << 10
	two.ContextBytes = 527 << 20
	for _, c := range []struct {
		name    string
		options sim.Options
		facts   drivertest.Machine
	}{
		{"default", sim.Options{}, usual},
		{"in a folder", sim.Options{Folder: t.TempDir(), Fabric: sim.Fabric{Channels: []int{0}}, Devices: sim.WithMulticast(1).Devices}, folder},
		{"other granularity", sim.WithGranularity(64 << 10), other},
		{"older driver", sim.OlderDriver(11030), usual},
		{"driver with the first form of prefetch", sim.OlderDriver(12010), usual},
		{"no concurrent managed access", sim.WithoutConcurrentManagedAccess(), usual},
		{"no descriptors", sim.WithoutDescriptors(), usual},
		{"two devices", sim.Options{Devices: []sim.DeviceOptions{multicast, multicast}}, two},
	} {
		t.Run(c.name, func(t *testing.T) {
			m, err := sim.New(c.options)
			require.NoError(t, err)
			t.Cleanup(func() { require.NoError(t, m.Close()) })
			d, err := linked(m)
			require.NoError(t, err)
			options, err := json.Marshal(c.options)
			require.NoError(t, err)
			drivertest.Run(t, drivertest.Env{Driver: d, Child: conformanceChild, ChildArgs: []string{string(options)}, Machine: c.facts})
		})
	}
}
