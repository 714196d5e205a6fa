package installtest

import (
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/cuvmm/cuvmm/internal/test/needs"
)

const root = "../../.."

// needsSources skips the test in a binary that was carried away from its checkout.
func needsSources(t *testing.T) {
	t.Helper()
	needs.Program(t, "go")
	if _, err := os.Stat(filepath.Join(root, "go.work")); err != nil {
		needs.Lacks(t, "the repository's sources")
	}
}

// needsCgo skips the test in a run without cgo: no C library is built there, and what needs
// none takes minutes to compile a second time.
func needsCgo(t *testing.T) {
	t.Helper()
	needsSources(t)
	if strings.TrimSpace(execute(t, exec.Command("go", "env", "CGO_ENABLED"))) != "1" {
		t.Skip("cgo is off")
	}
}

// execute returns what a program prints, and ends the test if it fails.
func execute(t *testing.T, cmd *exec.Cmd) string {
	t.Helper()
	var problems strings.Builder
	cmd.Stderr = &problems
	out, err := cmd.Output()
	require.NoError(t, err, "%s\n%s%s", strings.Join(cmd.Args, " "), out, &problems)
	return string(out)
}
