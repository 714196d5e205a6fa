package sim

import (
	"fmt"
	"slices"
	"strings"

	"github.com/cuvmm/cuvmm/internal/driver"
	"github.com/cuvmm/cuvmm/internal/errs"
)

// Options describes a machine. The zero value is one device with 16 GiB of
// memory under a driver for CUDA 13.0.
type Options struct {
	// Devices are the machine's devices, by ordinal. None means one device
	// with every default.
	Devices []DeviceOptions
	// Visible lists the ordinals of the devices that the process sees, in the
	// order in which it sees them, as CUDA_VISIBLE_DEVICES does. None means
	// all. The rest of the options count all devices.
	Visible []int
	// Folder makes the machine one that processes share: all that open it with
	// the same folder are on it. Its memory limits then hold for all of them
	// together, and memory counts as taken while any of them holds it, by
	// handle, by mapping, or by an exported descriptor that is open somewhere,
	// however a process ends. The first process makes the folder, if it is not
	// there, and fixes the Devices and HostMemory; one that opens it later with
	// others is refused. Memory that is exported lies in files of the folder
	// until no process holds it, so it best stands on a file system in memory, such
	// as /dev/shm; the next process that opens or inspects the machine clears away what a
	// killed one left there. The folder itself takes 9 MB, and exported memory its whole
	// size. It may be deleted when no process is on the machine. [Inspect] reports what is
	// taken. Linux only.
	//
	// The folder's group and permissions say which other users may take part. It
	// must belong to this process's user or to root, whose files are trusted, and
	// is refused if every user may write to it.
	Folder string
	// Fabric is the process's place on the fabric of its machine. Only with a
	// channel, and so with a Folder, it can share memory by fabric handles.
	Fabric Fabric
	// HostMemory limits, in bytes, what host-located and pinned memory can take
	// together. 0 means 64 GiB. Memory is only committed when it is touched.
	HostMemory int
	// MulticastRecommended is the granularity in bytes that the driver recommends
	// for multicast objects, a power of two. 0 means the least, which the devices'
	// Granularity decides.
	MulticastRecommended int
	// DriverVersion is what the driver says it is, as CUDA counts: 12020 is
	// 12.2. Entry points of later versions are missing. 0 means 13000.
	DriverVersion int
	// Seed decides the order in which work that no rule orders is run.
	Seed uint64
	// Poison makes fresh memory read PoisonByte instead of zero, and what a graph
	// allocates for itself at each launch: the driver promises neither. It commits
	// all memory that is created.
	Poison bool
	// Races makes the machine look for work that touches the same bytes of memory while
	// nothing orders it: [Machine.Races] lists the races, and [Machine.Close] returns them in
	// its error. It costs time and memory for each piece of work.
	Races bool
	// ReuseAddresses hands out addresses that were just freed at once, where
	// they fit. Otherwise they are reused last.
	ReuseAddresses bool
}

// DeviceOptions describes a device.
type DeviceOptions struct {
	// Name is the device's name; "" means "Software GPU".
	Name string
	// UUID identifies the device to other processes, which import memory only
	// on a device of theirs with the same UUID. The zero value means one that
	// depends on the ordinal alone, so that processes with the same options
	// agree.
	UUID [16]byte
	// Memory is the size of its memory in bytes; 0 means 16 GiB. It is a
	// limit: the system's memory is only committed when it is touched.
	Memory int
	// ContextMemory is what each context takes of it. A real device takes
	// half a GiB; here the default is 0.
	ContextMemory int
	// Granularity is the unit in bytes of memory and of mappings, a power of
	// two; 0 means 2 MiB.
	Granularity int
	// Unreachable lists the ordinals of the devices whose memory this one
	// cannot reach. It reaches all others.
	Unreachable []int
	// Attributes overrides device attributes, by CUDA's number.
	Attributes map[int]int
}

// OlderDriver describes a machine with one device under a driver of the given
// version, as CUDA counts, which lacks all later entry points: 11020 is 11.2.
func OlderDriver(version int) Options { return Options{DriverVersion: version} }

// WithoutDescriptors describes a machine with one device that cannot share
// memory by descriptor.
func WithoutDescriptors() Options {
	return Options{Devices: []DeviceOptions{{Attributes: map[int]int{int(driver.AttrHandlePosixFD): 0}}}}
}

// WithoutConcurrentManagedAccess describes a machine with one device that cannot
// fault: the CPU must not touch managed memory while the device works, all of it
// lies on the device, and it is neither advised nor prefetched.
func WithoutConcurrentManagedAccess() Options {
	return Options{Devices: []DeviceOptions{{Attributes: map[int]int{int(driver.AttrConcurrentManagedAccess): 0}}}}
}

