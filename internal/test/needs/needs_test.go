package needs_test

import (
	"fmt"
	"runtime"
	"testing"

	"github.com/cuvmm/cuvmm/internal/test/needs"
	"github.com/stretchr/testify/require"
)

// outcome records how a test ends.
type outcome struct {
	testing.TB
	said string
}

func (o *outcome) Helper() {}

func (o *outcome) Fatalf(format string, args ...any) { o.end("failed: "+format, args...) }

func (o *outcome) Skipf(format string, args ...any) { o.end("skipped: "+format, args...) }

func (o *outcome) end(format string, args ...any) {
	o.said = fmt.Sprintf(format, args...)
	runtime.Goexit()
}

func ends(test func(tb testing.TB)) string {
	var o outcome
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		test(&o)
	}()
	<-ended
	return o.said
}

func TestWhatIsMissingSkipsOrFails(t *testing.T) {
	missing := func(tb testing.TB) { needs.Program(tb, "no-such-program") }
	t.Setenv(needs.RequireEnv, "")
	require.Equal(t, "skipped: needs no-such-program in PATH; set CUVMM_REQUIRE_TOOLS=1 to fail instead", ends(missing))
	require.Empty(t, ends(func(tb testing.TB) { require.NotEmpty(tb, needs.Program(tb, "go")) }))
	require.Equal(t, "skipped: needs no-such-file; set CUVMM_REQUIRE_TOOLS=1 to fail instead", ends(func(tb testing.TB) { needs.File(tb, "no-such-file") }))
	require.Empty(t, ends(func(tb testing.TB) { needs.File(tb, "needs.go") }))
	t.Setenv(needs.RequireEnv, "1")
	require.Equal(t, "failed: CUVMM_REQUIRE_TOOLS is set, and this machine lacks no-such-program in PATH", ends(missing))
}
