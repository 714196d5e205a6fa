package driver_test

import (
	"testing"
	"unsafe"

	"github.com/cuvmm/cuvmm/internal/driver"
	"github.com/stretchr/testify/require"
)

// The values were read from the vendor's header on x86-64.
func TestLayoutIsTheDrivers(t *testing.T) {
	var (
		l driver.Location
		p driver.AllocationProp
		f driver.AllocationFlags
		a driver.AccessDesc
		h driver.ShareableHandle
		m driver.MemHandle
		c driver.MulticastProp
		k driver.LockArgs
	)
	for _, row := range []struct {
		what string
		got  uintptr
		want uintptr
	}{
		{"location size", unsafe.Sizeof(l), 8},
		{"location type", unsafe.Offsetof(l.Type), 0},
		{"location id", unsafe.Offsetof(l.ID), 4},
		{"properties size", unsafe.Sizeof(p), 32},
		{"properties type", unsafe.Offsetof(p.Type), 0},
		{"properties handle types", unsafe.Offsetof(p.RequestedHandleTypes), 4},
		{"properties location", unsafe.Offsetof(p.Location), 8},
		{"properties win32", unsafe.Offsetof(p.Win32HandleMetaData), 16},
		{"properties flags", unsafe.Offsetof(p.Flags), 24},
		{"flags size", unsafe.Sizeof(f), 8},
		{"flags compression", unsafe.Offsetof(f.CompressionType), 0},
		{"flags rdma", unsafe.Offsetof(f.GPUDirectRDMACapable), 1},
		{"flags usage", unsafe.Offsetof(f.Usage), 2},
		{"access size", unsafe.Sizeof(a), 12},
		{"access location", unsafe.Offsetof(a.Location), 0},
		{"access flags", unsafe.Offsetof(a.Flags), 8},
		{"multicast properties size", unsafe.Sizeof(c), 32},
		{"multicast properties devices", unsafe.Offsetof(c.NumDevices), 0},
		{"multicast properties bytes", unsafe.Offsetof(c.Size), 8},
		{"multicast properties handle types", unsafe.Offsetof(c.HandleTypes), 16},
		{"multicast properties flags", unsafe.Offsetof(c.Flags), 24},
		{"lock arguments size", unsafe.Sizeof(k), 64},
		{"lock arguments timeout", unsafe.Offsetof(k.TimeoutMS), 0},
		{"shareable handle size", unsafe.Sizeof(h), 64},
		{"memory handle size", unsafe.Sizeof(m), 8},
	} {
		require.Equal(t, row.want, row.got, row.what)
	}
}

func TestEveryCallHasANameAndAVersion(t *testing.T) {
	seen := map[string]bool{}
	for c := driver.Call(0); int(c) < driver.CallCount; c++ {
		require.Regexp(t, `^cu[A-Z]`, c.String())
		require.False(t, seen[c.String()], "%v stands twice", c)
		seen[c.String()] = true
		require.GreaterOrEqual(t, c.Version(), int32(2000))
		found, ok := driver.CallByName(c.String())
		require.True(t, ok)
		require.Equal(t, c, found)
	}
}
