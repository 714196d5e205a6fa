package serve

import (
	"testing"

	"github.com/cuvmm/cuvmm/inspect"
	"github.com/stretchr/testify/require"
)

// What processes share, and what no checkpoint holds, is named with a remedy each.
func TestBlockers(t *testing.T) {
	shares := inspect.Snapshot{
		Publications: []inspect.Publication{{Name: "weights"}},
		Followers:    []inspect.Follower{{Name: "cache"}},
		Leases:       []inspect.Lease{{}, {}},
		Memory:       []inspect.Memory{{Bytes: 2 << 20, Imported: true}, {Bytes: 4 << 20, Exported: true}, {Bytes: 8 << 20}},
		Others:       []inspect.Other{{Kind: "multicast object"}, {Kind: "stream"}},
		Managed:      []inspect.Managed{{}},
	}
	what := func(all []Blocker) (texts []string) {
		for _, b := range all {
			require.NotEmpty(t, b.Remedy, b.What)
			texts = append(texts, b.What)
		}
		return texts
	}
	usual := []string{`publication "weights"`, `follower of "cache"`, "2 leases", "2 MiB of imported memory, with which the process would be lost"}
	rest := []string{"managed memory (1)", "multicast object (1)"}
	exported := "4 MiB of memory that was exported, which would stay on the GPU and be there twice afterwards"
	require.Equal(t, append(append(usual[:4:4], exported), rest...), what(blockers(shares, false)))
	require.Equal(t, append(usual[:4:4], rest...), what(blockers(shares, true)))
	require.Empty(t, blockers(inspect.Snapshot{Memory: shares.Memory[2:], Others: shares.Others[1:]}, false))
}
