package sim

import (
	"encoding/json"
	"fmt"
	"strings"

	"github.com/cuvmm/cuvmm/internal/ledger"
)

// Usage is what is taken of a machine that processes share, at one instant.
type Usage struct {
	// Devices are all devices of the machine, by ordinal.
	Devices []DeviceUsage
	// HostMemory is the machine's host memory, and HostTaken what is taken of
	// it, in bytes.
	HostMemory, HostTaken int
	// Processes are those on the machine. One that opened it several times
	// stands here as often.
	Processes []ProcessUsage
	// Exported is all memory that was exported and is held.
	Exported []ExportedMemory
}

// DeviceUsage is what is taken of a device's memory, in bytes.
type DeviceUsage struct {
	Name          string
	UUID          [16]byte
	Memory, Taken int
}

// ProcessUsage is what a process on the machine holds.
type ProcessUsage struct {
	PID int
	// Own is the memory that it never exported, by device, in bytes, and
	// OwnHost that on the host: it goes with the process.
	Own     []int
	OwnHost int
	// Exports and Imports count the exported memory that it holds: of its own
	// making, and of others'.
	Exports, Imports int
}

// ExportedMemory is a piece of memory that was exported, and so outlives its
// maker where others hold it.
type ExportedMemory struct {
	// Device is the ordinal of its device, -1 for host memory.
	Device int
	// Size is in bytes; 0 for a multicast object.
	Size int
	// Maker is the process that made it, 0 if that is no longer on the machine.
	Maker int
	// Holders are the processes that hold it, by a handle or a mapping.
	Holders []int
	// Open: a descriptor of it is open, in any process or in a socket's queue.
	Open bool
}

// Inspect reports what is taken of the machine in a folder, and by which process. It takes
// no part in the machine, so any process may call it that may read and write the
// folder, while other processes use the machine.
func Inspect(folder string) (Usage, error) {
	var u Usage
	books, err := ledger.Read(folder)
	if err != nil {
		return u, fmt.Errorf("sim: the machine in folder %s: %w", folder, err)
	}
	defer func() { _ = books.Close() }()
	var there hardware
	if err := json.Unmarshal(books.Description(), &there); err != nil {
		return u, fmt.Errorf("sim: the machine in folder %s: its description: %w", folder, err)
	}
	now := books.Usage()
	host := len(there.Devices)
	if len(now.Taken) != host+1 {
		return u, fmt.Errorf("sim: the machine in folder %s: its description and its books differ", folder)
	}
	for i, d := range there.Devices {
		u.Devices = append(u.Devices, DeviceUsage{d.Name, d.UUID, now.Limits[i], now.Taken[i]})
	}
	u.HostMemory, u.HostTaken = now.Limits[host], now.Taken[host]
	pids := map[uint64]int{}
	for _, h := range now.Holders {
		pids[h.Serial] = h.PID
		p := ProcessUsage{PID: h.PID, Own: h.Own[:host], OwnHost: h.Own[host]}
		for _, mem := range now.Memories {
			for _, by := range mem.Held {
				switch {
				case by != h.Serial:
				case mem.Maker == by:
					p.Exports++
				default:
					p.Imports++
				}
			}
		}
		u.Processes = append(u.Processes, p)
	}
	for _, mem := range now.Memories {
		e := ExportedMemory{Device: mem.Pool, Size: mem.Size, Maker: pids[mem.Maker], Open: mem.Open}
		if mem.Pool == host {
			e.Device = -1
		}
		for _, by := range mem.Held {
			e.Holders = append(e.Holders, pids[by])
		}
		u.Exported = append(u.Exported, e)
	}
	return u, nil
}

// String is a line for each device, process and piece of exported memory.
func (u Usage) String() string {
	var b strings.Builder
	for i, d := range u.Devices {
		fmt.Fprintf(&b, "device %d (%s): %d of %d bytes are taken\n", i, d.Name, d.Taken, d.Memory)
	}
	fmt.Fprintf(&b, "host: %d of %d bytes are taken\n", u.HostTaken, u.HostMemory)
	for _, p := range u.Processes {
		fmt.Fprintf(&b, "process %d: %d bytes of its own by device, %d on the host; holds %d exported, %d imported\n",
			p.PID, p.Own, p.OwnHost, p.Exports, p.Imports)
	}
	for _, e := range u.Exported {
		where := fmt.Sprintf("on device %d", e.Device)
		if e.Device < 0 {
			where = "on the host"
		}
		fmt.Fprintf(&b, "%d bytes %s, made by process %d, held by %d, descriptors open: %v\n", e.Size, where, e.Maker, e.Holders, e.Open)
	}
	return b.String()
}
