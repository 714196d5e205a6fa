package inspect_test

import (
	"testing"

	"github.com/cuvmm/cuvmm/inspect"
	"github.com/stretchr/testify/require"
)

func TestFrame(t *testing.T) {
	for text, want := range map[string][3]any{
		"a.B[...] (/c d/e.go:7)": {"a.B[...]", "/c d/e.go", 7},
		"a.b":                    {"a.b", "", 0},
		"a.b (c.go:x)":           {"a.b", "c.go:x", 0},
	} {
		f, file, line := inspect.Frame(text)
		require.Equal(t, want, [3]any{f, file, line})
	}
}
