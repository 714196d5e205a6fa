//go:build linux

package main

import (
	"bytes"
	"crypto/sha256"
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/require"
)

// The sample runs itself again as its child, which in a test is the test.
func TestMain(m *testing.M) {
	if len(os.Args) > 1 && os.Args[1] == "-child" {
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
			require.NoError(t, run(append([]string{"-driver", "sim"}, append(row.args, file)...), &out))
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
		{[]string{"-driver", "gpu"}, `use "auto", "real" or "sim"`},
		{[]string{"-step", "0"}, "use 1 to"},
		{[]string{"a", "b"}, "2 files given"},
		{[]string{"-driver", "sim", filepath.Join(t.TempDir(), "absent")}, "no such file"},
	} {
		require.ErrorContains(t, run(row.args, new(bytes.Buffer)), row.says)
	}
}

// An input that breaks off is all that is told of: that the child and the
// connection to it end follows from it.
func TestSampleNamesItsInputAlone(t *testing.T) {
	dir := t.TempDir()
	err := run([]string{"-driver", "sim", dir}, new(bytes.Buffer))
	require.ErrorContains(t, err, "is a directory")
	require.NotContains(t, err.Error(), "\n")
}

// What cannot be written is an error.
func TestSampleNoticesThatNobodyReadsIt(t *testing.T) {
	out, err := os.Open(os.DevNull) // for reading alone
	require.NoError(t, err)
	defer out.Close()
	require.Error(t, run([]string{"-driver", "sim"}, out))
}
