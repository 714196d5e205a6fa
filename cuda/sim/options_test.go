package sim

import (
	"math"
	"testing"

	"github.com/cuvmm/cuvmm/internal/driver"
	"github.com/stretchr/testify/require"
)

func TestOptionsAreChecked(t *testing.T) {
	for what, o := range map[string]Options{
		"must be a power of two": WithGranularity(3 << 20),
		"from 65536 to":          WithGranularity(4096),
		"1125899906842624 bytes of Memory; it must be from 65536 to 1099511627776": {Devices: []DeviceOptions{{Memory: 1 << 50}}},
		"device 1 has 1 byte of Memory":                                            {Devices: []DeviceOptions{{}, {Memory: 1}}},
		"4194304 bytes of ContextMemory":                                           {Devices: []DeviceOptions{{Memory: 4 << 20, ContextMemory: 4 << 20}}},
		"-1 bytes of ContextMemory":                                                {Devices: []DeviceOptions{{ContextMemory: -1}}},
		"Options.HostMemory is 1125899906842624":                                   {HostMemory: 1 << 50},
		"Options.HostMemory is 1 byte":                                             {HostMemory: 1},
		"13.0 is 13000":                                                            OlderDriver(13),
		"Options.DriverVersion is 130000":                                          OlderDriver(130_000),
		"the same UUID":                                                            {Devices: []DeviceOptions{{UUID: [16]byte{1}}, {UUID: [16]byte{1}}}},
		"as Unreachable":                                                           {Devices: []DeviceOptions{{Unreachable: []int{0}}}},
		"MulticastRecommended is 3145728":                                          {MulticastRecommended: 3 << 20},
		"MulticastRecommended is -9223372036854775808":                             {MulticastRecommended: math.MinInt64},
	} {
		_, err := New(o)
		require.ErrorContains(t, err, what)
	}
}

func TestDevices(t *testing.T) {
	r := start(t, Options{DriverVersion: 12040, Devices: []DeviceOptions{
		{Name: "First", Memory: 1 << 30, UUID: [16]byte{7}, Attributes: map[int]int{int(driver.AttrMulticast): 1}},
		{Unreachable: []int{0}},
	}})
	require.Equal(t, driver.Description{Software: true, Machine: r.m.name}, r.Describe())
	v, res := r.DriverGetVersion()
	r.ok(res)
	require.EqualValues(t, 12040, v)
	n, res := r.DeviceGetCount()
	r.ok(res)
	require.EqualValues(t, 2, n)
	d, res := r.DeviceGet(1)
	r.ok(res)
	require.EqualValues(t, 1, d)
	_, res = r.DeviceGet(2)
	r.is(driver.InvalidDevice, res)
	_, res = r.DeviceGet(-1)
	r.is(driver.InvalidDevice, res)
	name, res := r.DeviceGetName(0)
	r.ok(res)
	require.Equal(t, "First", name)
	uuid, res := r.DeviceGetUUID(0)
	r.ok(res)
	require.Equal(t, driver.UUID{7}, uuid)
	total, res := r.DeviceTotalMem(0)
	r.ok(res)
	require.EqualValues(t, 1<<30, total)
	a, res := r.DeviceGetAttribute(driver.AttrMulticast, 0)
	r.ok(res)
	require.EqualValues(t, 1, a)
	_, res = r.DeviceGetAttribute(9999, 0)
	r.is(driver.InvalidValue, res)
	for _, row := range []struct {
		from, to driver.Device
		want     bool
		res      driver.Result
	}{{0, 1, true, 0}, {1, 0, false, 0}, {0, 0, false, 0}, {0, 5, false, driver.InvalidDevice}} {
		can, res := r.DeviceCanAccessPeer(row.from, row.to)
		r.is(row.res, res)
		require.Equal(t, row.want, can)
	}
}

func TestMachinesWithTheSameOptionsHaveTheSameDevices(t *testing.T) {
	a, b := start(t, Options{}), start(t, Options{})
	ua, _ := a.DeviceGetUUID(0)
	ub, _ := b.DeviceGetUUID(0)
	require.Equal(t, ua, ub)
	require.NotEqual(t, a.Describe(), b.Describe())
}

func TestDeviceWithoutVirtualMemory(t *testing.T) {
	r := start(t, Options{Devices: []DeviceOptions{{Attributes: map[int]int{int(driver.AttrVirtualMemoryManagement): 0}}}})
	_, res := r.MemCreate(chunk, on(0, 0))
	r.is(driver.NotSupported, res)
}

func TestMachineWithoutDescriptors(t *testing.T) {
	r := start(t, WithoutDescriptors())
	_, res := r.MemCreate(chunk, on(0, driver.HandlePosixFD))
	r.is(driver.NotSupported, res)
	r.ok(r.MemRelease(r.create(chunk, on(0, 0))))
}

func TestOnlyVisibleDevicesAreSeenInTheirOrder(t *testing.T) {
	all := []DeviceOptions{{Name: "a"}, {Name: "b", Unreachable: []int{2}}, {Name: "c", Unreachable: []int{0, 1}}}
	r := start(t, Options{Devices: all, Visible: []int{2, 1}})
	n, res := r.DeviceGetCount()
	r.ok(res)
	require.EqualValues(t, 2, n)
	for i, want := range []string{"c", "b"} {
		name, res := r.DeviceGetName(driver.Device(i))
		r.ok(res)
		require.Equal(t, want, name)
	}
	reaches, res := r.DeviceCanAccessPeer(0, 1)
	r.ok(res)
	require.False(t, reaches, "Unreachable lists ordinals of all devices, visible or not")
	hidden, seen := newMachineUUID(t, Options{Devices: all}, 2), newMachineUUID(t, Options{Devices: all, Visible: []int{2}}, 0)
	require.Equal(t, hidden, seen, "a device keeps its identity")
	for _, bad := range [][]int{{3}, {-1}, {0, 0}} {
		_, err := New(Options{Devices: all, Visible: bad})
		require.ErrorContains(t, err, "at most once")
	}
}

func newMachineUUID(t *testing.T, o Options, ordinal int) driver.UUID {
	t.Helper()
	r := start(t, o)
	uuid, res := r.DeviceGetUUID(driver.Device(ordinal))
	r.ok(res)
	return uuid
}
