package drivertest

import (
	"slices"

	"github.com/cuvmm/cuvmm/internal/driver"
)

var (
	managedMemory = attribute("managed memory", driver.AttrManagedMemory)
	// concurrentAccess is required of all devices, because the batch calls require it.
	concurrentAccess = Need{"concurrent managed access (device attribute 89)", func(s *suite) bool {
		return s.attribute(driver.AttrManagedMemory) && !slices.ContainsFunc(s.devices, func(d device) bool {
			v, r := s.D.DeviceGetAttribute(driver.AttrConcurrentManagedAccess, d.Device)
			return r != driver.Success || v == 0
		})
	}}
	noConcurrentAccess = Need{"a device without concurrent managed access (device attribute 89)", func(s *suite) bool {
		return s.attribute(driver.AttrManagedMemory) && !s.attribute(driver.AttrConcurrentManagedAccess)
	}}
	locationForms = entryPoints(driver.CallMemAdvise, driver.CallMemPrefetchAsync)
	ordinalForms  = entryPoints(driver.CallMemAdviseV1, driver.CallMemPrefetchAsyncV1)
	batches       = entryPoints(driver.CallMemPrefetchBatchAsync, driver.CallMemDiscardBatchAsync, driver.CallMemDiscardAndPrefetchBatchAsync)
)

// locates is required of the software driver alone: the real one is not asked (driver.Locator).
var locates = Need{"cuMemGetLocationInfo, which is called on the software driver alone", func(s *suite) bool {
	l, ok := s.D.(driver.Locator)
	return ok && l.MemGetLocationInfo(0, 0, 0, 0, nil) != driver.MissingEntryPoint
}}

const mib = 1 << 20

var (
	theHost     = driver.Location{Type: driver.LocationHost}
	nodeZero    = driver.Location{Type: driver.LocationHostNUMA}
	currentNode = driver.Location{Type: driver.LocationHostNUMACurrent}
)

