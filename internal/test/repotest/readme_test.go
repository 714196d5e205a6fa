package repotest

import (
	"io/fs"
	"regexp"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

var fence = regexp.MustCompile("(?ms)^```go\n(.*?)^```$")

// Every Go example of the README stands, to the letter, in an example that is
// compiled and run.
func TestReadmeExamplesAreTested(t *testing.T) {
	tr := repository(t)
	readme, err := fs.ReadFile(tr.fs, "README.md")
	require.NoError(t, err)
	var tested strings.Builder
	err = fs.WalkDir(tr.fs, ".", func(path string, _ fs.DirEntry, err error) error {
		if err != nil || !strings.HasSuffix(path, "example_test.go") {
			return err
		}
		text, err := fs.ReadFile(tr.fs, path)
		tested.WriteString(unindent(string(text)))
		return err
	})
	require.NoError(t, err)
	blocks := fence.FindAllStringSubmatch(string(readme), -1)
	require.NotEmpty(t, blocks)
	for _, b := range blocks {
		require.Contains(t, tested.String(), unindent(b[1]), "put the README's example into an example_test.go")
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
