package main

import (
	"bytes"
	"context"
	"crypto/sha256"
	"fmt"
	"io"
	"math/rand/v2"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/cuvmm/cuvmm/cuda/sim"
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
			require.NoError(t, sample.Test(t.Context(), nil, row.args, bytes.NewReader(row.stdin), &out))
			for _, s := range row.says {
				require.Contains(t, out.String(), s)
			}
		})
	}
}

// Nothing stays, whichever call fails.
func TestSampleGivesEverythingBack(t *testing.T) {
	for call, after := range map[string]int{"cuMemAddressReserve": 0, "cuMemCreate": 1, "cuMemMap": 1, "cuMemSetAccess": 1,
		"cuStreamCreate": 0, "cuMemcpyHtoDAsync": 1, "cuMemcpyDtoHAsync": 0} {
		t.Run(call, func(t *testing.T) {
			m, sys := sim.Open(t)
			m.Inject(sim.Fault{Call: call, After: after, Result: 999})
			require.ErrorContains(t, sample.Test(t.Context(), sys, nil, nil, io.Discard), call)
			require.Empty(t, sys.Live())
		})
	}
}

func TestSampleEndsWithAnInterrupt(t *testing.T) {
	ctx, interrupt := context.WithCancel(t.Context())
	interrupt()
	_, sys := sim.Open(t)
	err := sample.Test(ctx, sys, nil, nil, io.Discard)
	require.ErrorContains(t, err, "interrupted after 0 bytes")
	require.ErrorIs(t, err, context.Canceled)
}

func TestSampleRefusesBadInput(t *testing.T) {
	for _, row := range []struct {
		args []string
		says string
	}{
		{[]string{"-step", "0"}, "positive size"},
		{[]string{"a", "b"}, "2 arguments given"},
		{[]string{"-driver", "sim", filepath.Join(t.TempDir(), "absent")}, "no such file"},
		{[]string{"-driver", "sim", t.TempDir()}, "is a directory"},
	} {
		require.ErrorContains(t, sample.Test(t.Context(), nil, row.args, strings.NewReader(""), io.Discard), row.says)
	}
}
