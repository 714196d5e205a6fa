package core_test

import (
	"bytes"
	"log/slog"
	"runtime"
	"testing"

	"github.com/cuvmm/cuvmm/internal/core"
	"github.com/stretchr/testify/require"
)

// Whatever a function of a user does, the library's goroutine goes on, and the log says
// what happened.
func TestAFunctionOfTheUserEndsNoGoroutineOfTheLibrary(t *testing.T) {
	for _, c := range []struct {
		f    func()
		said string
	}{
		{func() {}, ""},
		{func() { panic("a mistake") }, "panicked"},
		{runtime.Goexit, "ended its goroutine"},
	} {
		var said bytes.Buffer
		went := false
		func() {
			defer func() { require.True(t, went) }()
			core.Hook(slog.New(slog.NewTextHandler(&said, nil)), "test", c.f)
			went = true
		}()
		require.Contains(t, said.String(), c.said)
		require.Equal(t, c.said == "", said.Len() == 0)
	}
}