// managedRules are the rules of locations and advice.
var managedRules = []Case{
	{
		Name:  "preferred location: a device, HOST_NUMA, HOST_NUMA_CURRENT",
		Says:  "success",
		Needs: needs(concurrentAccess, locationForms),
		Run: func(t *T) {
			p := t.managed(2 * mib)
			for _, l := range []driver.Location{deviceLocation(t.Device), nodeZero, currentNode} {
				t.ok(t.D.MemAdvise(t.ctx, p, 2*mib, driver.AdviseSetPreferredLocation, l), "preferred location %+v", l)
			}
		},
	},
	{
		Name:  "preferred location: a device behind the last one",
		Says:  "INVALID_VALUE",
		Needs: needs(concurrentAccess, locationForms),
		Run: func(t *T) {
			p := t.managed(2 * mib)
			t.returns(driver.InvalidValue, t.D.MemAdvise(t.ctx, p, 2*mib, driver.AdviseSetPreferredLocation, t.absentDevice()), "an absent device")
		},
	},
	{
		Name:  "accessed-by: HOST, a device",
		Says:  "success",
		Needs: needs(concurrentAccess),
		Run: func(t *T) {
			p := t.managed(2 * mib)
			for _, l := range []driver.Location{theHost, deviceLocation(t.Device)} {
				t.ok(t.advise(p, 2*mib, driver.AdviseSetAccessedBy, l), "accessed-by %+v", l)
				t.ok(t.advise(p, 2*mib, driver.AdviseUnsetAccessedBy, l), "no longer accessed-by %+v", l)
			}
		},
	},
	{
		Name:  "accessed-by: HOST_NUMA",
		Says:  "INVALID_VALUE",
		Needs: needs(concurrentAccess, locationForms),
		Run: func(t *T) {
			p := t.managed(2 * mib)
			t.returns(driver.InvalidValue, t.D.MemAdvise(t.ctx, p, 2*mib, driver.AdviseSetAccessedBy, nodeZero), "accessed-by a node")
		},
	},
	{
		Name:  "advice that goes past the end of the allocation",
		Says:  "INVALID_VALUE",
		Needs: needs(concurrentAccess),
		Run: func(t *T) {
			p := t.managed(2 * mib)
			t.returns(driver.InvalidValue, t.advise(p, 64*mib, driver.AdviseSetReadMostly, theHost), "32 times the allocation")
			t.returns(driver.InvalidValue, t.advise(p+mib, 2*mib, driver.AdviseSetReadMostly, theHost), "1 MiB past its end")
		},
	},
	{
		Name:  "advice for, or prefetch of, memory that is not managed",
		Says:  "INVALID_VALUE",
		Needs: needs(concurrentAccess),
		Run: func(t *T) {
			p, _ := t.memory(t.chunk)
			for _, p := range []driver.Ptr{p, t.scratch} {
				t.returns(driver.InvalidValue, t.advise(p, 4096, driver.AdviseSetReadMostly, theHost), "advice")
				t.returns(driver.InvalidValue, t.prefetch(p, 4096, theHost, t.stream), "prefetch")
			}
		},
	},
	{
		Name:  "batch prefetch with one location for all ranges, or one for each",
		Says:  "success",
		Needs: needs(concurrentAccess, batches),
		Run: func(t *T) {
			p, sizes := t.threeRanges()
			dev := deviceLocation(t.Device)
			t.ok(t.D.MemPrefetchBatchAsync(t.ctx, p, sizes, []driver.Location{dev}, []uint64{0}, t.stream), "one location")
			for i := range p {
				t.lastPrefetch(p[i], sizes[i], dev)
			}
			each := []driver.Location{theHost, dev, theHost}
			t.ok(t.D.MemPrefetchBatchAsync(t.ctx, p, sizes, each, []uint64{0, 1, 2}, t.stream), "one location each")
			for i := range p {
				t.lastPrefetch(p[i], sizes[i], each[i])
			}
			t.ok(t.D.StreamSynchronize(t.ctx, t.stream), "synchronize")
		},
	},
	{
		Name:  "any of the batch calls on the legacy stream",
		Says:  "INVALID_VALUE",
		Needs: needs(concurrentAccess, batches),
		Run: func(t *T) {
			for name, call := range t.batchCalls(t.threeRanges()) {
				t.returns(driver.InvalidValue, call(driver.StreamNull), "%s", name)
			}
		},
	},
	{
		Name:  "batch discard, and discard-and-prefetch, on a created stream",
		Says:  "success",
		Needs: needs(concurrentAccess, batches),
		Run: func(t *T) {
			p, sizes := t.threeRanges()
			t.ok(t.F.MemDiscardBatchAsync(t.ctx, p, sizes, t.stream), "discard")
			dev := deviceLocation(t.Device)
			t.ok(t.D.MemDiscardAndPrefetchBatchAsync(t.ctx, p, sizes, []driver.Location{dev}, []uint64{0}, t.stream), "discard and prefetch")
			for i := range p {
				t.works(t.device, p[i], sizes[i])
				t.lastPrefetch(p[i], sizes[i], dev)
			}
		},
	},
	{
		Name:  "accessed-by read back with room for four, when only the host is set",
		Says:  "-1 (the host), then -2 (none)",
		Needs: needs(concurrentAccess),
		Run: func(t *T) {
			p := t.managed(2 * mib)
			t.ok(t.advise(p, 2*mib, driver.AdviseSetAccessedBy, theHost), "accessed-by the host")
			var by [4]int32
			t.ok(t.D.MemRangeGetAttribute(t.ctx, driver.RangeAccessedBy, p, 2*mib, by[:]), "read accessed-by")
			if by != [4]int32{-1, -2, -2, -2} {
				t.Errorf("accessed-by reads %v", by)
			}
		},
	},
	{
		Name:  "preferred location and last prefetch location",
		Says:  "type and id are read back each on its own; a prefetch to HOST_NUMA or HOST_NUMA_CURRENT reads as what was asked for",
		Needs: needs(concurrentAccess, locationForms),
		Run: func(t *T) {
			p := t.managed(2 * mib)
			dev, host := deviceLocation(t.Device), driver.Location{Type: driver.LocationHost, ID: -1}
			for _, c := range []struct{ asked, reads driver.Location }{{dev, dev}, {theHost, host}} {
				t.ok(t.D.MemAdvise(t.ctx, p, 2*mib, driver.AdviseSetPreferredLocation, c.asked), "prefer %+v", c.asked)
				t.preferred(p, 2*mib, c.reads)
			}
			for _, c := range []struct{ asked, reads driver.Location }{{dev, dev}, {theHost, host}, {nodeZero, nodeZero}, {currentNode, currentNode}} {
				t.ok(t.D.MemPrefetchAsync(t.ctx, p, 2*mib, c.asked, t.stream), "prefetch to %+v", c.asked)
				t.rangeReads(driver.RangeLastPrefetchType, p, 2*mib, int32(c.reads.Type))
				t.rangeReads(driver.RangeLastPrefetchID, p, 2*mib, c.reads.ID)
			}
			t.ok(t.D.StreamSynchronize(t.ctx, t.stream), "synchronize")
		},
	},
	{
		Name:  "preferred location HOST_NUMA or HOST_NUMA_CURRENT, after none, a device or HOST was preferred",
		Says:  "success, and what is read back stays as it was: none, the device or HOST; none after that was unset",
		Needs: needs(concurrentAccess, locationForms),
		Run: func(t *T) {
			p := t.managed(2 * mib)
			dev, none := deviceLocation(t.Device), driver.Location{ID: driver.DeviceInvalid}
			for _, node := range []driver.Location{nodeZero, currentNode} {
				for _, c := range []struct{ before, reads driver.Location }{{none, none}, {dev, dev}, {theHost, driver.Location{Type: driver.LocationHost, ID: -1}}} {
					if c.before != none {
						t.ok(t.D.MemAdvise(t.ctx, p, 2*mib, driver.AdviseSetPreferredLocation, c.before), "prefer %+v", c.before)
					}
					t.ok(t.D.MemAdvise(t.ctx, p, 2*mib, driver.AdviseSetPreferredLocation, node), "prefer %+v", node)
					t.preferred(p, 2*mib, c.reads)
					t.ok(t.D.MemAdvise(t.ctx, p, 2*mib, driver.AdviseUnsetPreferredLocation, theHost), "prefer nothing")
					t.ok(t.D.MemAdvise(t.ctx, p, 2*mib, driver.AdviseSetPreferredLocation, node), "prefer %+v", node)
					t.preferred(p, 2*mib, none)
				}
			}
		},
	},
	{
		Name:  "cuMemPrefetchAsync on the capturing stream",
		Says:  "STREAM_CAPTURE_UNSUPPORTED, and the capture is invalidated",
		Needs: needs(concurrentAccess),
		Run: func(t *T) {
			p := t.managed(2 * mib)
			t.notCaptured("prefetch", func(s driver.Stream) driver.Result { return t.prefetch(p, 2*mib, deviceLocation(t.Device), s) })
		},
	},
}
