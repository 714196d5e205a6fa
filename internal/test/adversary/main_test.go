//go:build linux

package adversary

import (
	"os"
	"strconv"
	"testing"
	"time"

	_ "github.com/cuvmm/cuvmm/internal/test/gputest" // with it, another library captures beside each test
	"github.com/cuvmm/cuvmm/internal/test/needs"
	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// testTimeout guards against what must not hang.
const testTimeout = 2 * time.Minute

// chunk is the granularity of the machines here.
const chunk = 64 << 10

// times returns how often a test repeats what it does usually so often.
func times(usually int) int {
	if n, err := strconv.Atoi(os.Getenv("CUVMM_ADVERSARY")); err == nil && n > 0 {
		return usually * n
	}
	return usually
}

// needsRoot ends a test that only root can run, as needs.Lacks does.
func needsRoot(t *testing.T) {
	t.Helper()
	if os.Geteuid() != 0 {
		needs.Lacks(t, "root")
	}
}

// within fails the test if what must not hang does.
func within(t *testing.T, what string, do func() error) error {
	t.Helper()
	done := make(chan error, 1)
	go func() { done <- do() }()
	select {
	case err := <-done:
		return err
	case <-time.After(testTimeout):
		require.FailNow(t, what+" hangs")
		return nil
	}
}
