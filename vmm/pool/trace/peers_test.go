package trace_test

import (
	"bytes"
	"encoding/json"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/cuvmm/cuvmm/internal/tracegen"
	"github.com/cuvmm/cuvmm/vmm/pool/trace"
	"github.com/stretchr/testify/require"
)

// peers runs the script that replays traces through other libraries.
func peers(t *testing.T, args ...string) string {
	t.Helper()
	script, err := filepath.Abs("../../../scripts/pool-peers.py")
	require.NoError(t, err)
	if _, err := os.Stat(script); err != nil {
		t.Skipf("the tests run away from the sources: %v", err)
	}
	python, err := exec.LookPath("python3")
	if err != nil {
		if os.Getenv("CUVMM_REQUIRE_PYTHON") != "" {
			t.Fatal("CUVMM_REQUIRE_PYTHON is set, and there is no python3 in PATH")
		}
		t.Skip("no python3 in PATH; set CUVMM_REQUIRE_PYTHON=1 to fail instead")
	}
	var complaints bytes.Buffer
	c := exec.CommandContext(t.Context(), python, append([]string{"-B", script}, args...)...)
	c.Stderr = &complaints
	out, err := c.Output()
	require.NoError(t, err, "%s", &complaints)
	require.Empty(t, complaints.String())
	return string(out)
}

// The script reads traces by itself, and must see in them what Go sees.
func TestPeersReadTraces(t *testing.T) {
	dir := t.TempDir()
	args := []string{"run", "-dry-run"}
	want := map[string]trace.Summary{}
	for _, g := range tracegen.Generators() {
		tr := g.Make(tracegen.Config{Seed: 4, Divisor: 1000})
		b, err := tr.MarshalBinary()
		require.NoError(t, err)
		name := filepath.Join(dir, tr.Name)
		require.NoError(t, os.WriteFile(name, b, 0o600))
		args = append(args, name)
		want[tr.Name], err = tr.Summary()
		require.NoError(t, err)
	}
	lines := strings.Split(strings.TrimSpace(peers(t, args...)), "\n")
	require.Len(t, lines, len(want))
	for _, line := range lines {
		var got struct {
			Trace, Error                    string
			Requested, Reserved, Operations uint64
			Us                              float64
		}
		require.NoError(t, json.Unmarshal([]byte(line), &got))
		require.Empty(t, got.Error)
		s := want[got.Trace]
		require.Equal(t, s.PeakBytes, got.Requested)
		require.Equal(t, s.PeakBytes, got.Reserved)
		require.Equal(t, uint64(s.Allocs+s.Frees), got.Operations)
		require.Positive(t, got.Us)
	}
}

// A library that is not there is told in its lines, and ends nothing.
func TestPeersThatAreMissing(t *testing.T) {
	tr := small()
	tr.Streams = 1
	tr.Ops = []trace.Op{{Kind: trace.Alloc, Bytes: 7}, {Kind: trace.Free}}
	b, err := tr.MarshalBinary()
	require.NoError(t, err)
	name := filepath.Join(t.TempDir(), "one")
	require.NoError(t, os.WriteFile(name, b, 0o600))
	t.Setenv("PYTHONPATH", t.TempDir())
	require.NoError(t, os.WriteFile(filepath.Join(os.Getenv("PYTHONPATH"), "cupy.py"), []byte("raise ImportError('not today')"), 0o600))
	require.JSONEq(t, `{"trace": "small", "allocator": "cupy", "error": "ImportError: not today"}`, peers(t, "run", "-peers", "cupy", name))
}

func TestPeersTable(t *testing.T) {
	dir := t.TempDir()
	file := func(name, text string) string {
		name = filepath.Join(dir, name)
		require.NoError(t, os.WriteFile(name, []byte(text), 0o600))
		return name
	}
	python := file("peers", `{"trace": "lora-0", "allocator": "torch-expandable", "requested": 100, "reserved": 110, "us": 2.0}
{"trace": "lora-0", "allocator": "cupy-async", "requested": 100, "reserved": 105, "us": 9.0}
{"trace": "lora-1", "allocator": "torch-expandable", "requested": 100, "reserved": 101, "us": 1.0}
{"trace": "lora-1", "allocator": "cupy-async", "error": "out of memory"}
{"trace": "lora-2", "allocator": "cupy-async", "requested": 100, "reserved": 150, "us": 1.0}
`)
	golang := file("log", `goos: linux
BenchmarkReplay/lora-0/pool-16         	1000000000	         1.050 reserved/requested	         4.5 us/op
BenchmarkReplay/lora-0/cuda-async-c    	1000000000	         1.000 reserved/requested	         3.0 us/op
  BenchmarkReplay/lora-1/pool-16         	1000000000	         1.000 reserved/requested	         1.5 us/op
--- FAIL: BenchmarkReplay/lora-2/pool-16
`)
	out := peers(t, "table", python, golang)
	for _, want := range []string{
		"| allocator | lora memory | lora µs |",
		"| torch-expandable | 1.100 (1.100) | 2.00 (2.00) |",
		"| cupy-async | 1.500 (1.500), 1 failed | 9.00 (9.00) |",
		"| pool | 1.050 (1.050), 1 failed | 4.50 (4.50) |",
		// Against CuPy on lora-0, PyTorch on lora-1, and it failed on lora-2.
		"| lora | 3 | 1.000 | 1.50 | 2 | 1 |",
		// From C there is one rival, on lora-0.
		"| lora | 1 | 1.050 | 1.50 | 0 | 0 |",
	} {
		require.Contains(t, out, want)
	}
}
