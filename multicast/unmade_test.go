package multicast_test

import (
	"testing"

	"github.com/cuvmm/cuvmm/cuda"
	"github.com/cuvmm/cuvmm/internal/test/gputest"
	"github.com/cuvmm/cuvmm/multicast"
	"github.com/cuvmm/cuvmm/vmm"
	"github.com/stretchr/testify/require"
)

func TestNilAndZeroObjectsAreRefused(t *testing.T) {
	gputest.Unmade(t,
		(*multicast.Object)(nil), &multicast.Object{}, (*multicast.Binding)(nil), &multicast.Binding{},
		(*multicast.Team)(nil), &multicast.Team{},
	)
	_, devices := open(t, 2)
	o := complete(t, devices, unit)
	for _, none := range []*cuda.Device{nil, {}} {
		require.ErrorIs(t, multicast.Supported(devices[0], none), cuda.ErrInvalidArgument)
		require.ErrorIs(t, o.AddDevice(none), cuda.ErrInvalidArgument)
		require.ErrorIs(t, gputest.Err(o.Bind(none, 0, allocation(t, devices[0], unit), 0, unit)), cuda.ErrInvalidArgument)
	}
	for _, none := range []*cuda.System{nil, {}} {
		require.ErrorIs(t, gputest.Err(multicast.Create(none, unit, multicast.Properties{})), cuda.ErrInvalidArgument)
		require.ErrorIs(t, gputest.Err(multicast.ImportFabric(none, cuda.FabricHandle{}, unit, 2)), cuda.ErrInvalidArgument)
		require.ErrorIs(t, gputest.Err(multicast.Granularity(none, multicast.Properties{})), cuda.ErrInvalidArgument)
	}
	for _, none := range []vmm.Physical{nil, (*vmm.Allocation)(nil), &vmm.Allocation{}} {
		require.ErrorIs(t, gputest.Err(o.Bind(devices[0], 0, none, 0, unit)), cuda.ErrInvalidArgument)
	}
	for _, none := range []*vmm.Mapping{nil, {}} {
		require.ErrorIs(t, gputest.Err(o.BindMapping(devices[0], 0, none, 0, unit)), cuda.ErrInvalidArgument)
	}
}
