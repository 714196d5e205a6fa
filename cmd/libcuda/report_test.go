//go:build linux && cgo && (amd64 || arm64) && !cuvmm_nocgo

package main

import (
	"os"
	"os/exec"
	"path/filepath"
	"testing"

	"github.com/cuvmm/cuvmm/cuda/sim"
	"github.com/cuvmm/cuvmm/internal/test/needs"
	"github.com/stretchr/testify/require"
)

// A program's mistakes are in the report, in words and without Go's stacks; one without
// mistakes writes none.
func TestAProgramsMistakesAreReported(t *testing.T) {
	library, dir := shared(t), t.TempDir()
	report := filepath.Join(dir, "report")
	binary := filepath.Join(dir, "program")
	output(t, exec.CommandContext(t.Context(), needs.Program(t, "cc"), "-o", binary, "testdata/wrong.c", "-ldl"))
	run := func(args ...string) string {
		cmd := exec.CommandContext(t.Context(), binary, append([]string{library}, args...)...)
		cmd.Env = append(environment(t, sim.Options{Races: true}), reportEnv+"="+report)
		return output(t, cmd)
	}
	run("clean")
	require.NoFileExists(t, report)

	require.Contains(t, run(), "CUDA_ERROR_ILLEGAL_ADDRESS")
	text, err := os.ReadFile(report)
	require.NoError(t, err)
	require.Regexp(t, `(?m)^\d+: log: .*device 0 has read access to the mapping .* grant it with cuMemSetAccess$`, string(text))
	require.Regexp(t, `(?m)^\d+: race: .*cuMemsetD8Async on stream .* writes at 0x[0-9a-f]+; and .*nothing orders them`, string(text))
	require.Regexp(t, `(?m)^\d+: left: mapping 0x[0-9a-f]+ of 2097152 bytes$`, string(text))
	require.NotContains(t, string(text), "cgo")
	require.NotContains(t, string(text), "left: context")
}

func TestVisibleDevices(t *testing.T) {
	for list, want := range map[string][]int{"0": {0}, "1,0": {1, 0}, "2, 1": {2, 1}, "": {}, "-1": {}, "1,7,0": {1}, "0,0": {0}, "GPU-1": {}} {
		require.Equal(t, want, visible(list, 3), list)
	}
	described, some := hide(`{"Devices": [{}, {"Memory": 1073741824}]}`, "1")
	require.JSONEq(t, `{"Devices": [{}, {"Memory": 1073741824}], "Visible": [1]}`, described)
	require.True(t, some)
	described, some = hide("", "1")
	require.JSONEq(t, `{"Visible": []}`, described)
	require.False(t, some)
	described, some = hide(`{"Visible": [1]}`, "0")
	require.JSONEq(t, `{"Visible": [1]}`, described)
	require.True(t, some)
	described, _ = hide(`{"Devices": 7}`, "0")
	require.Equal(t, `{"Devices": 7}`, described)
}
