package errs_test

import (
	"testing"

	"github.com/cuvmm/cuvmm/internal/errs"
	"github.com/stretchr/testify/require"
)

func TestPlain(t *testing.T) {
	for text, want := range map[string]string{
		"":                        "",
		"größe 2\n\tMiB \"a\" \\": "größe 2\n\tMiB \"a\" \\",
		"x\x1b]0;owned\a\x1b[2J":  `x\x1b]0;owned\a\x1b[2J`,
		"\r\x7f\x00":              `\r\x7f\x00`,
		"\u009b31m":               `\u009b31m`,
		"\x9b31m":                 `\x9b31m`,
		"a\u202eb\u2066":          `a\u202eb\u2066`,
	} {
		require.Equal(t, want, errs.Plain(text))
		require.Equal(t, errs.Plain(text), errs.Plain(errs.Plain(text)))
	}
}
