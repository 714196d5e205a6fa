package repotest

import (
	"regexp"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

var fence = regexp.MustCompile("(?ms)^```go\n(.*?)^```$")

// Every Go example of the pages that users begin with stands, to the letter, in an example
// that is compiled and run.
func TestExamplesOfPagesAreTested(t *testing.T) {
	tr := repository(t)
	var tested strings.Builder
	for _, name := range tr.files {
		if strings.HasSuffix(name, "example_test.go") {
			tested.WriteString(unindent(tr.read(name)))
		}
	}
	for _, page := range []string{"README.md", "docs/basics.md", "docs/cookbook.md"} {
		blocks := fence.FindAllStringSubmatch(tr.read(page), -1)
		require.NotEmpty(t, blocks, page)
		for _, b := range blocks {
			require.Contains(t, tested.String(), unindent(b[1]), "%s: put the example into an example_test.go", page)
		}
	}
}

// unindent takes the indentation from every line.
func unindent(text string) string {
	lines := strings.Split(text, "\n")
	for i := range lines {
		lines[i] = strings.TrimLeft(lines[i], "\t")
	}
	return strings.Join(lines, "\n")
}
