//go:build linux

package main

import (
	"bytes"
	"crypto/sha256"
	"fmt"
	"io"
	"math/rand/v2"
	"os"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/cuvmm/cuvmm/samples/internal/app"
)

// The sample runs itself again as its child, which in a test is the test.
func TestMain(m *testing.M) {
	if app.Started() {
		main()
		return
	}
	os.Exit(m.Run())
}

func TestSampleStreamsAFileToItsChild(t *testing.T) {
	data := make([]byte, 5<<20+123)
	_, _ = rand.NewChaCha8([32]byte{1}).Read(data)
	file := filepath.Join(t.TempDir(), "input")
	for _, row := range []struct {
		what string
		n    int
		args []string
	}{
		{"several pieces", len(data), nil},
		{"one piece", 1000, nil},
		{"nothing", 0, nil},
		{"many small pieces", 1 << 20, []string{"-step", "10000"}},
	} {
		t.Run(row.what, func(t *testing.T) {
			require.NoError(t, os.WriteFile(file, data[:row.n], 0o600))
			var out bytes.Buffer
			require.NoError(t, sample.Test(t.Context(), nil, append([]string{"-driver", "sim"}, append(row.args, file)...), nil, &out))
			for _, s := range []string{"software driver", file, fmt.Sprintf("parent     process %d, the array is at 0x", os.Getpid()),
				fmt.Sprintf(": bytes %d, changes ", row.n), fmt.Sprintf("reply      %x", sha256.Sum256(data[:row.n])), "verified"} {
				require.Contains(t, out.String(), s)
			}
			require.NotContains(t, out.String(), fmt.Sprintf("child      process %d,", os.Getpid()))
		})
	}
}

func TestSampleRefusesBadInput(t *testing.T) {
	for _, row := range []struct {
		args []string
		says string
	}{
		{[]string{"-step", "0"}, "positive size"},
		{[]string{"a", "b"}, "2 arguments given"},
		{[]string{"-driver", "sim", filepath.Join(t.TempDir(), "absent")}, "no such file"},
	} {
		require.ErrorContains(t, sample.Test(t.Context(), nil, row.args, nil, io.Discard), row.says)
	}
}

// If the input breaks off, the error names the input alone: the ends of the child and
// of the connection follow from it.
func TestSampleNamesItsInputAlone(t *testing.T) {
	err := sample.Test(t.Context(), nil, []string{"-driver", "sim", t.TempDir()}, nil, io.Discard)
	require.ErrorContains(t, err, "is a directory")
	require.NotContains(t, err.Error(), "\n")
}

// What cannot be written is an error, also what the child writes.
func TestSampleNoticesFailedWrites(t *testing.T) {
	out, err := os.Open(os.DevNull) // for reading alone
	require.NoError(t, err)
	defer out.Close()
	require.ErrorContains(t, sample.Test(t.Context(), nil, []string{"-driver", "sim"}, nil, out), "write "+os.DevNull)
}
