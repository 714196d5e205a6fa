package drivertest

import (
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

// The document and the suite are one list: every row of its tables of rules is
// a case, in the same words and the same order, and every case is a row.
func TestDocumentListsTheCases(t *testing.T) {
	tables := documentTables(t)
	want := map[string][][]string{}
	for _, c := range Cases() {
		if c.Section != "3" {
			want[c.Section+" case"] = append(want[c.Section+" case"], []string{c.Name, c.Says})
		}
	}
	for _, c := range slices.Concat(running, captureEnds, edges, launching, hostFuncs, loading) {
		want["3 case"] = append(want["3 case"], []string{c.Name, c.Says})
	}
	for _, part := range []struct {
		table, prefix string
		calls         []matrixCall
	}{{"3 call", "capture", matrix}, {"3 call of a blocking capture", "capture of a blocking stream", blockingMatrix}} {
		for _, call := range part.calls {
			row := []string{call.name}
			for _, column := range matrixColumns {
				row = append(row, says(t, part.prefix+": "+call.name+", "+column.name))
			}
			want[part.table] = append(want[part.table], row)
		}
	}
	for _, w := range ways {
		row := []string{w.name}
		for _, question := range []string{
			"what it waits for", "launches of other threads into the same context meanwhile",
			"a running capture of a non-blocking stream", "a running capture of a blocking stream",
		} {
			row = append(row, says(t, w.name+": "+question))
		}
		want["3 way"] = append(want["3 way"], row)
	}
	for name, rows := range want {
		require.Equal(t, rows, tables[name], "table %q of docs/driver-facts.md", name)
	}
	for name := range tables {
		switch first, _, _ := strings.Cut(name, " "); first {
		case "1", "2", "3", "4", "5", "9", "10":
			if !strings.HasSuffix(name, " cost") {
				require.Contains(t, want, name, "a table of rules without cases")
			}
		}
	}
}

func says(t *testing.T, name string) string {
	t.Helper()
	for _, c := range Cases() {
		if c.Name == name {
			return c.Says
		}
	}
	t.Fatalf("no case %q", name)
	return ""
}

// documentTables are the document's tables: the section's number and the first
// head name a table, whose rows follow.
func documentTables(t *testing.T) map[string][][]string {
	t.Helper()
	if _, err := os.Stat("drivertest_test.go"); err != nil {
		t.Skip("the repository's sources are not here: this test binary runs away from its checkout")
	}
	text, err := os.ReadFile(filepath.Join("..", "..", "..", "docs", "driver-facts.md"))
	require.NoError(t, err)
	tables := map[string][][]string{}
	section, table := "", ""
	heading := regexp.MustCompile(`^## (\d+)\.`)
	for line := range strings.Lines(string(text)) {
		line = strings.TrimSpace(line)
		if m := heading.FindStringSubmatch(line); m != nil {
			section = m[1]
		}
		if !strings.HasPrefix(line, "|") {
			table = ""
			continue
		}
		var cells []string
		for _, c := range strings.Split(strings.Trim(line, "|"), "|") {
			cells = append(cells, strings.TrimSpace(strings.NewReplacer("`", "", "**", "").Replace(c)))
		}
		switch {
		case table == "":
			table = section + " " + cells[0]
			require.NotContains(t, tables, table, "two tables with one name")
			tables[table] = nil
		case strings.Trim(cells[0], "-") == "":
		default:
			tables[table] = append(tables[table], cells)
		}
	}
	return tables
}

func TestCasesAreWhole(t *testing.T) {
	seen := map[string]bool{}
	for _, c := range Cases() {
		require.False(t, seen[c.Name], "%q stands twice", c.Name)
		seen[c.Name] = true
		require.NotEmpty(t, c.Says, c.Name)
		require.NotNil(t, c.Run, c.Name)
		require.NotContains(t, c.Name, "/", "a slash would be a level of the test's name")
		require.NotContains(t, c.Name+c.Says, "|", "a bar would end a cell of a table")
		require.NotContains(t, c.Name+c.Says, "`")
		if strings.HasPrefix(c.Name, "†") {
			require.Equal(t, softwareDriver.What, c.Needs[0].What, c.Name)
		}
	}
}

func TestTableOfARun(t *testing.T) {
	out := filepath.Join(t.TempDir(), "cases.md")
	cases := []Case{{Section: "1", Name: "b", Says: "OK"}, {Section: "1", Name: "not run", Says: "OK"}, {Section: "2", Name: "a", Says: "NO"}}
	for _, title := range []string{"first", "second"} {
		require.NoError(t, appendTable(out, title, cases, map[string]string{"a": "passed", "b": "skipped: needs luck"}))
	}
	got, err := os.ReadFile(out)
	require.NoError(t, err)
	table := `
| section | case | the driver returns | result |
| --- | --- | --- | --- |
| 1 | b | OK | skipped: needs luck |
| 2 | a | NO | passed |

`
	require.Equal(t, "### first\n"+table+"### second\n"+table, string(got))
}

func TestRequiredGPUs(t *testing.T) {
	for value, want := range map[string]int{"": 0, "0": 0, "1": 1, "2": 2} {
		t.Setenv("CUVMM_REQUIRE_GPU", value)
		require.Equal(t, want, RequiredGPUs(t))
	}
}
