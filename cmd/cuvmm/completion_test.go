package main

import (
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/cuvmm/cuvmm/internal/needs"
	"github.com/stretchr/testify/require"
)

func TestCompletionInBash(t *testing.T) {
	bash := needs.Program(t, "bash")
	script, _ := cuvmm(t, exitOK, "completion", "bash")
	file := filepath.Join(t.TempDir(), "completion")
	require.NoError(t, os.WriteFile(file, []byte(script), 0o600))
	for line, want := range map[string]string{
		"cuvmm ":             "completion doctor info map top",
		"cuvmm d":            "doctor",
		"cuvmm doctor -":     "-driver -fix -json -report",
		"cuvmm doctor -f":    "-fix",
		"cuvmm map -h":       "-html -http",
		"cuvmm completion z": "zsh",
	} {
		args := append([]string{"-c", `source "$0"; COMP_WORDS=("$@"); COMP_CWORD=$(($# - 1)); _cuvmm; echo "${COMPREPLY[*]}"`, file}, strings.Split(line, " ")...)
		out, err := exec.CommandContext(t.Context(), bash, args...).CombinedOutput()
		require.NoError(t, err, "%s", out)
		require.Equal(t, want, strings.TrimSpace(string(out)), line)
	}
}

func TestCompletionInOtherShells(t *testing.T) {
	for _, shell := range []string{"zsh", "fish"} {
		script, _ := cuvmm(t, exitOK, "completion", shell)
		for _, c := range commands() {
			require.Contains(t, script, c.name)
			for _, f := range flagsOf(c) {
				require.Contains(t, script, f[0])
			}
		}
		if path, err := exec.LookPath(shell); err == nil {
			c := exec.CommandContext(t.Context(), path, "-n")
			c.Stdin = strings.NewReader(script)
			out, err := c.CombinedOutput()
			require.NoError(t, err, "%s", out)
		}
	}
	_, complaints := cuvmm(t, exitUsage, "completion", "csh")
	require.Contains(t, complaints, "name bash, zsh or fish")
}
