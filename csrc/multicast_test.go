//go:build linux && cgo && (amd64 || arm64) && !cuvmm_nocgo

package csrc_test

import (
	"testing"

	"github.com/cuvmm/cuvmm/csrc"
	"github.com/cuvmm/cuvmm/internal/driver"
	"github.com/stretchr/testify/require"
)

const multicastHandle driver.MemHandle = 0x4000000000000005

var team = driver.MulticastProp{NumDevices: 0xa1b2c3d4, Size: 1 << 41, HandleTypes: uint64(driver.HandleFabric), Flags: 1 << 33}

func init() {
	prop := le(uint32(0xa1b2c3d4), uint64(1<<41), uint64(8), uint64(1<<33))
	for call, r := range map[driver.Call]row{
		driver.CallMulticastCreate: {
			do: func(d driver.Driver, _ driver.Context) []any {
				v, r := d.MulticastCreate(team)
				return []any{v, r}
			},
			args: prop, values: []any{multicastHandle},
		},
		driver.CallMulticastAddDevice: {
			do:   func(d driver.Driver, _ driver.Context) []any { return []any{d.MulticastAddDevice(multicastHandle, 6)} },
			args: le(multicastHandle, int32(6)),
		},
		driver.CallMulticastBindMem: {
			do: func(d driver.Driver, _ driver.Context) []any {
				return []any{d.MulticastBindMem(multicastHandle, 6, 1<<40, handle, 1<<39, 1<<38)}
			},
			args: le(multicastHandle, int32(6), uint64(1<<40), handle, uint64(1<<39), uint64(1<<38), uint64(0)),
		},
		driver.CallMulticastBindMemV1: {
			do: func(d driver.Driver, _ driver.Context) []any {
				return []any{d.MulticastBindMemV1(multicastHandle, 1<<40, handle, 1<<39, 1<<38)}
			},
			args: le(multicastHandle, uint64(1<<40), handle, uint64(1<<39), uint64(1<<38), uint64(0)),
		},
		driver.CallMulticastBindAddr: {
			do: func(d driver.Driver, _ driver.Context) []any {
				return []any{d.MulticastBindAddr(multicastHandle, 6, 1<<40, ptr, 1<<38)}
			},
			args: le(multicastHandle, int32(6), uint64(1<<40), ptr, uint64(1<<38), uint64(0)),
		},
		driver.CallMulticastBindAddrV1: {
			do: func(d driver.Driver, _ driver.Context) []any {
				return []any{d.MulticastBindAddrV1(multicastHandle, 1<<40, ptr, 1<<38)}
			},
			args: le(multicastHandle, uint64(1<<40), ptr, uint64(1<<38), uint64(0)),
		},
		driver.CallMulticastUnbind: {
			do: func(d driver.Driver, _ driver.Context) []any {
				return []any{d.MulticastUnbind(multicastHandle, 6, 1<<40, 1<<38)}
			},
			args: le(multicastHandle, int32(6), uint64(1<<40), uint64(1<<38)),
		},
		driver.CallMulticastGetGranularity: {
			do: func(d driver.Driver, _ driver.Context) []any {
				v, r := d.MulticastGetGranularity(team, driver.GranularityRecommended)
				return []any{v, r}
			},
			args: append(prop, le(uint32(1))...), values: []any{uint64(1 << 25)},
		},
	} {
		rows[call] = r
	}
}

// Creating multicast objects is opt-in, when the driver is opened.
func TestMulticastObjectsAreAskedFor(t *testing.T) {
	f := buildFake(t)
	d, err := open(csrc.Options{Path: f.path})
	require.NoError(t, err)
	f.calls(t)
	for _, d := range []driver.Driver{d, d.Foreign()} {
		_, r := d.MulticastCreate(team)
		require.Equal(t, driver.Withheld, r)
	}
	require.Empty(t, f.calls(t), "the driver was not asked")
	n, r := d.MulticastGetGranularity(team, driver.GranularityMinimum)
	require.Equal(t, driver.Success, r, "which creates nothing")
	require.EqualValues(t, 1<<25, n)
	again, err := open(csrc.Options{Path: f.path, Multicast: true})
	require.NoError(t, err)
	require.Same(t, d, again)
	h, r := d.MulticastCreate(team)
	require.Equal(t, driver.Success, r)
	require.Equal(t, multicastHandle, h)
}

func TestFormsOfMulticastBind(t *testing.T) {
	for variant, second := range map[string]bool{"FAKECUDA_VERSION=13000": false, "FAKECUDA_VERSION=13010": true} {
		d := buildFake(t, variant).open(t)
		require.True(t, d.Has(driver.CallMulticastBindMemV1) && d.Has(driver.CallMulticastBindAddrV1), variant)
		require.Equal(t, second, d.Has(driver.CallMulticastBindMem), variant)
		require.Equal(t, second, d.Has(driver.CallMulticastBindAddr), variant)
	}
}

func TestMulticastCallsDoNotAllocate(t *testing.T) {
	f := buildFake(t)
	d := driver.Driver(f.open(t))
	f.quiet(true)
	defer f.quiet(false)
	for name, call := range map[string]func(){
		"MulticastCreate":         func() { d.MulticastCreate(team) },
		"MulticastAddDevice":      func() { d.MulticastAddDevice(multicastHandle, 0) },
		"MulticastBindMem":        func() { d.MulticastBindMem(multicastHandle, 0, 0, handle, 0, 1) },
		"MulticastBindAddrV1":     func() { d.MulticastBindAddrV1(multicastHandle, 0, ptr, 1) },
		"MulticastUnbind":         func() { d.MulticastUnbind(multicastHandle, 0, 0, 1) },
		"MulticastGetGranularity": func() { d.MulticastGetGranularity(team, driver.GranularityMinimum) },
	} {
		require.Zero(t, testing.AllocsPerRun(20, call), name)
	}
}
