//go:build linux

package main

import (
	"bytes"
	"io"
	"os"
	"os/exec"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/cuvmm/cuvmm/samples/internal/app"
)

// The sample runs itself again as the other process, which in a test is the
// test.
func TestMain(m *testing.M) {
	if app.Started() || os.Getenv("RUN_SAMPLE") != "" {
		main()
		return
	}
	os.Exit(m.Run())
}

func TestSampleSharesByText(t *testing.T) {
	var out bytes.Buffer
	require.NoError(t, sample.Test(t.Context(), nil, []string{"-driver", "sim"}, nil, &out))
	said := out.String()
	for _, s := range []string{"software driver", "offer      an array of int32", "by fabric", "imported   1000 elements", "receipt    from process", "verified"} {
		require.Contains(t, said, s)
	}
	require.NotContains(t, said, "fallback")
	require.NotContains(t, said, "cuvmmoffer", "no handle is printed")
}

func TestSampleFallsBackAndSaysSo(t *testing.T) {
	var out bytes.Buffer
	require.NoError(t, sample.Test(t.Context(), nil, []string{"-driver", "sim", "-channel", "-1"}, nil, &out))
	for _, s := range []string{"fallback   descriptors", "NOT_PERMITTED", "there is no channel in", "imported   1000 elements", "verified"} {
		require.Contains(t, out.String(), s)
	}
}

func TestSampleDiagnoses(t *testing.T) {
	for channel, says := range map[string][]string{
		"2":  {"ok: import: device 0: it was imported", "fabric handles work: true"},
		"-1": {"problem: nodes: there is no channel", "problem: create: device 0", "fabric handles work: false"},
	} {
		var out bytes.Buffer
		require.NoError(t, sample.Test(t.Context(), nil, []string{"-driver", "sim", "-channel", channel, "-diagnose"}, nil, &out))
		for _, s := range says {
			require.Contains(t, out.String(), s)
		}
	}
}

// On the driver that this machine has, it shares one way or the other.
func TestSampleOnThisMachine(t *testing.T) {
	if os.Getenv("CUVMM_REQUIRE_GPU") == "" {
		t.Skip("set CUVMM_REQUIRE_GPU=1 to run on this machine's GPU")
	}
	var out bytes.Buffer
	require.NoError(t, sample.Test(t.Context(), nil, []string{"-driver", "real"}, nil, &out))
	t.Log(out.String())
	require.Contains(t, out.String(), "verified")
	require.NoError(t, sample.Test(t.Context(), nil, []string{"-driver", "real", "-diagnose"}, nil, &out))
}

func TestSampleRefusesBadInput(t *testing.T) {
	for _, row := range []struct {
		args []string
		says string
	}{
		{[]string{"more"}, `argument "more"`},
		{[]string{"-driver", "sim", "-folder", os.DevNull}, os.DevNull},
	} {
		require.ErrorContains(t, sample.Test(t.Context(), nil, row.args, nil, io.Discard), row.says)
	}
}

func TestImporterRefusesWhatIsNoOffer(t *testing.T) {
	cmd := exec.CommandContext(t.Context(), os.Args[0], "-as", "importer", "-driver", "sim", "-offer", "what")
	said, err := cmd.CombinedOutput()
	require.Error(t, err)
	require.Contains(t, string(said), "pass the text of MarshalText")
}

// An interrupt leaves no folder behind.
func TestSampleCleansUpWhenItIsInterrupted(t *testing.T) {
	top := t.TempDir()
	cmd := exec.CommandContext(t.Context(), os.Args[0], "-driver", "sim")
	cmd.Env = append(os.Environ(), "TMPDIR="+top, "RUN_SAMPLE=1")
	require.NoError(t, cmd.Start())
	require.Eventually(t, func() bool { folders, _ := os.ReadDir(top); return len(folders) > 0 }, time.Minute, time.Millisecond)
	require.NoError(t, cmd.Process.Signal(os.Interrupt))
	_ = cmd.Wait() // an error, unless it was done
	folders, err := os.ReadDir(top)
	require.NoError(t, err)
	require.Empty(t, folders)
}
