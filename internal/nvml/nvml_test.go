package nvml_test

import (
	"testing"

	"github.com/cuvmm/cuvmm/internal/nvml"
	"github.com/stretchr/testify/require"
)

// Each field of the mask is read by its own bits alone.
func TestMask(t *testing.T) {
	const healthy = nvml.Mask(0x11aa) // every condition false, nothing misconfigured, a partition
	type conditions struct {
		Bandwidth, Recovery, Route, Timeout, NoPartition bool
		Misconfigured                                    string
	}
	of := func(m nvml.Mask) conditions {
		return conditions{m.DegradedBandwidth(), m.RouteRecovery(), m.RouteUnhealthy(), m.AccessTimeoutRecovery(), m.NoPartition(), m.Misconfigured()}
	}
	set := func(shift int, bits nvml.Mask) nvml.Mask {
		width := nvml.Mask(3)
		if shift == 8 {
			width = 15
		}
		return healthy&^(width<<shift) | bits<<shift
	}
	for _, c := range []struct {
		name string
		mask nvml.Mask
		want conditions
	}{
		{"healthy", healthy, conditions{}},
		{"not reported", 0, conditions{}},
		{"bandwidth", set(0, 1), conditions{Bandwidth: true}},
		{"route recovery", set(2, 1), conditions{Recovery: true}},
		{"route", set(4, 1), conditions{Route: true}},
		{"timeout", set(6, 1), conditions{Timeout: true}},
		{"no partition", set(12, 2), conditions{NoPartition: true}},
		{"no partition, the older way", set(8, 4), conditions{NoPartition: true}},
		{"system GUID", set(8, 2), conditions{Misconfigured: "the system GUID differs within the fabric"}},
		{"chassis", set(8, 3), conditions{Misconfigured: "the chassis' serial number differs within the fabric"}},
		{"links", set(8, 5), conditions{Misconfigured: "too few NVLinks are up"}},
		{"firmware", set(8, 6), conditions{Misconfigured: "the GPU's firmware does not fit the fabric's"}},
		{"place", set(8, 7), conditions{Misconfigured: "the GPU is in the wrong place"}},
		{"state", set(8, 8), conditions{Misconfigured: "the GPU's state is invalid"}},
		{"later codes", set(8, 15), conditions{Misconfigured: "code 15"}},
	} {
		t.Run(c.name, func(t *testing.T) { require.Equal(t, c.want, of(c.mask)) })
	}
}

func TestNames(t *testing.T) {
	require.Equal(t, "completed", nvml.StateCompleted.String())
	require.Equal(t, "code 9", nvml.State(9).String())
	require.Equal(t, "limited capacity", nvml.SummaryLimitedCapacity.String())
	require.Equal(t, "argument version mismatch", nvml.VersionMismatch.String())
	require.Equal(t, "error 77", nvml.Return(77).String())
	require.Equal(t, "nvmlInit_v2 returned 9 (driver not loaded)", (&nvml.Error{Call: "nvmlInit_v2", Return: nvml.DriverNotLoaded}).Error())
}
