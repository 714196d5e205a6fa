package vmm

import (
	"slices"

	"github.com/cuvmm/cuvmm/internal/driver"
	"github.com/cuvmm/cuvmm/internal/suspend"
)

// Outside is what is taken of a device's memory at the time of the Report, in bytes: a GPU is not
// empty when memory of this library is suspended.
type Outside struct {
	// Device is the ordinal.
	Device int
	// Total and Free are the device's, as the driver counts them for all processes.
	Total, Free int
	// Own is what this System has of it: memory that stayed, or was not named.
	Own int
	// Pool is what the device's default memory pool has in this process, of which PoolUsed is in
	// use: other libraries allocate from it in stream order. SuspendOptions.TrimPools gives back
	// what is not in use. Both are 0 if the driver has no such pools.
	Pool, PoolUsed int
	// Rest is everything else: contexts and their modules, other libraries' memory, graphs, and
	// other processes, which cuvmm top lists.
	Rest int
}

// outsideOf measures the devices of members. One that cannot be asked is left out.
func outsideOf(members []suspend.Held) (all []Outside) {
	for _, h := range members {
		m, d := h.Member, h.Member.Device()
		if slices.ContainsFunc(all, func(o Outside) bool { return o.Device == d.Ordinal() }) {
			continue
		}
		free, total, err := d.MemoryInfo()
		if err != nil {
			continue
		}
		in := driver.Device(d.Ordinal())
		o := Outside{Device: d.Ordinal(), Total: total, Free: free, Own: int(m.System().Own(in))}
		o.Pool, o.PoolUsed = defaultPool(m.System().Drv, in)
		o.Rest = max(total-free-o.Own-o.Pool, 0)
		all = append(all, o)
	}
	return all
}

// defaultPool returns what a device's default memory pool has, and what of that is in use.
func defaultPool(drv driver.Driver, d driver.Device) (reserved, used int) {
	pool, r := drv.DeviceGetDefaultMemPool(d)
	if r != driver.Success {
		return 0, 0
	}
	of := func(a driver.MemPoolAttribute) int {
		n, r := drv.MemPoolGetAttribute(pool, a)
		if r != driver.Success {
			return 0
		}
		return int(n)
	}
	return of(driver.MemPoolReserved), of(driver.MemPoolUsed)
}

// trimPools gives back what the default memory pools of the memory's devices do not use. What the
// driver refuses is seen in the Report.
func trimPools(memory []Memory) {
	for _, named := range memory {
		m := suspend.Of(named)
		drv := m.System().Drv
		if pool, r := drv.DeviceGetDefaultMemPool(driver.Device(m.Device().Ordinal())); r == driver.Success {
			_ = drv.MemPoolTrimTo(pool, 0)
		}
	}
}
