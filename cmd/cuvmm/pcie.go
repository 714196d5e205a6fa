package main

import (
	"encoding/binary"
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"

	"github.com/cuvmm/cuvmm/cuda"
	"github.com/cuvmm/cuvmm/internal/driver"
)

// uncheckedPeers is the setting with which the driver does not ask whether IOMMU and ACS let
// devices reach each other over PCIe. Drivers for CUDA 13.5 and later ask.
const uncheckedPeers = "CUDA_DISABLE_IOMMU_ACS_P2P_CAPABILITY_CHECK"

// betweenDevices returns what diverts accesses between two devices over PCIe, as far as sysfs
// shows it: an IOMMU that translates, and ports that send accesses between their neighbors to
// the root (ACS). The latter takes root to see.
func betweenDevices(h host, a, b *cuda.Device) (all []string) {
	from, to := pciPath(h, a), pciPath(h, b)
	shared := 0
	for shared < min(len(from), len(to))-1 && from[shared] == to[shared] {
		shared++
	}
	for _, path := range [][]string{from, to} {
		for i, function := range path {
			switch last := i == len(path)-1; {
			case last:
				if kind := h.text(pciDevice(function) + "/iommu_group/type"); strings.HasPrefix(kind, "DMA") {
					all = append(all, fmt.Sprintf("the IOMMU translates what %s accesses (%s)", function, kind))
				}
			case i >= shared:
				config, err := os.ReadFile(h.path(pciDevice(function) + "/config"))
				if err == nil && redirects(config) {
					all = append(all, fmt.Sprintf("access control services (ACS) of port %s redirect", function))
				}
			}
		}
	}
	return all
}

func pciDevice(function string) string { return "sys/bus/pci/devices/" + function }

var pciFunction = regexp.MustCompile(`^[0-9a-f]{4,}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]$`)

// pciPath returns the ports above a device from the root on, and the device behind them, or
// nothing if sysfs has no NVIDIA device at its address.
func pciPath(h host, d *cuda.Device) (path []string) {
	var at [3]int
	for i, a := range []driver.DeviceAttribute{driver.AttrPCIDomainID, driver.AttrPCIBusID, driver.AttrPCIDeviceID} {
		var err error
		if at[i], err = d.Attribute(int(a)); err != nil {
			return nil
		}
	}
	device := pciDevice(fmt.Sprintf("%04x:%02x:%02x.0", at[0], at[1], at[2]))
	folder, err := filepath.EvalSymlinks(h.path(device))
	if err != nil || h.text(device+"/vendor") != "0x10de" {
		return nil
	}
	all := strings.Split(filepath.ToSlash(folder), "/")
	return slices.DeleteFunc(all, func(part string) bool { return !pciFunction.MatchString(part) })
}

// redirects reports whether a port's configuration has ACS redirect requests or completions.
func redirects(config []byte) bool {
	const first, acs, control, redirect = 0x100, 0x000d, 6, 1<<2 | 1<<3
	at := first
	for range len(config) / 8 { // a list that does not end is broken
		if at < first || at+8 > len(config) {
			break
		}
		header := binary.LittleEndian.Uint32(config[at:])
		if header&0xffff == acs {
			return binary.LittleEndian.Uint16(config[at+control:])&redirect != 0
		}
		at = int(header >> 20)
	}
	return false
}
