package core_test

import (
	"testing"

	"github.com/cuvmm/cuvmm/internal/core"
	"github.com/cuvmm/cuvmm/internal/driver"
	"github.com/cuvmm/cuvmm/internal/life"
	"github.com/stretchr/testify/require"
)

// occupant is memory of a device.
type occupant struct {
	core.Object
	on    driver.Device
	bytes uint64
}

func (o *occupant) BytesOn(d driver.Device) uint64 {
	if d != o.on {
		return 0
	}
	return o.bytes
}

// Others are named where their memory is what lacks, and nowhere else. Of 80 GiB, 1 GiB may
// be contexts; of 8 MiB, half of one.
func TestOthersAreNamedWhereTheirMemoryLacks(t *testing.T) {
	const mib, gib = 1 << 20, 1 << 30
	for _, c := range []struct {
		name                    string
		own, elsewhere, managed uint64
		lack                    core.Lack
		says                    string
	}{
		{"others have enough", 8 * gib, 0, 0, core.Lack{20 * gib, 10 * gib, 80 * gib}, "hold at least 62 GiB of the device's 80 GiB: cuvmm top lists the processes"},
		{"just enough", 59 * gib, 0, 0, core.Lack{20 * gib, 10 * gib, 80 * gib}, "hold at least 11 GiB of the device's 80 GiB"},
		{"just not enough", 59*gib + 1, 0, 0, core.Lack{20 * gib, 10 * gib, 80 * gib}, ""},
		{"contexts may be all that others have", 69*gib + 1, 0, 0, core.Lack{10*gib + 1, 10 * gib, 80 * gib}, ""},
		{"there is enough, and the driver refused", 8 * gib, 0, 0, core.Lack{10 * gib, 10 * gib, 80 * gib}, ""},
		{"there is never enough", 0, 0, 0, core.Lack{80*gib + 1, 0, 80 * gib}, ""},
		{"memory on another device", 0, 60 * gib, 0, core.Lack{20 * gib, 10 * gib, 80 * gib}, "hold at least 70 GiB"},
		{"managed memory may lie there", 8 * gib, 0, 51 * gib, core.Lack{20 * gib, 10 * gib, 80 * gib}, "hold at least 11 GiB"},
		{"or be what lacks", 8 * gib, 0, 51*gib + 1, core.Lack{20 * gib, 10 * gib, 80 * gib}, ""},
		{"more of the System's than is used", 71 * gib, 0, 0, core.Lack{20 * gib, 10 * gib, 80 * gib}, ""},
		{"a small device", 5*mib + mib/2, 0, 0, core.Lack{2 * mib, 0, 8 * mib}, "hold at least 2.5 MiB of the device's 8 MiB"},
		{"a small device with less", 5*mib + mib/2 + 1, 0, 0, core.Lack{2 * mib, 0, 8 * mib}, ""},
		{"a device that was not asked", 0, 0, 0, core.Lack{}, ""},
	} {
		t.Run(c.name, func(t *testing.T) {
			s := bare()
			own, elsewhere, managed := &occupant{on: 1, bytes: c.own}, &occupant{on: 0, bytes: c.elsewhere}, &occupant{on: core.NoDevice}
			s.Track(own, life.KindAllocation, c.own)
			s.Track(elsewhere, life.KindAllocation, c.elsewhere)
			s.Track(managed, life.KindManaged, c.managed)
			if says := s.Missing(1, c.lack); c.says == "" {
				require.Empty(t, says)
			} else {
				require.Contains(t, says, c.says)
			}
		})
	}
}
