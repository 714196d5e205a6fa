package sim_test

import (
	"fmt"
	"testing"
	"time"

	"github.com/cuvmm/cuvmm/cuda/sim"
	"github.com/cuvmm/cuvmm/internal/driver"
	"github.com/cuvmm/cuvmm/internal/osmem"
	"github.com/cuvmm/cuvmm/internal/test/drivertest"
	"github.com/stretchr/testify/require"
)

// conformanceMachines are the machines on which the driver's rules are checked.
var conformanceMachines = []struct {
	name    string
	options sim.Options
	facts   drivertest.Machine
}{
	{
		"default",
		sim.Options{},
		drivertest.Machine{Granularity: 2 << 20, HostGranularity: 2 << 20},
	},
	{
		inFolder,
		sim.Options{Fabric: sim.Fabric{Channels: []int{0}}, Devices: []sim.DeviceOptions{
			{ContextMemory: 527 << 20, Attributes: map[int]int{int(driver.AttrMulticast): 1}},
		}},
		drivertest.Machine{Granularity: 2 << 20, HostGranularity: 2 << 20, IMEXChannel: true, Together: true, ContextBytes: 527 << 20},
	},
	{
		"other granularity",
		sim.WithGranularity(64 << 10),
		drivertest.Machine{Granularity: 64 << 10, HostGranularity: 2 << 20},
	},
	{
		"older driver",
		sim.OlderDriver(11030),
		drivertest.Machine{Granularity: 2 << 20, HostGranularity: 2 << 20},
	},
	{
		"driver with the first form of prefetch",
		sim.OlderDriver(12010),
		drivertest.Machine{Granularity: 2 << 20, HostGranularity: 2 << 20},
	},
	{
		"no concurrent managed access",
		sim.WithoutConcurrentManagedAccess(),
		drivertest.Machine{Granularity: 2 << 20, HostGranularity: 2 << 20},
	},
	{
		"no descriptors",
		sim.WithoutDescriptors(),
		drivertest.Machine{Granularity: 2 << 20, HostGranularity: 2 << 20},
	},
	{
		"two devices, driver for CUDA 13.4",
		sim.Options{DriverVersion: 13040, Devices: []sim.DeviceOptions{
			{ContextMemory: 527 << 20, Attributes: map[int]int{int(driver.AttrMulticast): 1}},
			{ContextMemory: 527 << 20, Attributes: map[int]int{int(driver.AttrMulticast): 1}},
		}},
		drivertest.Machine{Granularity: 2 << 20, HostGranularity: 2 << 20, ContextBytes: 527 << 20},
	},
}

// inFolder is the machine whose test and its children share a folder.
const inFolder = "in a folder, with a fabric channel"

const conformanceChild = "conformance on the software driver"

func init() {
	sim.RegisterKernel(drivertest.NothingKernel, func(*sim.Kernel) {})
	sim.RegisterKernel(drivertest.HoldKernel, func(k *sim.Kernel) {
		for k.LoadWord(sim.Param[uint64](k, 0)) == 0 {
			k.Sleep(100 * time.Microsecond)
		}
	})
	sim.RegisterKernel(drivertest.MeetKernel, func(k *sim.Kernel) {
		if k.SharedBytes == int(sim.Param[uint32](k, 2)) {
			sim.Store(k, sim.Param[uint64](k, 0), []uint32{uint32(k.Grid[0]), uint32(k.Grid[0])})
		}
	})
	drivertest.RegisterChild(conformanceChild, func(args []string) (driver.Driver, error) {
		for _, m := range conformanceMachines {
			if m.name == args[0] {
				if m.name == inFolder {
					m.options.Folder = args[1]
				}
				machine, err := sim.New(m.options)
				if err != nil {
					return nil, err
				}
				return driver.Of(machine), nil
			}
		}
		return nil, fmt.Errorf("no machine %q", args[0])
	})
}

func TestConformance(t *testing.T) {
	skipped := map[string]int{}
	for _, m := range conformanceMachines {
		t.Run(m.name, func(t *testing.T) {
			if m.name == inFolder && !osmem.Linux {
				t.Skip("folders need Linux on amd64 or arm64")
			}
			args := []string{m.name}
			if m.name == inFolder {
				m.options.Folder = t.TempDir()
				args = append(args, m.options.Folder)
			}
			machine, err := sim.New(m.options)
			require.NoError(t, err)
			t.Cleanup(func() { require.NoError(t, machine.Close()) })
			for _, name := range drivertest.Run(t, drivertest.Env{
				Driver:    driver.Of(machine),
				Child:     conformanceChild,
				ChildArgs: args,
				Machine:   m.facts,
			}) {
				skipped[name]++
			}
		})
	}
	for name, times := range skipped {
		if !osmem.Linux {
			break // there is none
		}
		require.Less(t, times, len(conformanceMachines), "no machine has what the case %q needs: add one", name)
	}
}

// The costs of the software driver say nothing of a GPU's: this keeps the
// benchmarks themselves right.
func BenchmarkConformance(b *testing.B) {
	machine, err := sim.New(sim.Options{Devices: make([]sim.DeviceOptions, 2)})
	require.NoError(b, err)
	b.Cleanup(func() { require.NoError(b, machine.Close()) })
	drivertest.Bench(b, drivertest.Env{
		Driver:    driver.Of(machine),
		Child:     conformanceChild,
		ChildArgs: []string{"two devices, driver for CUDA 13.4"},
	})
}
