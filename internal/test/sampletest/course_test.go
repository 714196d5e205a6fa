package sampletest

import (
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/cuvmm/cuvmm/internal/test/needs"
)

// The samples are numbered without a gap, each names the next, and samples/README.md
// lists all of them in order. Each has a row in the table, and a test that runs it.
func TestCourseIsInOrder(t *testing.T) {
	readme, err := os.ReadFile("../../../samples/README.md")
	if os.IsNotExist(err) {
		needs.Lacks(t, "the repository's sources")
	}
	require.NoError(t, err)
	folders, err := filepath.Glob("../../../samples/[0-9]*")
	require.NoError(t, err)
	require.NotEmpty(t, folders)
	var names []string
	at, before := 0, ""
	for i, folder := range folders {
		name := filepath.Base(folder)
		names = append(names, name)
		require.True(t, strings.HasPrefix(name, fmt.Sprintf("%02d-", i+1)), "%s is not number %d", name, i+1)
		row := strings.Index(string(readme)[at:], "| `"+name+"` |")
		require.NotEqual(t, -1, row, "samples/README.md does not list %s in its place", name)
		at += row
		main, err := os.ReadFile(filepath.Join(folder, "main.go"))
		require.NoError(t, err)
		if i > 0 {
			require.Contains(t, before, name, "%s does not name the sample behind it", names[i-1])
		}
		before = string(main)
		test, err := os.ReadFile(filepath.Join(folder, "main_test.go"))
		require.NoError(t, err)
		require.Contains(t, string(test), "sampletest.Main(m, main)", name)
		require.Contains(t, string(test), "sampletest.Test(t, ", name)
	}
	require.Equal(t, names, slices.Sorted(maps.Keys(table)), "internal/test/sampletest/table.go has a row for each sample")
}
