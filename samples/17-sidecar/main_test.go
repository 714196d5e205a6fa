//go:build linux

package main

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/cuvmm/cuvmm/internal/test/sampletest"
)

func TestMain(m *testing.M)   { sampletest.Main(m, main) }
func TestSample(t *testing.T) { sampletest.Test(t, sample.Name, sample.Test) }

// The other processes end with the one that started them, however that ends.
func TestNoProcessOutlivesTheReader(t *testing.T) {
	reader := exec.CommandContext(t.Context(), os.Args[0], "-as", "reader", "-driver", "sim", "-dir", filepath.Join(t.TempDir(), "private"))
	in, err := reader.StdinPipe() // which the reader takes for its own parent's
	require.NoError(t, err)
	defer in.Close()
	require.NoError(t, reader.Start())
	pid := reader.Process.Pid
	var others []string
	require.Eventually(t, func() bool {
		var text []byte
		for _, thread := range glob(fmt.Sprintf("/proc/%d/task/*/children", pid)) {
			more, _ := os.ReadFile(thread)
			text = append(append(text, ' '), more...)
		}
		others = slices.Compact(slices.Sorted(slices.Values(strings.Fields(string(text)))))
		return len(others) == 2
	}, 20*time.Second, time.Millisecond)
	require.NoError(t, reader.Process.Kill())
	require.Error(t, reader.Wait())
	for _, other := range others {
		require.Eventually(t, func() bool {
			status, err := os.ReadFile("/proc/" + other + "/stat")
			return err != nil || strings.Contains(string(status), ") Z ")
		}, 20*time.Second, 10*time.Millisecond, "process %s", other)
	}
}

func glob(pattern string) []string {
	all, _ := filepath.Glob(pattern) // the pattern is a good one
	return all
}
