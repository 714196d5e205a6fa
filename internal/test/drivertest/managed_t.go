package drivertest

import (
	"os"
	"runtime"
	"slices"

	"github.com/cuvmm/cuvmm/internal/driver"
)

// osPage is the size of the host's pages in bytes.
var osPage = os.Getpagesize()

// cpuReaches is a driver whose managed memory the CPU reaches: the software
// driver's on Linux.
var cpuReaches = Need{"addresses that the CPU reaches", func(s *suite) bool { return !s.software || runtime.GOOS == "linux" }}

// managed makes managed memory, attached to all.
func (t *T) managed(n uint64) driver.Ptr {
	t.Helper()
	p, r := t.D.MemAllocManaged(t.ctx, n, driver.AttachGlobal)
	t.ok(r, "allocate %d bytes of managed memory", n)
	t.own("managed memory", uint64(p), func() driver.Result { return t.D.MemFree(t.ctx, p) })
	return p
}

// advise and prefetch use the form that the driver has.
func (t *T) advise(p driver.Ptr, n uint64, a driver.Advice, l driver.Location) driver.Result {
	if t.D.Has(driver.CallMemAdvise) {
		return t.D.MemAdvise(t.ctx, p, n, a, l)
	}
	return t.D.MemAdviseV1(t.ctx, p, n, a, ordinalOf(l))
}

func (t *T) prefetch(p driver.Ptr, n uint64, l driver.Location, s driver.Stream) driver.Result {
	return prefetchWith(t.D, t.ctx, p, n, l, s)
}

func prefetchWith(d driver.Driver, c driver.Context, p driver.Ptr, n uint64, l driver.Location, s driver.Stream) driver.Result {
	if d.Has(driver.CallMemPrefetchAsync) {
		return d.MemPrefetchAsync(c, p, n, l, s)
	}
	return d.MemPrefetchAsyncV1(c, p, n, ordinalOf(l), s)
}

// located requires the locations of the parts of a range.
func (t *T) located(p driver.Ptr, n, part, sampling uint64, want ...driver.Location) {
	t.Helper()
	got := make([]driver.Location, (n+part-1)/part)
	t.ok(t.D.(driver.Locator).MemGetLocationInfo(p, n, part, sampling, got), "locations")
	if !slices.Equal(got, want) {
		t.Errorf("parts of %d of %d bytes, sampled each %d, are at %+v, want %+v", part, n, sampling, got, want)
	}
}

// ordinalOf is a device or the host in the older form.
func ordinalOf(l driver.Location) int32 {
	if l.Type == driver.LocationDevice {
		return l.ID
	}
	return driver.DeviceCPU
}

// rangeReads requires an attribute's first element.
func (t *T) rangeReads(a driver.RangeAttribute, p driver.Ptr, n uint64, want int32) {
	t.Helper()
	var v [1]int32
	t.ok(t.D.MemRangeGetAttribute(t.ctx, a, p, n, v[:]), "range attribute %d of %d bytes", a, n)
	if v[0] != want {
		t.Errorf("range attribute %d of %d bytes reads %d, want %d", a, n, v[0], want)
	}
}

// preferred requires what is read back as the preferred location.
func (t *T) preferred(p driver.Ptr, n uint64, want driver.Location) {
	t.Helper()
	t.rangeReads(driver.RangePreferredType, p, n, int32(want.Type))
	t.rangeReads(driver.RangePreferredID, p, n, want.ID)
}

// lastPrefetch requires that the last prefetch was to a device or to the host.
func (t *T) lastPrefetch(p driver.Ptr, n uint64, want driver.Location) {
	t.Helper()
	if want.Type == driver.LocationNone {
		t.rangeReads(driver.RangeLastPrefetch, p, n, driver.DeviceInvalid)
		return
	}
	t.rangeReads(driver.RangeLastPrefetch, p, n, ordinalOf(want))
}

// absentDevice is a device that the machine does not have.
func (t *T) absentDevice() driver.Location {
	return driver.Location{Type: driver.LocationDevice, ID: int32(len(t.devices)) + 8}
}

// threeRanges are of one allocation, with gaps between them.
func (t *T) threeRanges() (p []driver.Ptr, sizes []uint64) {
	t.Helper()
	base := t.managed(8 * mib)
	return []driver.Ptr{base, base + 2*mib, base + 6*mib}, []uint64{mib, mib, 2 * mib}
}

