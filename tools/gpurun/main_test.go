//go:build unix

package main

import (
	"bytes"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// bundle lays out an unpacked bundle of the packages below testdata, and of a
// program that is a shell script.
func bundle(t *testing.T) string {
	t.Helper()
	dir := t.TempDir()
	for _, name := range []string{"mixed", "crash"} {
		out, err := exec.Command("go", "test", "-c", "-o", filepath.Join(dir, name, "package.test"), "./testdata/"+name).CombinedOutput()
		require.NoError(t, err, "%s", out)
	}
	require.NoError(t, os.CopyFS(filepath.Join(dir, "mixed", "testdata"), os.DirFS("testdata/mixed/testdata")))
	write := func(name, text string, mode os.FileMode) {
		require.NoError(t, os.MkdirAll(filepath.Dir(filepath.Join(dir, name)), 0o755))
		require.NoError(t, os.WriteFile(filepath.Join(dir, name), []byte(text), mode))
	}
	write("samples/01/program", "#!/bin/sh\necho said: \"$@\" in \"${PWD##*/}\" by the $CUVMM_DRIVER driver\n[ \"$1\" != fail ]\n", 0o755)
	write("packages", "mixed tests\ncrash tests\nsamples/01 program\n", 0o644)
	t.Setenv("CUVMM_LOG", filepath.Join(dir, "log"))
	t.Setenv("CUVMM_REQUIRE_GPU", "")
	t.Setenv("CUVMM_DRIVER", "")
	return dir
}

func TestRun(t *testing.T) {
	dir := bundle(t)
	for _, c := range []struct {
		name, args, crashBy string
		ok                  bool
		want, not           []string
	}{
		{name: "with a GPU required", args: "mixed", want: []string{
			"FAILED  mixed (tests): 4 passed, 3 failed, 1 skipped, exit status 1",
			"skipped: mixed_test.go:24: there is no fabric here (TestSkips)",
			"failed TestFails/inner\n", "got 1, want 2",
			"a GPU is required and there is none",
			"== 1 run, 1 failed; tests with their subtests: 4 passed, 3 failed, 1 skipped",
			"FAILED: mixed (tests)",
		}, not: []string{"failed TestFails\n"}},
		{name: "without", args: "-no-gpu mixed", want: []string{"4 passed, 2 failed, 2 skipped", "skipped: mixed_test.go:36: no GPU is required (TestNeedsGPU)"}},
		{name: "selected", args: "-run Pass|Folder", ok: true, want: []string{
			"passed  mixed (tests): 4 passed, 0 failed, 0 skipped", "nothing crash (tests): no tests",
		}, not: []string{"samples"}},
		{name: "benchmarks", args: "-bench", ok: true, want: []string{
			"passed  mixed (tests): 1 passed, 0 failed, 1 skipped", "chunks/op", "BenchmarkAdds", "allocs/op",
			"skipped: mixed_test.go:49: no second device (BenchmarkSkips)", "skipped: crash_test.go:39: only when it is to fail (BenchmarkFails/small, BenchmarkFails/large)",
		}, not: []string{"samples"}},
		{name: "no benchmarks", args: "-bench -run Removes mixed", ok: true, want: []string{"nothing mixed (tests): no benchmarks"}},
		{name: "a failing benchmark", args: "-bench crash", crashBy: "benchmark", want: []string{"FAILED  crash (tests)", "failed BenchmarkFails/small", "the chunk is too small"}},
		{name: "a crash", args: "crash", want: []string{"FAILED  crash (tests): no test ran, exit status 2", "panic: unrecovered"}},
		{name: "a hang", args: "-timeout 2s crash", crashBy: "hanging", want: []string{"FAILED  crash (tests)", "panic: test timed out after 1.8s"}},
		{name: "a failure after the tests", args: "crash", crashBy: "leaking", want: []string{
			"FAILED  crash (tests): 1 passed, 0 failed, 0 skipped, exit status 1", "one reservation was never closed"}},
		{name: "tests that never ran", args: "crash", crashBy: "silence", want: []string{"FAILED  crash (tests): no test ran"}},
		{name: "all of a folder", args: "samples/...", ok: true, want: []string{"passed  samples/01 (program)", "said: in 01 by the real driver"}},
		{name: "a program without a GPU", args: "-no-gpu samples/01", ok: true, want: []string{"said: in 01 by the driver"}},
		{name: "a program's arguments", args: "samples/01 -- -n 3", ok: true, want: []string{"said: -n 3 in 01"}},
		{name: "a program that fails", args: "samples/01/ -- fail", want: []string{"FAILED  samples/01 (program), exit status 1", "said: fail"}},
		{name: "a shard", args: "-list -shard 2/2", ok: true, want: []string{"crash (tests)\n"}, not: []string{"mixed", "samples"}},
		{name: "the other shard", args: "-list -shard 1/2", ok: true, want: []string{"mixed (tests)\nsamples/01 (program)\n"}, not: []string{"crash"}},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Setenv("CRASH_BY", c.crashBy)
			var out bytes.Buffer
			ok, err := run(t.Context(), dir, strings.Fields(c.args), &out)
			require.NoError(t, err)
			for _, want := range c.want {
				require.Contains(t, out.String(), want)
			}
			for _, not := range c.not {
				require.NotContains(t, out.String(), not)
			}
			require.Equal(t, c.ok, ok)
		})
	}
	log, err := os.ReadFile(filepath.Join(dir, "log"))
	require.NoError(t, err)
	require.Contains(t, string(log), "=== RUN   TestPasses", "the log has everything that was said")
}

