package auto

import (
	"bytes"
	"errors"
	"log/slog"
	"os"
	"path/filepath"
	"testing"

	"github.com/cuvmm/cuvmm/csrc"
	"github.com/cuvmm/cuvmm/cuda"
	_ "github.com/cuvmm/cuvmm/internal/test/gputest" // with it, another library captures beside each test
	"github.com/stretchr/testify/require"
)

func TestTheSoftwareDriverIsChosenByOptionAndEnvironment(t *testing.T) {
	t.Setenv(DriverEnv, "real")
	var log bytes.Buffer
	s, err := Open(Options{Driver: Software, CUDA: cuda.Options{Logger: slog.New(slog.NewTextHandler(&log, nil))}})
	require.NoError(t, err)
	require.True(t, s.Driver().Software, "the option beats the environment")
	require.Contains(t, log.String(), "software driver, CUDA 13.0")
	require.NoError(t, s.Close())

	t.Setenv(DriverEnv, "sim")
	s, err = Open(Options{})
	require.NoError(t, err)
	require.True(t, s.Driver().Software)
	require.NoError(t, s.Close(), "and its machine with it")
}

func TestAnUnknownDriverIsRefusedWithItsOrigin(t *testing.T) {
	_, err := Open(Options{Driver: "gpu"})
	require.ErrorIs(t, err, cuda.ErrInvalidArgument)
	require.ErrorContains(t, err, `driver "gpu" from the Driver option`)
	t.Setenv(DriverEnv, "cuda")
	_, err = Open(Options{})
	require.ErrorContains(t, err, `driver "cuda" from the environment variable CUVMM_DRIVER`)
}

// A driver that is there and does not load is never replaced.
func TestABrokenDriverIsAnError(t *testing.T) {
	file := filepath.Join(t.TempDir(), "libcuda.so.1")
	require.NoError(t, os.WriteFile(file, []byte("no library"), 0o600))
	t.Setenv(cuda.LibraryEnv, file)
	t.Setenv(DriverEnv, "")
	_, err := Open(Options{Driver: Real})
	require.ErrorIs(t, err, cuda.ErrNoDriver)
	var open *csrc.OpenError
	require.ErrorAs(t, err, &open)
	if open.Reason == csrc.NoCgo {
		return // nothing was looked at
	}
	_, err = Open(Options{})
	require.ErrorIs(t, err, cuda.ErrNoDriver)
	require.ErrorContains(t, err, cuda.LibraryEnv)
}

func TestOnlyAnAbsentDriverIsReplaced(t *testing.T) {
	before := nodes
	t.Cleanup(func() { nodes = before })
	nodes = []string{filepath.Join(t.TempDir(), "none")}
	for reason := csrc.NotFound; reason <= csrc.NoCgo; reason++ {
		err := error(&csrc.OpenError{Reason: reason})
		none := reason == csrc.NotFound || reason == csrc.NoCgo || reason == csrc.SoftwareDriver
		require.Equal(t, none, refusal(err) == nil, reason.String())
	}
	require.Error(t, refusal(errors.New("something else")))
	node := t.TempDir()
	nodes = []string{filepath.Join(node, "none"), node}
	require.NoError(t, refusal(&csrc.OpenError{Reason: csrc.SoftwareDriver}), "the software driver lies where the driver would")
	err := refusal(&csrc.OpenError{Reason: csrc.NotFound})
	require.ErrorIs(t, err, cuda.ErrNoDriver)
	require.ErrorContains(t, err, node+" is there, but no driver library")
	require.ErrorContains(t, err, "CUVMM_DRIVER=sim")
}
