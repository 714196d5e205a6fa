package main

import (
	"bytes"
	"encoding/json"
	"os"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/require"
)

func TestReport(t *testing.T) {
	h := show(t, healthy())
	host, err := os.Hostname()
	require.NoError(t, err)
	h.environ = func() []string {
		return []string{"CUDA_VISIBLE_DEVICES=0", "NCCL_DEBUG=on " + host, "NVIDIA_API_KEY=abc123def", "AWS_SECRET_ACCESS_KEY=hunter2", "HOME=/x"}
	}
	file := filepath.Join(t.TempDir(), "report.json")
	var out, complaints bytes.Buffer
	require.Equal(t, exitOK, run([]string{"doctor", "-report", file}, &out, &complaints, h))
	require.Empty(t, out.String())
	text, err := os.ReadFile(file)
	require.NoError(t, err)
	var got struct {
		Report, Kernel string
		Settings       map[string]string
		Findings       []finding
		Info           driverInfo
	}
	require.NoError(t, json.Unmarshal(text, &got))
	require.Equal(t, "cuvmm doctor", got.Report)
	require.Equal(t, "Linux version 6.8.0", got.Kernel)
	require.Equal(t, map[string]string{"CUDA_VISIBLE_DEVICES": "0", "NCCL_DEBUG": "on HOST", "NVIDIA_API_KEY": "HIDDEN"}, got.Settings)
	require.Greater(t, len(got.Findings), 15)
	require.Len(t, got.Info.Devices, 1)
	require.Regexp(t, `^GPU-[0-9a-f]{4}…$`, got.Info.Devices[0].UUID)
	for _, secret := range []string{"hunter2", "abc123def"} {
		require.NotContains(t, string(text), secret)
	}

	require.Equal(t, exitFailed, run([]string{"doctor", "-report", filepath.Join(file, "x")}, &out, &complaints, h))
}
