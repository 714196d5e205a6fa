package rendezvous

import (
	"testing"

	"github.com/cuvmm/cuvmm/cuda/sim"
	"github.com/cuvmm/cuvmm/vmm"
	"github.com/stretchr/testify/require"
)

func TestFactsTellTheClique(t *testing.T) {
	cluster := [16]byte{1, 2, 3}
	for name, c := range map[string]struct {
		fabric sim.Fabric
		types  vmm.HandleTypes
		want   string
	}{
		"of a cluster":             {sim.Fabric{Channels: []int{0}, Cluster: cluster, Clique: 7}, vmm.Fabric, "01020300-0000-0000-0000-000000000000.7"},
		"of links within one host": {sim.Fabric{Channels: []int{0}, Clique: 7}, vmm.Fabric, ""},
		"no request asks for it":   {sim.Fabric{Channels: []int{0}, Cluster: cluster, Clique: 7}, vmm.PosixFD, ""},
	} {
		t.Run(name, func(t *testing.T) {
			_, s := sim.Open(t, sim.Options{Folder: t.TempDir(), Fabric: c.fabric})
			f := FactsOf(s.Devices()[0], c.types)
			require.Equal(t, c.want, f.Clique)
			require.NotEmpty(t, f.Host)
			require.Equal(t, s.Devices()[0].UUID(), f.Device)
		})
	}
}