// WithGranularity describes a machine with one device whose memory comes in
// units of the given size.
func WithGranularity(bytes int) Options {
	return Options{Devices: []DeviceOptions{{Granularity: bytes}}}
}

// WithMulticast describes a machine with so many devices that have multicast and
// reach each other's memory.
func WithMulticast(devices int) Options {
	o := Options{Devices: make([]DeviceOptions, devices)}
	for i := range o.Devices {
		o.Devices[i].Attributes = map[int]int{int(driver.AttrMulticast): 1}
	}
	return o
}

func (o Options) withDefaults() Options {
	if len(o.Devices) == 0 {
		o.Devices = []DeviceOptions{{}}
	}
	o.Devices = append([]DeviceOptions(nil), o.Devices...)
	for i := range o.Devices {
		d := &o.Devices[i]
		if d.Name == "" {
			d.Name = "Software GPU"
		}
		if d.UUID == [16]byte{} {
			copy(d.UUID[:], fmt.Sprintf("cuvmm-sim-gpu%03d", i))
		}
		if d.Memory == 0 {
			d.Memory = 16 << 30
		}
		if d.Granularity == 0 {
			d.Granularity = 2 << 20
		}
	}
	if o.HostMemory == 0 {
		o.HostMemory = 64 << 30
	}
	if o.DriverVersion == 0 {
		o.DriverVersion = 13000
	}
	return o
}

// wrong returns the error of refused options; the remedy follows the semicolon.
func wrong(format string, args ...any) error {
	asked, hint, _ := strings.Cut(fmt.Sprintf(format, args...), "; ")
	return errs.Invalid("sim.New", asked, hint)
}

func (o Options) check() error {
	if o.HostMemory < leastMemory || o.HostMemory > mostMemory {
		return wrong("Options.HostMemory is %s; it must be from %d to %d", errs.Count(o.HostMemory, "byte"), leastMemory, mostMemory)
	}
	if r := o.MulticastRecommended; r < 0 || r&(r-1) != 0 || r > maxGranularity {
		return wrong("Options.MulticastRecommended is %d; it must be a power of two up to %d", r, maxGranularity)
	}
	if o.DriverVersion < 1000 || o.DriverVersion >= 100_000 {
		return wrong("Options.DriverVersion is %d; count as CUDA does: 13.0 is 13000", o.DriverVersion)
	}
	for i, v := range o.Visible {
		if v < 0 || v >= len(o.Devices) || slices.Contains(o.Visible[:i], v) {
			return wrong("Visible lists device %d; list each of the %d devices at most once", v, len(o.Devices))
		}
	}
	if o.Fabric.open() && o.Folder == "" {
		return wrong("Options.Fabric has channels, but there is no Folder; processes share a fabric on one machine only")
	}
	seen := map[[16]byte]int{}
	for i, d := range o.Devices {
		switch {
		case d.Granularity&(d.Granularity-1) != 0 || d.Granularity < minGranularity || d.Granularity > maxGranularity:
			return wrong("device %d has Granularity %d; it must be a power of two from %d to %d",
				i, d.Granularity, minGranularity, maxGranularity)
		case d.Memory < leastMemory || d.Memory > mostMemory:
			return wrong("device %d has %s of Memory; it must be from %d to %d",
				i, errs.Count(d.Memory, "byte"), leastMemory, mostMemory)
		case d.ContextMemory < 0 || d.ContextMemory >= d.Memory:
			return wrong("device %d has %s of ContextMemory; it must be from 0 to less than its Memory, %d", i, errs.Count(d.ContextMemory, "byte"), d.Memory)
		}
		if j, ok := seen[d.UUID]; ok {
			return wrong("devices %d and %d have the same UUID %x; leave it out, or give each its own", j, i, d.UUID)
		}
		seen[d.UUID] = i
		for _, peer := range d.Unreachable {
			if peer < 0 || peer >= len(o.Devices) || peer == i {
				return wrong("device %d lists device %d as Unreachable; that must be another of the %d devices", i, peer, len(o.Devices))
			}
		}
	}
	return nil
}

// visible leaves the devices that the process sees, each under the ordinal by
// which it sees it. The options were checked.
func (o Options) visible() Options {
	if len(o.Visible) == 0 {
		return o
	}
	seen := make([]DeviceOptions, len(o.Visible))
	for i, ordinal := range o.Visible {
		seen[i] = o.Devices[ordinal]
		seen[i].Unreachable = nil
		for _, peer := range o.Devices[ordinal].Unreachable {
			if at := slices.Index(o.Visible, peer); at >= 0 {
				seen[i].Unreachable = append(seen[i].Unreachable, at)
			}
		}
	}
	o.Devices = seen
	return o
}

const (
	minGranularity = 64 << 10
	maxGranularity = 1 << 30
	leastMemory    = 64 << 10
	mostMemory     = 1 << 40
)
