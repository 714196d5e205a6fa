// Package limits reads how much memory this process may take: of the host, from its
// control groups and the kernel's estimate, and of devices, from their control groups.
// It is the one reader of these files.
//
// A process is in one control group of each hierarchy, and bound by every ancestor of
// it. A container sees only a part of them: its namespace may hide the upper ones, and the
// hierarchy may be mounted from one of its groups on. So the package reads all groups
// that are visible, from that of the process up to the mount, in version 1 and 2.
package limits

import (
	"fmt"
	"io/fs"
	"os"
	"strings"

	"github.com/cuvmm/cuvmm/internal/errs"
)

// Limit is a bound on memory.
type Limit struct {
	// File is the absolute path of the file that sets it.
	File string
	// Group is the control group of the file, "" of the machine as a whole.
	Group string
	// Bytes is the bound. Used is what counts towards it and cannot be reclaimed: of a
	// control group its memory without the cached pages of files.
	Bytes, Used uint64
}

// Remaining returns how much can be taken before the limit is reached.
func (l Limit) Remaining() uint64 { return l.Bytes - min(l.Used, l.Bytes) }

// String returns what remains of what, and the file that says so.
func (l Limit) String() string {
	return fmt.Sprintf("%s of %s remain (%s)", errs.Bytes(l.Remaining()), errs.Bytes(l.Bytes), l.File)
}

// Host is what bounds the host memory of the process. It is empty where nothing is known.
type Host []Limit

// Tightest returns the limit with the least remaining.
func (h Host) Tightest() (Limit, bool) { return least(h, Limit.Remaining) }

// Lowest returns the limit with the fewest bytes, used or not.
func (h Host) Lowest() (Limit, bool) { return least(h, func(l Limit) uint64 { return l.Bytes }) }

func least(all []Limit, by func(Limit) uint64) (found Limit, ok bool) {
	for _, l := range all {
		if !ok || by(l) < by(found) {
			found, ok = l, true
		}
	}
	return found, ok
}

// Check returns an *Exceeded if less than that many bytes remain.
func (h Host) Check(bytes uint64) error {
	if l, ok := h.Tightest(); ok && bytes > l.Remaining() {
		return &Exceeded{Asked: bytes, Limit: l}
	}
	return nil
}

// Exceeded is the error of a request for more memory than remains.
type Exceeded struct {
	Asked uint64
	Limit Limit
}

func (e *Exceeded) Error() string {
	return fmt.Sprintf("%s of host memory, and %v", errs.Bytes(e.Asked), e.Limit)
}

// Remedy says what to do about it.
func (e *Exceeded) Remedy() string {
	if e.Limit.Group == "" {
		return "ask for less, or end what else takes memory on this machine"
	}
	return "ask for less, or raise the limit of the control group (memory.max; --memory of a container; MemoryMax of a service)"
}

// machine is the file system that the package reads.
var machine = os.DirFS("/")

// OfHost reads what bounds the host memory of this process. A file that cannot be read or
// understood leaves its limit unknown: the error names it, and the others are returned.
func OfHost() (Host, error) { return ReadHost(machine) }

// OfDevices reads what bounds the device memory of this process, by the names of the
// kernel's memory regions (drm/0000:03:00.0/vram0), each the limit with the least remaining.
// Errors are as those of OfHost. It is empty without the dmem controller, which kernels have
// from 6.14 on and whose regions the driver of the device has to register.
func OfDevices() (map[string]Limit, error) { return ReadDevices(machine) }

// OfPCI returns the limit with the least remaining among those of OfDevices on the memory of the
// device at an address of the PCI bus.
func OfPCI(regions map[string]Limit, domain, bus, device int) (found Limit, ok bool) {
	prefix := fmt.Sprintf("drm/%04x:%02x:%02x.", domain, bus, device)
	var own []Limit
	for region, l := range regions {
		if strings.HasPrefix(region, prefix) {
			own = append(own, l)
		}
	}
	return least(own, Limit.Remaining)
}

// ReadHost is OfHost for a machine whose root is given.
func ReadHost(root fs.FS) (Host, error) {
	r := reader{root: root}
	h := Host(r.available())
	for _, g := range r.groups() {
		h = append(h, r.hostLimits(g)...)
	}
	return h, r.err()
}

// ReadDevices is OfDevices for a machine whose root is given.
func ReadDevices(root fs.FS) (map[string]Limit, error) {
	r := reader{root: root}
	regions := map[string]Limit{}
	for _, g := range r.groups() {
		for region, l := range r.deviceLimits(g) {
			if known, ok := regions[region]; !ok || l.Remaining() < known.Remaining() {
				regions[region] = l
			}
		}
	}
	return regions, r.err()
}
