package sim_test

import (
	"testing"

	"github.com/cuvmm/cuvmm/cuda"
	"github.com/cuvmm/cuvmm/cuda/sim"
	"github.com/cuvmm/cuvmm/internal/driver"
	"github.com/stretchr/testify/require"
)

func TestTheEnvironmentDescribesTheMachine(t *testing.T) {
	t.Setenv(sim.MachineEnv, `{"DriverVersion": 12020, "Devices": [{"Memory": 1073741824}, {"Name": "second", "Attributes": {"132": 1}}]}`)
	t.Setenv(sim.FaultsEnv, `[{"Call": "cuDeviceGetCount", "After": 1, "Result": 2}]`)
	m, err := sim.NewFromEnvironment()
	require.NoError(t, err)
	defer func() { require.NoError(t, m.Close()) }()
	d := driver.Of(m)
	require.Equal(t, driver.Success, d.Init())
	version, r := d.DriverGetVersion()
	require.Equal(t, driver.Success, r)
	require.Equal(t, int32(12020), version)
	n, r := d.DeviceGetCount()
	require.Equal(t, driver.Success, r)
	require.Equal(t, int32(2), n)
	_, r = d.DeviceGetCount()
	require.Equal(t, driver.OutOfMemory, r, "the fault")
	total, r := d.DeviceTotalMem(0)
	require.Equal(t, driver.Success, r)
	require.Equal(t, uint64(1<<30), total)
	multicast, r := d.DeviceGetAttribute(driver.AttrMulticast, 1)
	require.Equal(t, driver.Success, r)
	require.Equal(t, int32(1), multicast)
}

func TestAnEmptyEnvironmentIsTheUsualMachine(t *testing.T) {
	t.Setenv(sim.MachineEnv, "")
	t.Setenv(sim.FaultsEnv, "")
	m, err := sim.NewFromEnvironment()
	require.NoError(t, err)
	_, total := m.Memory(0)
	require.Equal(t, 16<<30, total)
	require.NoError(t, m.Close())
}

func TestAWrongEnvironmentIsNamed(t *testing.T) {
	for _, c := range []struct{ machine, faults, want string }{
		{"{", "", `CUVMM_SIM is "{"`},
		{`{"Device": []}`, "", `unknown field "Device"; write a JSON object with fields of sim.Options: Devices, Visible, Folder`},
		{`{"Devices": [{"Memori": 1}]}`, "", `unknown field "Memori"; write a JSON object with fields of sim.Options: Devices, Visible, Folder`},
		{`{"Devices": [{"Memori": 1}]}`, "", "(Devices: sim.DeviceOptions: Name, UUID, Memory, "},
		{`{"Devices": [{"Memory": 1}]}`, "", "device 0 has 1 byte of Memory; it must be from 65536 to 1099511627776 (from the environment variable CUVMM_SIM)"},
		{"", `{"Call": "cuInit"}`, "write a JSON array of objects with fields of sim.Fault: Call, After"},
		{"{} {}", "", "more after its value"},
		{"{} x", "", "more after its value"},
		{`{"DriverVersion": 5}`, "", "count as CUDA does"},
		{"", `[{"Call": "cuNothing", "Result": 2}]`, `fault 0 of the environment variable CUVMM_SIM_FAULTS: there is no driver call "cuNothing"`},
		{"", `[{"Call": "cuInit"}]`, "does nothing"},
	} {
		t.Setenv(sim.MachineEnv, c.machine)
		t.Setenv(sim.FaultsEnv, c.faults)
		_, err := sim.NewFromEnvironment()
		require.ErrorContains(t, err, c.want)
		require.ErrorIs(t, err, cuda.ErrInvalidArgument)
	}
}
