package main

import (
	"bytes"
	"encoding/json"
	"os"
	"path/filepath"
	"testing"

	"github.com/cuvmm/cuvmm/cuda/sim"
	"github.com/stretchr/testify/require"
)

// aModel writes a file with a tensor of 4 KiB, one with a hostile name, and the digests of both.
func aModel(t *testing.T, digests string) string {
	t.Helper()
	header := `{"__metadata__":{"cuvmm.crc32c":"` + digests + `","format":"pt"},"w":{"dtype":"BF16","shape":[64,32],"data_offsets":[0,4096]},"\u001b[2J\n":{"dtype":"U8","shape":[4],"data_offsets":[4096,4100]}}`
	path := filepath.Join(t.TempDir(), "model.safetensors")
	file := append([]byte{byte(len(header)), byte(len(header) >> 8), 0, 0, 0, 0, 0, 0}, header...)
	require.NoError(t, os.WriteFile(path, append(file, make([]byte, 4100)...), 0o600))
	return path
}

const zeros = "98f94189" + "48674bc7" // of 4096 bytes, and of 4

func TestLoad(t *testing.T) {
	h, path := show(t, healthy()), aModel(t, zeros)
	var out, complaints bytes.Buffer
	require.Equal(t, exitOK, run([]string{"load", "-driver", "sim", path, path}, &out, &complaints, h), complaints.String())
	require.Contains(t, out.String(), path+": 2 tensors, ")
	require.Contains(t, out.String(), `"w"`)
	require.Contains(t, out.String(), `"\x1b[2J\n"`, "a name controls no terminal, and no line")
	require.NotContains(t, out.String(), "\x1b")
	require.Regexp(t, `bfloat16 +\[64 32\] +4 KiB +crc32c:98f94189`, out.String())
	require.Regexp(t, `loaded to device 0 at .* GB/s, again at .* GB/s; copying alone .* GB/s, reading alone .* GB/s`, out.String())

	out.Reset()
	require.Equal(t, exitOK, run([]string{"load", "-json", path}, &out, &complaints, h))
	var all []modelInfo
	require.NoError(t, json.Unmarshal(out.Bytes(), &all))
	require.Len(t, all, 1)
	require.Equal(t, 4100, all[0].Bytes)
	require.Equal(t, map[string]string{"format": "pt"}, all[0].Metadata)
	require.Equal(t, "crc32c:98f94189", all[0].Tensors[0].Digest)
	for _, rate := range []float64{all[0].Measured.Load, all[0].Measured.Again, all[0].Measured.Copy, all[0].Measured.Read} {
		require.Positive(t, rate)
	}

	out.Reset()
	require.Equal(t, exitOK, run([]string{"load", "-list", path}, &out, &complaints, h))
	require.NotContains(t, out.String(), "GB/s")
}

func TestLoadOfWhatCannotBeLoaded(t *testing.T) {
	h := show(t, healthy())
	for says, row := range map[string]struct {
		args []string
		code int
	}{
		"no files":        {[]string{"load"}, exitUsage},
		"-driver":         {[]string{"load", "-driver", "x", "y"}, exitUsage},
		"no such file":    {[]string{"load", filepath.Join(t.TempDir(), "absent")}, exitFailed},
		"digest mismatch": {[]string{"load", aModel(t, "0000000048674bc7")}, exitFailed},
		"device":          {[]string{"load", "-device", "9", aModel(t, zeros)}, exitFailed},
	} {
		var out, complaints bytes.Buffer
		require.Equal(t, row.code, run(row.args, &out, &complaints, h))
		require.Contains(t, complaints.String(), says)
	}
}

// A device that is full is no reason not to check the file.
func TestLoadOfMoreThanFits(t *testing.T) {
	h := show(t, healthy(), sim.Options{Devices: []sim.DeviceOptions{{Memory: 64 << 20}}})
	const header = `{"w":{"dtype":"U8","shape":[83886080],"data_offsets":[0,83886080]}}`
	path := filepath.Join(t.TempDir(), "model.safetensors")
	require.NoError(t, os.WriteFile(path, append([]byte{byte(len(header)), 0, 0, 0, 0, 0, 0, 0}, header...), 0o600))
	require.NoError(t, os.Truncate(path, int64(8+len(header)+80<<20)))
	var out, complaints bytes.Buffer
	require.Equal(t, exitOK, run([]string{"load", path}, &out, &complaints, h), complaints.String())
	require.Regexp(t, `device 0 has too little free memory; reading alone .* GB/s`, out.String())
}
