package drivertest

import (
	"slices"
	"sync/atomic"
	"unsafe"

	"github.com/cuvmm/cuvmm/internal/driver"
)

// managedRanges are the rules of allocations, of their attributes and of batches.
var managedRanges = []Case{
	{
		Name:  "cuMemAllocManaged without a current context",
		Says:  "INVALID_CONTEXT",
		Needs: needs(managedMemory),
		Run: func(t *T) {
			var r driver.Result
			t.thread().do(func() { _, r = t.D.MemAllocManaged(0, 2*mib, driver.AttachGlobal) })
			t.returns(driver.InvalidContext, r, "cuMemAllocManaged")
		},
	},
	{
		Name:  "cuMemAllocManaged of 0 bytes, with no attachment, or attached to a single stream",
		Says:  "INVALID_VALUE",
		Needs: needs(managedMemory),
		Run: func(t *T) {
			for _, c := range []struct {
				n     uint64
				flags driver.AttachFlags
			}{{0, driver.AttachGlobal}, {mib, 0}, {mib, driver.AttachSingle}} {
				_, r := t.D.MemAllocManaged(t.ctx, c.n, c.flags)
				t.returns(driver.InvalidValue, r, "%d bytes, attachment %d", c.n, c.flags)
			}
		},
	},
	{
		Name:  "a managed allocation's pointer attributes",
		Says:  "it is managed, and its start and size are the requested ones",
		Needs: needs(managedMemory),
		Run: func(t *T) {
			p := t.managed(3 * mib)
			for a, want := range map[driver.PointerAttribute]uint64{
				driver.PointerIsManaged: 1, driver.PointerRangeStart: uint64(p), driver.PointerRangeSize: 3 * mib,
				driver.PointerContext: uint64(t.ctx), driver.PointerDeviceOrdinal: uint64(t.Device),
			} {
				got, r := t.D.PointerGetAttribute(t.ctx, a, p+mib)
				t.ok(r, "pointer attribute %d", a)
				if got != want {
					t.Errorf("pointer attribute %d reads %#x, want %#x", a, got, want)
				}
			}
		},
	},
	{
		Name:  "two managed allocations of a page each",
		Says:  "share no page",
		Needs: needs(managedMemory),
		Run: func(t *T) {
			page := uint64(osPage)
			p, q := t.managed(page), t.managed(page)
			if uint64(p)%page != 0 || uint64(q)%page != 0 {
				t.Errorf("allocations at %#x and %#x, pages are of %d bytes", p, q, page)
			}
		},
	},
	{
		Name:  "managed memory at one address",
		Says:  "the CPU reads what the device wrote, and the device what the CPU wrote",
		Needs: needs(managedMemory, cpuReaches),
		Run: func(t *T) {
			p := t.managed(4 * mib)
			t.fill(t.device, p, 4*mib, 0x21)
			data := unsafe.Slice((*byte)(hostPointer(p)), 4*mib)
			for i, b := range data {
				if b != 0x21 {
					t.Fatalf("the CPU reads %#x at %d, the device wrote 0x21", b, i)
				}
			}
			for i := range data {
				data[i] = 0x43
			}
			t.reads(t.device, p, 4*mib, 0x43)
		},
	},
	{
		Name:  "the CPU at managed memory of a device with concurrent access while work runs there",
		Says:  "works",
		Needs: needs(concurrentAccess, cpuReaches),
		Run: func(t *T) {
			p := t.managed(2 * mib)
			s := t.newStream(t.ctx, driver.StreamNonBlocking)
			h := t.hold(t.ctx, s)
			word := (*atomic.Uint64)(hostPointer(p))
			word.Store(77)
			if got := word.Load(); got != 77 {
				t.Errorf("the CPU reads %d, and wrote 77", got)
			}
			t.didNotWait(h, "the CPU")
		},
	},
	{
		Name:  "range attributes of new managed memory",
		Says:  "not read mostly, no preferred location, accessed by none, never prefetched",
		Needs: needs(managedMemory),
		Run: func(t *T) {
			p := t.managed(2 * mib)
			t.rangeReads(driver.RangeReadMostly, p, 2*mib, 0)
			t.rangeReads(driver.RangePreferredLocation, p, 2*mib, driver.DeviceInvalid)
			t.rangeReads(driver.RangeLastPrefetch, p, 2*mib, driver.DeviceInvalid)
			t.rangeReads(driver.RangeAccessedBy, p, 2*mib, driver.DeviceInvalid)
			if t.D.Has(driver.CallMemAdvise) {
				t.rangeReads(driver.RangePreferredType, p, 2*mib, int32(driver.LocationNone))
				t.rangeReads(driver.RangeLastPrefetchType, p, 2*mib, int32(driver.LocationNone))
			}
		},
	},
	{
		Name:  "range attributes of memory that is not managed",
		Says:  "INVALID_VALUE",
		Needs: needs(managedMemory),
		Run: func(t *T) {
			p, _ := t.memory(t.chunk)
			for _, p := range []driver.Ptr{p, t.scratch} {
				var v [1]int32
				t.returns(driver.InvalidValue, t.D.MemRangeGetAttribute(t.ctx, driver.RangeReadMostly, p, 4096, v[:]), "read mostly")
			}
		},
	},
	{
		Name:  "advice, where half of a range has it",
		Says:  "the whole reads as without it, the half with it",
		Needs: needs(concurrentAccess),
		Run: func(t *T) {
			p := t.managed(4 * mib)
			dev := deviceLocation(t.Device)
			t.ok(t.advise(p, 2*mib, driver.AdviseSetReadMostly, dev), "read mostly")
			t.ok(t.advise(p, 2*mib, driver.AdviseSetPreferredLocation, dev), "preferred location")
			t.ok(t.advise(p, 2*mib, driver.AdviseSetAccessedBy, theHost), "accessed-by")
			for a, want := range map[driver.RangeAttribute][2]int32{
				driver.RangeReadMostly:        {0, 1},
				driver.RangePreferredLocation: {driver.DeviceInvalid, dev.ID},
				driver.RangeAccessedBy:        {driver.DeviceInvalid, driver.DeviceCPU},
			} {
				t.rangeReads(a, p, 4*mib, want[0])
				t.rangeReads(a, p, 2*mib, want[1])
			}
		},
	},
	{
		Name:  "last prefetch location, where half of a range was prefetched to a device and the other half never",
		Says:  "none for the whole, the device for the half",
		Needs: needs(concurrentAccess),
		Run: func(t *T) {
			p := t.managed(4 * mib)
			dev := deviceLocation(t.Device)
			t.ok(t.prefetch(p, 2*mib, dev, t.stream), "prefetch half")
			t.lastPrefetch(p, 2*mib, dev)
			t.lastPrefetch(p, 4*mib, driver.Location{})
			t.lastPrefetch(p+2*mib, 2*mib, driver.Location{})
			t.ok(t.D.StreamSynchronize(t.ctx, t.stream), "synchronize")
		},
	},
	{
		Name:  "last prefetch location while the stream has not come to the prefetch yet",
		Says:  "what was asked for, as soon as the call has returned",
		Needs: needs(concurrentAccess),
		Run: func(t *T) {
			p := t.managed(2 * mib)
			s := t.newStream(t.ctx, driver.StreamNonBlocking)
			h := t.hold(t.ctx, s)
			t.ok(t.prefetch(p, 2*mib, deviceLocation(t.Device), s), "prefetch")
			t.didNotWait(h, "prefetch")
			t.lastPrefetch(p, 2*mib, deviceLocation(t.Device))
			t.didNotWait(h, "reading the last prefetch location")
			h.release()
			t.ok(t.D.StreamSynchronize(t.ctx, s), "synchronize")
		},
	},
	{
		Name:  "several range attributes in one call",
		Says:  "the same as one by one",
		Needs: needs(concurrentAccess),
		Run: func(t *T) {
			p := t.managed(2 * mib)
			t.ok(t.advise(p, 2*mib, driver.AdviseSetReadMostly, theHost), "read mostly")
			t.ok(t.advise(p, 2*mib, driver.AdviseSetAccessedBy, theHost), "accessed-by")
			out := [5]int32{9, 9, 9, 9, 9}
			t.ok(t.D.MemRangeGetAttributes(t.ctx, []driver.RangeAttribute{driver.RangeReadMostly, driver.RangeAccessedBy, driver.RangePreferredLocation},
				[]uint64{1, 2, 1}, p, 2*mib, out[:]), "read three attributes")
			if out != [5]int32{1, -1, -2, -2, 9} {
				t.Errorf("the attributes read %v", out)
			}
		},
	},
	{
		Name:  "‡ the locations of managed memory of which a part was prefetched and the rest never touched",
		Says:  "for each part that of most of its pages; none for those that were never touched",
		Needs: needs(concurrentAccess, locates),
		Run: func(t *T) {
			p, dev := t.managed(4*mib), deviceLocation(t.Device)
			t.ok(t.prefetch(p+mib, mib+3*mib/4, dev, t.stream), "prefetch to the device")
			t.ok(t.prefetch(p+3*mib, mib/4, theHost, t.stream), "prefetch to the host")
			t.ok(t.D.StreamSynchronize(t.ctx, t.stream), "synchronize")
			for _, sampling := range []uint64{0, mib / 4} {
				t.located(p, 3*mib+mib/4, mib, sampling, driver.Location{}, dev, dev, theHost)
			}
			t.located(p+mib, 2*mib, 2*mib, 2*mib, dev)
			t.located(p+2*mib+3*mib/4, mib/2, mib/4, mib/4, driver.Location{}, theHost)
		},
	},
	{
		Name:  "‡ locations of memory that is not managed or past the end of the allocation; of parts of 0 bytes or longer than the range; sampled further apart than a part is long",
		Says:  "INVALID_VALUE",
		Needs: needs(concurrentAccess, locates),
		Run: func(t *T) {
			p := t.managed(4 * mib)
			for _, c := range []struct {
				p                 driver.Ptr
				n, part, sampling uint64
			}{{t.scratch, 4096, 1024, 0}, {p + mib, 4 * mib, mib, 0}, {p, 4 * mib, 0, 0}, {p, mib, 2 * mib, 0}, {p, 4 * mib, mib, mib + 1}} {
				out := make([]driver.Location, (c.n-1)/max(c.part, 1)+1)
				t.returns(driver.InvalidValue, t.D.(driver.Locator).MemGetLocationInfo(c.p, c.n, c.part, c.sampling, out), "%+v", c)
			}
		},
	},
	{
		Name:  "prefetch of 0 bytes or past the end of the allocation; prefetch to a device behind the last one",
		Says:  "INVALID_VALUE; INVALID_DEVICE",
		Needs: needs(concurrentAccess, locationForms),
		Run: func(t *T) {
			p := t.managed(2 * mib)
			dev := deviceLocation(t.Device)
			t.returns(driver.InvalidValue, t.D.MemPrefetchAsync(t.ctx, p, 0, dev, t.stream), "0 bytes")
			t.returns(driver.InvalidValue, t.D.MemPrefetchAsync(t.ctx, p, 64*mib, dev, t.stream), "past the end")
			t.returns(driver.InvalidDevice, t.D.MemPrefetchAsync(t.ctx, p, 2*mib, t.absentDevice(), t.stream), "an absent device")
		},
	},
	{
		Name:  "prefetch to HOST, to HOST_NUMA and to HOST_NUMA_CURRENT",
		Says:  "success, and the contents stay",
		Needs: needs(concurrentAccess, locationForms),
		Run: func(t *T) {
			p := t.managed(4 * mib)
			t.fill(t.device, p, 4*mib, 0x35)
			for _, l := range []driver.Location{theHost, nodeZero, currentNode, deviceLocation(t.Device)} {
				t.ok(t.D.MemPrefetchAsync(t.ctx, p, 4*mib, l, t.stream), "prefetch to %+v", l)
				t.reads(t.device, p, 4*mib, 0x35)
			}
		},
	},
	{
		Name:  "the first form of advise and prefetch, with a device's ordinal",
		Says:  "as the second form with the device, or with HOST for -1",
		Needs: needs(concurrentAccess, ordinalForms),
		Run: func(t *T) {
			p := t.managed(2 * mib)
			ordinal := int32(t.Device)
			t.ok(t.D.MemAdviseV1(t.ctx, p, 2*mib, driver.AdviseSetPreferredLocation, ordinal), "prefer the device")
			t.rangeReads(driver.RangePreferredLocation, p, 2*mib, ordinal)
			t.ok(t.D.MemAdviseV1(t.ctx, p, 2*mib, driver.AdviseSetPreferredLocation, driver.DeviceCPU), "prefer the host")
			t.rangeReads(driver.RangePreferredLocation, p, 2*mib, driver.DeviceCPU)
			t.ok(t.D.MemPrefetchAsyncV1(t.ctx, p, 2*mib, ordinal, t.stream), "prefetch to the device")
			t.rangeReads(driver.RangeLastPrefetch, p, 2*mib, ordinal)
			t.ok(t.D.MemPrefetchAsyncV1(t.ctx, p, 2*mib, driver.DeviceCPU, t.stream), "prefetch to the host")
			t.rangeReads(driver.RangeLastPrefetch, p, 2*mib, driver.DeviceCPU)
			t.ok(t.D.StreamSynchronize(t.ctx, t.stream), "synchronize")
		},
	},
	{
		Name:  "the batch calls without ranges, or with locations that do not begin with the first range",
		Says:  "INVALID_VALUE",
		Needs: needs(concurrentAccess, batches),
		Run: func(t *T) {
			p, sizes := t.threeRanges()
			dev := []driver.Location{deviceLocation(t.Device)}
			t.returns(driver.InvalidValue, t.D.MemPrefetchBatchAsync(t.ctx, nil, nil, dev, []uint64{0}, t.stream), "prefetch of nothing")
			t.returns(driver.InvalidValue, t.F.MemDiscardBatchAsync(t.ctx, nil, nil, t.stream), "discard of nothing")
			t.returns(driver.InvalidValue, t.D.MemPrefetchBatchAsync(t.ctx, p, sizes, dev, []uint64{1}, t.stream), "locations from the second range on")
		},
	},
	{
		Name:  "the arrays of a batch, changed before the stream comes to it",
		Says:  "do not matter: they were read when the call returned",
		Needs: needs(concurrentAccess, batches),
		Run: func(t *T) {
			p, sizes := t.threeRanges()
			want := slices.Clone(p)
			to, first := []driver.Location{deviceLocation(t.Device)}, []uint64{0}
			s := t.newStream(t.ctx, driver.StreamNonBlocking)
			h := t.hold(t.ctx, s)
			t.ok(t.D.MemPrefetchBatchAsync(t.ctx, p, sizes, to, first, s), "prefetch")
			t.didNotWait(h, "prefetch")
			clear(p)
			clear(sizes)
			to[0], first[0] = driver.Location{Type: 99, ID: 99}, 99
			h.release()
			t.ok(t.D.StreamSynchronize(t.ctx, s), "synchronize")
			for _, p := range want {
				t.works(t.device, p, mib)
			}
		},
	},
	{
		Name:  "the batch calls and cuStreamAttachMemAsync on the capturing stream",
		Says:  "STREAM_CAPTURE_UNSUPPORTED, and the capture is invalidated",
		Needs: needs(concurrentAccess, batches),
		Run: func(t *T) {
			p, sizes := t.threeRanges()
			for name, call := range t.batchCalls(p, sizes) {
				t.notCaptured(name, call)
			}
			t.notCaptured("attach", func(s driver.Stream) driver.Result {
				return t.D.StreamAttachMemAsync(t.ctx, s, p[0], 0, driver.AttachSingle)
			})
		},
	},
	{
		Name:  "cuMemAllocManaged, advice, prefetch and range attributes while work runs on another stream",
		Says:  "do not wait for it",
		Needs: needs(concurrentAccess),
		Run: func(t *T) {
			s := t.newStream(t.ctx, driver.StreamNonBlocking)
			h := t.hold(t.ctx, s)
			p := t.managed(2 * mib)
			t.didNotWait(h, "cuMemAllocManaged")
			t.ok(t.advise(p, 2*mib, driver.AdviseSetAccessedBy, theHost), "advise")
			t.didNotWait(h, "advise")
			t.ok(t.prefetch(p, 2*mib, deviceLocation(t.Device), t.stream), "prefetch")
			t.didNotWait(h, "prefetch")
			t.ok(t.D.StreamSynchronize(t.ctx, t.stream), "synchronize")
			t.didNotWait(h, "the prefetch itself")
			t.lastPrefetch(p, 2*mib, deviceLocation(t.Device))
			t.didNotWait(h, "range attributes")
			h.release()
			t.ok(t.D.StreamSynchronize(t.ctx, s), "synchronize")
		},
	},
	{
		Name:  "cuStreamAttachMemAsync of a whole allocation, globally, to the host and to a created stream",
		Says:  "success",
		Needs: needs(managedMemory),
		Run: func(t *T) {
			p := t.managed(2 * mib)
			for _, flags := range []driver.AttachFlags{driver.AttachHost, driver.AttachSingle, driver.AttachGlobal} {
				t.ok(t.D.StreamAttachMemAsync(t.ctx, t.stream, p, 0, flags), "attachment %d", flags)
				t.ok(t.D.StreamAttachMemAsync(t.ctx, t.stream, p, 2*mib, flags), "attachment %d with the size", flags)
			}
			t.ok(t.D.StreamSynchronize(t.ctx, t.stream), "synchronize")
			t.works(t.device, p, 2*mib)
		},
	},
	{
		Name:  "cuStreamAttachMemAsync of part of an allocation, of memory that is not managed, or to the legacy stream alone",
		Says:  "INVALID_VALUE",
		Needs: needs(managedMemory),
		Run: func(t *T) {
			p := t.managed(2 * mib)
			t.returns(driver.InvalidValue, t.D.StreamAttachMemAsync(t.ctx, t.stream, p, mib, driver.AttachGlobal), "part of it")
			t.returns(driver.InvalidValue, t.D.StreamAttachMemAsync(t.ctx, t.stream, t.scratch, 0, driver.AttachGlobal), "memory that is not managed")
			t.returns(driver.InvalidValue, t.D.StreamAttachMemAsync(t.ctx, driver.StreamNull, p, 0, driver.AttachSingle), "the legacy stream alone")
		},
	},
	{
		Name:  "‡ more managed memory than the device has, prefetched and written piece by piece",
		Says:  "works: what was not touched for the longest time moves to the host",
		Needs: needs(softwareDriver, concurrentAccess),
		Run: func(t *T) {
			const piece = 1 << 30
			pieces := int(t.total/piece) + 2
			p := t.managed(uint64(pieces) * piece)
			for i := range pieces {
				at := p + driver.Ptr(i*piece)
				t.ok(t.prefetch(at, piece, deviceLocation(t.Device), t.stream), "prefetch piece %d", i)
				t.fill(t.device, at, 4096, byte(i+1))
			}
			for i := range pieces {
				t.reads(t.device, p+driver.Ptr(i*piece), 4096, byte(i+1))
			}
		},
	},
	{
		Name:  "‡ advice that names a device without concurrent managed access, and prefetch there",
		Says:  "INVALID_DEVICE",
		Needs: needs(noConcurrentAccess),
		Run: func(t *T) {
			p := t.managed(2 * mib)
			dev := deviceLocation(t.Device)
			t.returns(driver.InvalidDevice, t.advise(p, 2*mib, driver.AdviseSetPreferredLocation, dev), "preferred location")
			t.returns(driver.InvalidDevice, t.advise(p, 2*mib, driver.AdviseSetAccessedBy, dev), "accessed-by")
			t.returns(driver.InvalidDevice, t.prefetch(p, 2*mib, dev, t.stream), "prefetch")
			t.returns(driver.InvalidDevice, t.prefetch(p, 2*mib, theHost, t.stream), "prefetch to the host, on a stream of the device")
			t.works(t.device, p, 2*mib)
		},
	},
	{
		Name:  "‡ the batch calls where a device has no concurrent managed access",
		Says:  "NOT_SUPPORTED",
		Needs: needs(noConcurrentAccess, batches),
		Run: func(t *T) {
			p, sizes := t.threeRanges()
			t.returns(driver.NotSupported, t.F.MemDiscardBatchAsync(t.ctx, p, sizes, t.stream), "discard")
			t.returns(driver.NotSupported, t.D.MemPrefetchBatchAsync(t.ctx, p, sizes, []driver.Location{theHost}, []uint64{0}, t.stream), "prefetch")
		},
	},
}