func TestRefusals(t *testing.T) {
	dir := t.TempDir()
	_, err := run(t.Context(), dir, nil, &bytes.Buffer{})
	require.ErrorContains(t, err, "no unpacked bundle")
	require.NoError(t, os.WriteFile(filepath.Join(dir, "packages"), []byte("vmm tests\n"), 0o644))
	for args, want := range map[string]string{
		"cuda":         "cuda is not in the bundle: run.sh -list",
		"vm/...":       "vm/... is not in the bundle",
		"-shard 3/2":   "give I/N with I from 1 to N",
		"-shard 0/2":   "give I/N",
		"-shard 1/2x":  "give I/N",
		"-shard 2/2":   "nothing to run",
		"-timeout -1s": "a time above 0",
		"-run (":       "missing closing )",
		"-gpu":         "run.sh -help",
		"vmm -bench":   "options go first",
	} {
		_, err := run(t.Context(), dir, strings.Fields(args), &bytes.Buffer{})
		require.ErrorContains(t, err, want, "run.sh %s", args)
	}
}

// What a killed run had started is killed with it, and does not hold us up, which would be
// for an hour.
func TestLimitKillsTheGroup(t *testing.T) {
	mark := filepath.Join(t.TempDir(), "survived")
	out, _, late, err := runLimited(t.Context(), exec.Command("sh", "-c", "echo begun; (sleep 2; touch "+mark+") & sleep 3600"), time.Second)
	require.True(t, late)
	require.ErrorContains(t, err, "killed")
	require.Equal(t, "begun\n", out)
	time.Sleep(2 * time.Second)
	require.NoFileExists(t, mark)
}

func TestLongReports(t *testing.T) {
	r := report{verdict: failed, failed: 20}
	for i := range 20 {
		r.failures = append(r.failures, outcome{fmt.Sprintf("TestFails%d", i), strings.Repeat("a line\n", 30)})
		r.skips = append(r.skips, outcome{fmt.Sprintf("TestSkips%d", i), "first\n    x_test.go:3: no device\n"})
	}
	var out bytes.Buffer
	r.print(&out, job{"vmm", tests}, false)
	text := out.String()
	require.Contains(t, text, "skipped: x_test.go:3: no device (TestSkips0, TestSkips1, TestSkips2 and 17 more)\n")
	require.Equal(t, shownFailures, strings.Count(text, "failed TestFails"))
	require.Equal(t, shownFailures*shownLines, strings.Count(text, "a line"))
	require.Contains(t, text, "... and 8 more failed: see the log")
}