// notCaptured requires that a call on a capturing stream is refused and ends
// the capture.
func (t *T) notCaptured(what string, call func(s driver.Stream) driver.Result) {
	t.Helper()
	s := t.newStream(t.ctx, driver.StreamNonBlocking)
	var got driver.Result
	end := t.capture(t.thread(), s, driver.CaptureRelaxed, func() { got = call(s) })
	t.returns(driver.CaptureUnsupported, got, "%s", what)
	t.returns(driver.CaptureInvalid, end, "end capture after %s", what)
}

// managedMatrix are the calls of managed memory on another stream while a
// stream captures.
var managedMatrix = []matrixCall{
	{"cuMemAllocManaged", unsafeCall, needs(managedMemory), func(t *T, _ driver.Stream) func(driver.Foreign) driver.Result {
		return func(f driver.Foreign) driver.Result {
			p, r := f.MemAllocManaged(t.ctx, mib, driver.AttachGlobal)
			if r == driver.Success {
				t.own("managed memory", uint64(p), func() driver.Result { return t.D.MemFree(t.ctx, p) })
			}
			return r
		}
	}},
	{"cuMemFree of managed memory", unsafeCall, needs(managedMemory), func(t *T, _ driver.Stream) func(driver.Foreign) driver.Result {
		p, r := t.D.MemAllocManaged(t.ctx, mib, driver.AttachGlobal)
		t.ok(r, "cuMemAllocManaged")
		free := t.once("managed memory", func(d driver.Driver) driver.Result { return d.MemFree(t.ctx, p) })
		return func(f driver.Foreign) driver.Result { return free(f) }
	}},
	{"advice for managed memory", unsafeCall, needs(concurrentAccess), func(t *T, _ driver.Stream) func(driver.Foreign) driver.Result {
		p := t.managed(mib)
		return func(f driver.Foreign) driver.Result {
			if f.Has(driver.CallMemAdvise) {
				return f.MemAdvise(t.ctx, p, mib, driver.AdviseSetAccessedBy, theHost)
			}
			return f.MemAdviseV1(t.ctx, p, mib, driver.AdviseSetAccessedBy, driver.DeviceCPU)
		}
	}},
	{"range attribute of managed memory", harmless, needs(managedMemory), func(t *T, _ driver.Stream) func(driver.Foreign) driver.Result {
		p := t.managed(mib)
		return func(f driver.Foreign) driver.Result {
			var v [1]int32
			return f.MemRangeGetAttribute(t.ctx, driver.RangeReadMostly, p, mib, v[:])
		}
	}},
	{"prefetch of managed memory", harmless, needs(concurrentAccess), func(t *T, s driver.Stream) func(driver.Foreign) driver.Result {
		p := t.managed(mib)
		return func(f driver.Foreign) driver.Result {
			return prefetchWith(f, t.ctx, p, mib, deviceLocation(t.Device), s)
		}
	}},
	{"batch prefetch and discard of managed memory", harmless, needs(concurrentAccess, batches), func(t *T, s driver.Stream) func(driver.Foreign) driver.Result {
		p := []driver.Ptr{t.managed(mib)}
		return func(f driver.Foreign) driver.Result {
			if r := f.MemPrefetchBatchAsync(t.ctx, p, []uint64{mib}, []driver.Location{theHost}, []uint64{0}, s); r != driver.Success {
				return r
			}
			return f.MemDiscardBatchAsync(t.ctx, p, []uint64{mib}, s)
		}
	}},
	{"stream attach of managed memory", unsafeCall, needs(managedMemory), func(t *T, s driver.Stream) func(driver.Foreign) driver.Result {
		p := t.managed(mib)
		return func(f driver.Foreign) driver.Result {
			return f.StreamAttachMemAsync(t.ctx, s, p, 0, driver.AttachGlobal)
		}
	}},
}

// batchCalls returns the batch calls of the ranges, with one location for all.
func (t *T) batchCalls(p []driver.Ptr, sizes []uint64) map[string]func(driver.Stream) driver.Result {
	to, first := []driver.Location{deviceLocation(t.Device)}, []uint64{0}
	return map[string]func(driver.Stream) driver.Result{
		"prefetch": func(s driver.Stream) driver.Result {
			return t.D.MemPrefetchBatchAsync(t.ctx, p, sizes, to, first, s)
		},
		"discard": func(s driver.Stream) driver.Result { return t.F.MemDiscardBatchAsync(t.ctx, p, sizes, s) },
		"both": func(s driver.Stream) driver.Result {
			return t.D.MemDiscardAndPrefetchBatchAsync(t.ctx, p, sizes, to, first, s)
		},
	}
}
