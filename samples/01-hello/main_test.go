package main

import (
	"os"
	"os/exec"
	"testing"

	"github.com/cuvmm/cuvmm/internal/test/needs"
	"github.com/stretchr/testify/require"
)

// The test runs itself again, as the sample.
func TestMain(m *testing.M) {
	if os.Getenv("RUN_SAMPLE") != "" {
		main()
		return
	}
	os.Exit(m.Run())
}

func hello(t *testing.T, args []string, environment ...string) (string, error) {
	cmd := exec.CommandContext(t.Context(), os.Args[0], args...)
	cmd.Env = append(append(os.Environ(), "RUN_SAMPLE=1"), environment...)
	said, err := cmd.CombinedOutput()
	return string(said), err
}

func TestSampleReadsBackWhatItWrote(t *testing.T) {
	said, err := hello(t, nil, "CUVMM_DRIVER=sim")
	require.NoError(t, err, said)
	require.Regexp(t, `^device 0 \(Software GPU\) holds \[1 2 3 4\] at 0x[0-9a-f]+, on the software driver`, said)
}

func TestSampleFailsIfItsOutputIsLost(t *testing.T) {
	full, err := os.OpenFile("/dev/full", os.O_WRONLY, 0)
	if err != nil {
		needs.Lacks(t, "/dev/full: %v", err)
	}
	defer full.Close()
	cmd := exec.CommandContext(t.Context(), os.Args[0])
	cmd.Env, cmd.Stdout = append(os.Environ(), "RUN_SAMPLE=1", "CUVMM_DRIVER=sim"), full
	require.Error(t, cmd.Run())
}

func TestSampleSaysWhatIsWrong(t *testing.T) {
	said, err := hello(t, nil, "CUVMM_DRIVER=gpu")
	require.Error(t, err)
	require.Contains(t, said, `use "auto", "real" or "sim"`)
	said, err = hello(t, []string{"-driver", "real"}, "CUVMM_DRIVER=sim")
	require.Error(t, err)
	require.Contains(t, said, `argument "-driver": none is taken; CUVMM_DRIVER=real`)
}
