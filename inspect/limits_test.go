package inspect_test

import (
	"fmt"
	"io"
	"runtime"
	"strings"
	"testing"

	"github.com/cuvmm/cuvmm/inspect"
	"github.com/stretchr/testify/require"
)

// endless is a text that repeats a part, and counts what is read of it.
type endless struct {
	head, part string
	read       int
}

func (e *endless) Read(p []byte) (int, error) {
	for i := range p {
		if at := e.read + i; at < len(e.head) {
			p[i] = e.head[at]
		} else {
			p[i] = e.part[(at-len(e.head))%len(e.part)]
		}
	}
	e.read += len(p)
	return len(p), nil
}

// A snapshot of another process takes a bounded amount of this one's memory, however long
// it is, and however small its elements are.
func TestSnapshotsAreBounded(t *testing.T) {
	header := fmt.Sprintf(`{"format":%q,"version":%d,`, inspect.Format, inspect.Version)
	for name, c := range map[string]struct {
		head, part, says string
		summary          bool
		most             int // bytes that are read
	}{
		"a text without end":          {`"driver":"`, "a", "more than 16777216 bytes", true, 32 << 20},
		"empty pools":                 {`"pools":[{}`, ",{}", "more than 16384 elements of other lists", true, 1 << 20},
		"pools in a snapshot":         {`"pools":[{}`, ",{}", "more than 65536 elements of other lists", false, 1 << 20},
		"numbers in a list":           {`"leases":[{"importers":[1`, ",1", "elements of other lists", false, 1 << 20},
		"lists in a list":             {`"stacks":[[]`, ",[]", "more than 4194304 elements of stacks", false, 16 << 20},
		"blocks":                      {`"pools":[{"segments":[{"blocks":[{}`, ",{}", "more than 4194304 elements of blocks", false, 16 << 20},
		"a name in other letters":     {`"POOLS":[{}`, ",{}", "elements of other lists", false, 1 << 20},
		"an escaped name":             {`"bloc\u006bs":[{}`, ",{}", "elements of other lists", false, 1 << 20},
		"the same list again":         {`"pools":[],`, `"pools":[{},{}],`, "elements of other lists", false, 2 << 20},
		"text that looks like a list": {`"driver":"\",[{},`, "{},", "more than 16777216 bytes", true, 32 << 20},
		"lists within lists":          {`"others":`, "[", "exceeded max depth", false, 1 << 20},
	} {
		t.Run(name, func(t *testing.T) {
			text := &endless{head: header + c.head, part: c.part}
			read := inspect.Read
			if c.summary {
				read = inspect.ReadSummary
			}
			var before, after runtime.MemStats
			runtime.ReadMemStats(&before)
			_, err := read(text)
			runtime.ReadMemStats(&after)
			require.ErrorContains(t, err, c.says)
			require.LessOrEqual(t, text.read, c.most)
			require.Less(t, after.TotalAlloc-before.TotalAlloc, uint64(128<<20))
		})
	}
}

// A file that was cut in its middle is said to be that.
func TestBoundsAndFilesThatAreCut(t *testing.T) {
	var text strings.Builder
	require.NoError(t, inspect.Snapshot{Format: inspect.Format, Version: inspect.Version}.Write(&text))
	_, err := inspect.Read(io.LimitReader(strings.NewReader(text.String()), 60))
	require.ErrorIs(t, err, io.ErrUnexpectedEOF)
	require.ErrorContains(t, err, "cut short")
}
