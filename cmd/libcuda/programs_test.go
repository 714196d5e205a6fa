//go:build linux && cgo && (amd64 || arm64) && !cuvmm_nocgo

package main

import (
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/cuvmm/cuvmm/csrc"
	"github.com/cuvmm/cuvmm/cuda/sim"
	"github.com/cuvmm/cuvmm/internal/test/needs"
	"github.com/stretchr/testify/require"
)

// C programs print the same on the library and on a GPU.
func TestProgramsPrintTheSameOnAGPU(t *testing.T) {
	cc := needs.Program(t, "cc")
	sources, err := filepath.Glob("testdata/vmm/*.c")
	require.NoError(t, err)
	require.Len(t, sources, 4)
	for _, source := range sources {
		program := strings.TrimSuffix(source, ".c")
		t.Run(filepath.Base(program), func(t *testing.T) {
			want, err := os.ReadFile(program + ".want")
			require.NoError(t, err)
			binary := filepath.Join(t.TempDir(), "program")
			output(t, exec.CommandContext(t.Context(), cc, "-std=gnu11", "-Wall", "-Wextra", "-Werror", "-o", binary, source, "-ldl"))
			t.Run("software", func(t *testing.T) {
				cmd := exec.CommandContext(t.Context(), binary, shared(t))
				cmd.Env = environment(t, sim.Options{Folder: t.TempDir()})
				require.Equal(t, string(want), output(t, cmd))
			})
			t.Run("GPU", func(t *testing.T) {
				needsGPU(t)
				require.Equal(t, string(want), output(t, exec.CommandContext(t.Context(), binary)))
			})
		})
	}
}

// needsGPU skips the test without the vendor's driver, as gputest does. That package is not
// for this binary: it has another library capture a stream beside every test, and the
// conformance suite is without.
func needsGPU(t *testing.T) {
	t.Helper()
	if _, err := csrc.Open(csrc.Options{}); err != nil {
		if os.Getenv("CUVMM_REQUIRE_GPU") != "" {
			t.Fatalf("a GPU is required: %v", err)
		}
		t.Skipf("no real driver: %v", err)
	}
}
