package main

import (
	"errors"
	"flag"
	"fmt"
	"io"
	"slices"
	"time"

	"github.com/cuvmm/cuvmm/cuda"
	"github.com/cuvmm/cuvmm/vmm"
)

const infoUsage = `usage: cuvmm info [flags]

Describes the driver and its devices, and measures what the calls of virtual memory
cost here. It takes a second or two for each device.

Flags:
`

// deviceInfo describes a device.
type deviceInfo struct {
	Ordinal      int               `json:"ordinal"`
	Name         string            `json:"name"`
	UUID         string            `json:"uuid"`
	Memory       int               `json:"memory"` // bytes
	Free         int               `json:"free"`   // bytes
	Capabilities cuda.Capabilities `json:"capabilities"`
	Costs        []cost            `json:"costs"`
}

// cost has the median times of the calls on memory of one size, in microseconds.
type cost struct {
	Bytes   int     `json:"bytes"`
	Create  float64 `json:"create_us"`
	Reserve float64 `json:"reserve_us"`
	Map     float64 `json:"map_us"`
	Access  float64 `json:"access_us"`
	Unmap   float64 `json:"unmap_us"` // includes the wait for the GPU
	Release float64 `json:"release_us"`
}

func info(f *flag.FlagSet) func(args []string, out io.Writer, h host) (int, error) {
	asJSON := f.Bool("json", false, "print JSON")
	driver := driverFlag(f)
	return func(_ []string, out io.Writer, h host) (int, error) {
		if err := checkChoice(*driver); err != nil {
			return exitUsage, err
		}
		about, err := describeAll(h, *driver)
		if err != nil {
			return exitFailed, fmt.Errorf("%w (cuvmm doctor says more)", err)
		}
		if *asJSON {
			if err := writeJSON(out, about); err != nil {
				return exitFailed, err
			}
			return exitOK, nil
		}
		fmt.Fprintln(plain{out}, about.Driver)
		for _, i := range about.Devices {
			i.write(plain{out})
		}
		return exitOK, nil
	}
}

// driverInfo describes the driver and its devices.
type driverInfo struct {
	Driver  string       `json:"driver"`
	Devices []deviceInfo `json:"devices"`
}

func describeAll(h host, driver string) (about driverInfo, err error) {
	h.progress.step("opening the driver")
	defer h.progress.end()
	sys, err := h.open(driver)
	if err != nil {
		return about, err
	}
	defer func() { err = errors.Join(err, sys.Close()) }()
	about.Driver = sys.Driver().String()
	for _, d := range sys.Devices() {
		h.progress.step("measuring device %d of %d", d.Ordinal()+1, len(sys.Devices()))
		i, err := describe(d)
		if err != nil {
			return about, err
		}
		about.Devices = append(about.Devices, i)
	}
	return about, nil
}

func describe(d *cuda.Device) (deviceInfo, error) {
	i := deviceInfo{Ordinal: d.Ordinal(), Name: d.Name(), UUID: d.UUID().String()}
	var err error
	if i.Capabilities, err = d.Capabilities(); err != nil {
		return i, err
	}
	if i.Free, i.Memory, err = d.MemoryInfo(); err != nil {
		return i, err
	}
	granule, err := vmm.GranularityOf(d, vmm.Properties{})
	if err != nil {
		return i, err
	}
	for _, bytes := range []int{granule, 16 * granule, 128 * granule} {
		if bytes > i.Free/4 {
			break
		}
		c, err := costOf(d, bytes)
		if err != nil {
			return i, err
		}
		i.Costs = append(i.Costs, c)
	}
	return i, nil
}

// costOf measures the calls on memory of a size, for at most a quarter of a second.
func costOf(d *cuda.Device, bytes int) (cost, error) {
	const rounds = 31
	var create, reserve, mapped, access, unmap, release []float64
	end := time.Now().Add(250 * time.Millisecond)
	for i := 0; i < rounds && (i < 3 || time.Now().Before(end)); i++ {
		var last time.Time
		lap := func(to *[]float64) {
			now := time.Now()
			*to = append(*to, now.Sub(last).Seconds()*1e6)
			last = now
		}
		last = time.Now()
		m, err := vmm.Create(d, bytes, vmm.Properties{})
		if err != nil {
			return cost{}, err
		}
		lap(&create)
		r, err := vmm.Reserve(d, bytes, vmm.ReserveOptions{})
		if err != nil {
			return cost{}, errors.Join(err, m.Close())
		}
		lap(&reserve)
		mapping, err := r.Map(0, m)
		if err != nil {
			return cost{}, errors.Join(err, r.Close(), m.Close())
		}
		lap(&mapped)
		err = mapping.SetAccess(vmm.Access{Location: d.Location(), Mode: vmm.ReadWrite})
		lap(&access)
		err = errors.Join(err, mapping.Close())
		lap(&unmap)
		err = errors.Join(err, r.Close())
		last = time.Now()
		err = errors.Join(err, m.Close())
		lap(&release)
		if err != nil {
			return cost{}, err
		}
	}
	return cost{bytes, median(create), median(reserve), median(mapped), median(access), median(unmap), median(release)}, nil
}

func median(all []float64) float64 {
	slices.Sort(all)
	return all[len(all)/2]
}

func (i deviceInfo) write(out io.Writer) {
	c := i.Capabilities
	fmt.Fprintf(out, "\ndevice %d: %s\n", i.Ordinal, i.Name)
	line := func(name, format string, args ...any) {
		fmt.Fprintf(out, "  %-26s "+format+"\n", append([]any{name}, args...)...)
	}
	line("UUID", "%s", i.UUID)
	line("memory", "%s, of which %s are free", size(i.Memory), size(i.Free))
	line("compute capability", "%d.%d", c.ComputeMajor, c.ComputeMinor)
	line("granularity", "%s, recommended %s", size(c.MinimumGranularity), size(c.RecommendedGranularity))
	for _, has := range []struct {
		name string
		yes  bool
	}{
		{"virtual memory", c.VirtualMemory}, {"descriptors", c.PosixFD}, {"fabric handles", c.Fabric}, {"compression", c.Compression},
		{"RDMA", c.RDMA}, {"DMA-BUF", c.DMABuf}, {"multicast", c.Multicast}, {"managed memory", c.ManagedMemory},
		{"concurrent managed access", c.ConcurrentManagedAccess}, {"pageable memory access", c.PageableMemoryAccess},
		{"host virtual memory", c.HostVirtualMemory || c.HostNUMAVirtualMemory},
	} {
		word := "no"
		if has.yes {
			word = "yes"
		}
		line(has.name, "%s", word)
	}
	fmt.Fprintln(out, "  (what the device has; cuvmm doctor tries what works here)")
	fmt.Fprintf(out, "\n  %10s %10s %10s %10s %10s %10s %10s   (medians, µs)\n", "MiB", "create", "reserve", "map", "access", "unmap", "release")
	for _, k := range i.Costs {
		fmt.Fprintf(out, "  %10.2f %10.1f %10.1f %10.1f %10.1f %10.1f %10.1f\n", float64(k.Bytes)/(1<<20), k.Create, k.Reserve, k.Map, k.Access, k.Unmap, k.Release)
	}
}
