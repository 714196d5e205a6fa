package main

import (
	"bytes"
	"crypto/sha256"
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

func TestSampleStreamsAFileAndChecksIt(t *testing.T) {
	data := make([]byte, 9<<20+123)
	rng := rand.NewChaCha8([32]byte{1})
	_, _ = rng.Read(data)
	file := filepath.Join(t.TempDir(), "input")
	require.NoError(t, os.WriteFile(file, data, 0o600))
	sum := fmt.Sprintf("%x", sha256.Sum256(data))
	for _, row := range []struct {
		what  string
		args  []string
		stdin []byte
		says  []string
	}{
		{"a file", []string{"-driver", "sim", file}, nil, []string{"software driver", file, sum, "9437307", "verified"}},
		{"small steps", []string{"-driver", "sim", "-step", "64KiB", file}, nil, []string{sum, "growths    4", "chunks     4", "committed  16 MiB"}},
		{"standard input", []string{"-driver", "sim", "-"}, data, []string{"standard input", sum}},
		{"its own executable", []string{"-driver", "sim"}, nil, []string{"verified"}},
		{"nothing", []string{"-driver", "sim", "-"}, nil, []string{"bytes      0", "verified"}},
		{"one step exactly", []string{"-driver", "sim", "-step", "1MiB", "-"}, data[:1<<20], []string{"bytes      1048576", "verified"}},
	} {
		t.Run(row.what, func(t *testing.T) {
			var out strings.Builder
			require.NoError(t, run(row.args, bytes.NewReader(row.stdin), &out))
			for _, s := range row.says {
				require.Contains(t, out.String(), s)
			}
		})
	}
}

func TestSampleRefusesBadInput(t *testing.T) {
	for _, row := range []struct {
		args []string
		says string
	}{
		{[]string{"-driver", "gpu"}, `use "auto", "real" or "sim"`},
		{[]string{"-step", "0"}, "positive size"},
		{[]string{"-step", "-4MiB"}, "positive size"},
		{[]string{"-step", "4MB"}, "positive size"},
		{[]string{"-step", "2GiB"}, "up to 1GiB"},
		{[]string{"a", "b"}, "2 files given"},
		{[]string{"-driver", "sim", filepath.Join(t.TempDir(), "absent")}, "no such file"},
		{[]string{"-driver", "sim", t.TempDir()}, "is a directory"},
	} {
		var out strings.Builder
		require.ErrorContains(t, run(row.args, strings.NewReader(""), &out), row.says)
	}
}

// What cannot be written is an error.
func TestSampleNoticesThatNobodyReadsIt(t *testing.T) {
	out, err := os.Open(os.DevNull) // for reading alone
	require.NoError(t, err)
	defer out.Close()
	require.ErrorContains(t, run([]string{"-driver", "sim"}, nil, out), "write "+os.DevNull)
}
