package osmem

import (
	"testing"

	"github.com/stretchr/testify/require"
)

func TestNodes(t *testing.T) {
	nodes, err := Nodes()
	require.NoError(t, err)
	require.NotEmpty(t, nodes)
	_, err = CurrentNode()
	require.NoError(t, err)
}

func TestNodesAreReadInTheKernelsForm(t *testing.T) {
	for list, want := range map[string][]int{"0": {0}, "0-2": {0, 1, 2}, "0,2-3,7": {0, 2, 3, 7}} {
		got, err := parseNodes(list)
		require.NoError(t, err)
		require.Equal(t, want, got)
	}
	for _, list := range []string{"", "x", "1-", "3-1", "-1", "0-99999999"} {
		_, err := parseNodes(list)
		require.Error(t, err, list)
	}
}
