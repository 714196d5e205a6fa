package app

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/cuvmm/cuvmm/internal/test/needs"
	"github.com/stretchr/testify/require"
)

// The samples are numbered without a gap, each names the next, and the README lists
// all of them in order.
func TestCourseIsInOrder(t *testing.T) {
	readme, err := os.ReadFile("../../../README.md")
	if os.IsNotExist(err) {
		needs.Lacks(t, "the repository's sources")
	}
	require.NoError(t, err)
	folders, err := filepath.Glob("../../[0-9]*")
	require.NoError(t, err)
	require.NotEmpty(t, folders)
	at := 0
	for i, folder := range folders {
		name := filepath.Base(folder)
		require.True(t, strings.HasPrefix(name, fmt.Sprintf("%02d-", i+1)), "%s is not number %d", name, i+1)
		row := strings.Index(string(readme)[at:], "| `"+name+"` |")
		require.NotEqual(t, -1, row, "README.md does not list %s in its place", name)
		at += row
		if i == 0 {
			continue
		}
		before, err := os.ReadFile(filepath.Join(folders[i-1], "main.go"))
		require.NoError(t, err)
		require.Contains(t, string(before), name, "%s does not name the sample behind it", filepath.Base(folders[i-1]))
	}
}
