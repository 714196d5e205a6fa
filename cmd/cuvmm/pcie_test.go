package main

import (
	"encoding/binary"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/cuvmm/cuvmm/cuda/sim"
	"github.com/stretchr/testify/require"
)

// port is the configuration of a port: another capability, and behind it ACS with a control word.
func port(control uint16) string {
	config := make([]byte, 0x200)
	binary.LittleEndian.PutUint32(config[0x100:], 0x0001|1<<16|0x140<<20)
	binary.LittleEndian.PutUint32(config[0x140:], 0x000d|1<<16)
	binary.LittleEndian.PutUint16(config[0x146:], control)
	return string(config)
}

func TestRedirects(t *testing.T) {
	const validation, request, completion, forwarding = 1, 1 << 2, 1 << 3, 1 << 4
	for control, want := range map[uint16]bool{0: false, validation | forwarding: false, request: true, completion: true, validation | request | completion | forwarding: true} {
		require.Equal(t, want, redirects([]byte(port(control))), "%#x", control)
	}
	full := port(request)
	for n := range len(full) { // what is cut, as for a process that is not root, is no port that redirects
		require.Equal(t, n >= 0x148, redirects([]byte(full[:n])), n)
	}
	endless := []byte(full)
	binary.LittleEndian.PutUint32(endless[0x100:], 0x0001|0x100<<20)
	require.False(t, redirects(endless))
}

// Two GPUs are behind a switch, whose ports may redirect, and a third is behind another root port.
func TestWhatIsBetweenDevices(t *testing.T) {
	const root = "sys/devices/pci0000:00/"
	const up, first, second = root + "0000:00:01.0/", root + "0000:00:01.0/0000:10:00.0/0000:11:00.0/", root + "0000:00:01.0/0000:10:00.0/0000:11:01.0/"
	gpus := []string{first + "0000:01:00.0", second + "0000:02:00.0", root + "0000:00:02.0/0000:03:00.0"}
	const redirect, free = 1<<2 | 1<<3, 0
	for _, c := range []struct {
		name        string
		files       files
		unreachable bool
		severity    severity
		want, not   string
	}{
		{"nothing diverts", files{first + "config": port(free), second + "config": port(free)}, false, fine, "each of the 3 devices can access the others", "ACS"},
		{"a port above both is not in the way", files{up + "config": port(redirect)}, false, note, "device 2: access control services (ACS) of port 0000:00:01.0 redirect", "device 1"},
		{"a port redirects", files{second + "config": port(redirect)}, false, note, "device 1: access control services (ACS) of port 0000:11:01.0 redirect", "0000:11:00.0"},
		{"an IOMMU translates", files{gpus[1] + "/iommu_group/type": "DMA-FQ\n"}, false, note, "the IOMMU translates what 0000:02:00.0 accesses (DMA-FQ)", "of port"},
		{"an IOMMU passes", files{gpus[1] + "/iommu_group/type": "identity\n"}, false, fine, "each of the 3 devices", "IOMMU"},
		{"a device of another vendor", files{gpus[1] + "/iommu_group/type": "DMA\n", gpus[1] + "/vendor": "0x8086\n"}, false, fine, "each of the 3 devices", "IOMMU"},
		{"no access", files{first + "config": port(redirect)}, true, warning, "port 0000:11:00.0 redirect; drivers for CUDA 13.5", "0000:11:01.0"},
	} {
		t.Run(c.name, func(t *testing.T) {
			all := healthy()
			for _, gpu := range gpus {
				all.with(gpu+"/vendor", "0x10de\n")
			}
			for name, text := range c.files {
				all.with(name, text)
			}
			o := sim.Options{Devices: make([]sim.DeviceOptions, 3)}
			if c.unreachable {
				o.Devices[0].Unreachable = []int{1}
			}
			h := show(t, all, o)
			bus := h.path("sys/bus/pci/devices")
			require.NoError(t, os.MkdirAll(bus, 0o700))
			require.NoError(t, filepath.WalkDir(h.path(root), func(path string, d os.DirEntry, err error) error {
				if err == nil && pciFunction.MatchString(d.Name()) {
					err = os.Symlink(path, filepath.Join(bus, d.Name()))
				}
				return err
			}))
			var text []string
			var peers []finding
			for _, f := range driverFindings(h, "") {
				if f.Check == "peers" {
					text, peers = append(text, f.Seen+" "+f.Remedy), append(peers, f)
				}
			}
			require.Equal(t, c.severity, worst(peers))
			require.Contains(t, strings.Join(text, "\n"), c.want)
			require.NotContains(t, strings.Join(text, "\n"), c.not)
		})
	}
}
