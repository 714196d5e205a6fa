// Package needs skips tests that need what the machine lacks, and fails them where it
// should be there.
package needs

import (
	"fmt"
	"os"
	"os/exec"
	"testing"
)

// RequireEnv names the environment variable that turns a skip into a failure. CI sets it.
const RequireEnv = "CUVMM_REQUIRE_TOOLS"

// Program returns the path of a program that the test runs. Without it the test ends as
// with Lacks.
func Program(tb testing.TB, name string) string {
	tb.Helper()
	path, err := exec.LookPath(name)
	if err != nil {
		Lacks(tb, "%s in PATH", name)
	}
	return path
}

// File ends a test without a file of the tree, which a bundle has not.
func File(tb testing.TB, path string) {
	tb.Helper()
	if _, err := os.Stat(path); err != nil {
		Lacks(tb, "%s", path)
	}
}

// Lacks skips the test, because the machine has none of what is named, or fails it if
// RequireEnv is set.
func Lacks(tb testing.TB, format string, args ...any) {
	tb.Helper()
	what := fmt.Sprintf(format, args...)
	if os.Getenv(RequireEnv) != "" {
		tb.Fatalf("%s is set, and this machine lacks %s", RequireEnv, what)
	}
	tb.Skipf("needs %s; set %s=1 to fail instead", what, RequireEnv)
}
