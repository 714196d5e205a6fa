package vmm_test

import (
	"testing"

	"github.com/cuvmm/cuvmm/cuda"
	"github.com/cuvmm/cuvmm/internal/core"
	"github.com/cuvmm/cuvmm/internal/driver"
	"github.com/cuvmm/cuvmm/internal/memspec"
	"github.com/cuvmm/cuvmm/internal/phys"
	"github.com/cuvmm/cuvmm/internal/test/gputest"
	"github.com/cuvmm/cuvmm/internal/vrange"
	"github.com/cuvmm/cuvmm/vmm"
	"github.com/stretchr/testify/require"
)

// Chunks move from one place of a range to another with their contents.
func TestRunsOfChunksAreMappedElsewhere(t *testing.T) {
	gputest.Each(t, func(t *testing.T, d *cuda.Device) {
		const op = "test"
		s := stream(t, d)
		prop, gran, err := memspec.Resolve(op, d, vmm.Properties{})
		require.NoError(t, err)
		require.EqualValues(t, 2*mib, gran)
		res, err := vmm.Reserve(d, 16*mib, vmm.ReserveOptions{})
		require.NoError(t, err)
		closed(t, res)
		r := vrange.Of(res)
		var chunks []*phys.Handle
		for range 2 {
			h, result, _ := phys.TryCreate(core.SystemOf(d), 2*mib, prop, nil)
			require.Equal(t, driver.Success, result)
			chunks = append(chunks, h)
		}
		access := []driver.AccessDesc{{Location: driver.Location{Type: driver.LocationDevice, ID: int32(d.Ordinal())}, Flags: driver.AccessReadWrite}}
		require.NoError(t, r.MapRun(op, 4*mib, chunks, access))
		require.ErrorIs(t, r.MapRun(op, 6*mib, chunks[:1], access), cuda.ErrInUse)
		require.ErrorIs(t, res.Close(), cuda.ErrInUse)
		require.NoError(t, s.Memset(res.Ptr()+4*mib, 7, 4*mib))
		require.NoError(t, s.Synchronize())
		require.ErrorIs(t, r.UnmapRun(op, 4*mib, mib), cuda.ErrOutOfRange)
		for _, h := range chunks {
			h.Retain()
		}
		require.NoError(t, r.UnmapRun(op, 4*mib, 4*mib))
		require.NoError(t, r.MapRun(op, 12*mib, chunks, access))
		got := make([]byte, 4)
		require.NoError(t, s.Download(got, res.Ptr()+16*mib-4))
		require.Equal(t, []byte{7, 7, 7, 7}, got)
		require.NoError(t, r.UnmapRun(op, 12*mib, 4*mib))
		require.Zero(t, d.System().Stats().Mappings)
	})
}
