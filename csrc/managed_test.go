//go:build linux && cgo && (amd64 || arm64) && !cuvmm_nocgo

package csrc_test

import (
	"testing"

	"github.com/cuvmm/cuvmm/internal/driver"
	"github.com/stretchr/testify/require"
)

// The calls of managed memory, with locations whose bytes differ.
var (
	place      = driver.Location{Type: driver.LocationHostNUMA, ID: -7}
	placeBytes = unhex("03000000 f9ffffff")
	ranges     = []driver.Ptr{ptr, ptr + 0x1000, ptr + 0x5000}
	sizes      = []uint64{0x1000, 0x2000, 1 << 33}
	places     = []driver.Location{place, {Type: driver.LocationDevice, ID: 3}}
	firsts     = []uint64{0, 2}
	copies     = []driver.CopyAttributes{
		{Order: driver.CopyInStreamOrder, SrcHint: place, DstHint: driver.Location{Type: driver.LocationDevice, ID: 3}, Flags: 1},
		{Order: driver.CopyInStreamOrder},
	}
	copyBytes = le(uint32(1), placeBytes, uint32(1), int32(3), uint32(1), uint32(1), make([]byte, 20))
)

func init() {
	batch := le(ranges, sizes, uint64(3), placeBytes, uint32(1), int32(3), firsts, uint64(2), uint64(0), stream)
	for call, r := range map[driver.Call]row{
		driver.CallMemAllocManaged: {
			do: func(d driver.Driver, c driver.Context) []any {
				v, r := d.MemAllocManaged(c, 1<<33, driver.AttachHost)
				return []any{v, r}
			},
			args: le(uint64(1<<33), uint32(2)), values: []any{driver.Ptr(0x7f00000000e0)}, takes: true,
		},
		driver.CallMemAdvise: {
			do: func(d driver.Driver, c driver.Context) []any {
				return []any{d.MemAdvise(c, ptr, 1<<33, driver.AdviseSetAccessedBy, place)}
			},
			args: le(ptr, uint64(1<<33), uint32(5), placeBytes), takes: true,
		},
		driver.CallMemAdviseV1: {
			do: func(d driver.Driver, c driver.Context) []any {
				return []any{d.MemAdviseV1(c, ptr, 1<<33, driver.AdviseUnsetPreferredLocation, driver.DeviceCPU)}
			},
			args: le(ptr, uint64(1<<33), uint32(4), int32(-1)), takes: true,
		},
		driver.CallMemPrefetchAsync: {
			do: func(d driver.Driver, c driver.Context) []any {
				return []any{d.MemPrefetchAsync(c, ptr, 1<<33, place, stream)}
			},
			args: le(ptr, uint64(1<<33), placeBytes, uint32(0), stream), takes: true,
		},
		driver.CallMemPrefetchAsyncV1: {
			do: func(d driver.Driver, c driver.Context) []any {
				return []any{d.MemPrefetchAsyncV1(c, ptr, 1<<33, 6, stream)}
			},
			args: le(ptr, uint64(1<<33), int32(6), stream), takes: true,
		},
		driver.CallMemPrefetchBatchAsync: {
			do: func(d driver.Driver, c driver.Context) []any {
				return []any{d.MemPrefetchBatchAsync(c, ranges, sizes, places, firsts, stream)}
			},
			args: batch, takes: true,
		},
		driver.CallMemcpyBatchAsync: {
			do: func(d driver.Driver, c driver.Context) []any {
				return []any{d.MemcpyBatchAsync(c, ranges, ranges, sizes, copies, firsts, stream)}
			},
			args: le(ranges, ranges, sizes, uint64(3), copyBytes, firsts, uint64(2), stream), takes: true,
		},
		driver.CallMemDiscardBatchAsync: {
			do: func(d driver.Driver, c driver.Context) []any {
				return []any{d.(driver.Foreign).MemDiscardBatchAsync(c, ranges, sizes, stream)}
			},
			args: le(ranges, sizes, uint64(3), uint64(0), stream), takes: true, foreign: true,
		},
		driver.CallMemDiscardAndPrefetchBatchAsync: {
			do: func(d driver.Driver, c driver.Context) []any {
				return []any{d.MemDiscardAndPrefetchBatchAsync(c, ranges, sizes, places, firsts, stream)}
			},
			args: batch, takes: true,
		},
		driver.CallMemRangeGetAttribute: {
			do: func(d driver.Driver, c driver.Context) []any {
				out := []int32{-9, -9, -9, -9}
				r := d.MemRangeGetAttribute(c, driver.RangeAccessedBy, ptr, 1<<33, out[:3])
				return []any{out, r}
			},
			args: le(uint64(12), uint32(3), ptr, uint64(1<<33)), values: []any{[]int32{300, 301, 302, -9}}, takes: true,
		},
		driver.CallMemRangeGetAttributes: {
			do: func(d driver.Driver, c driver.Context) []any {
				out := []int32{-9, -9, -9, -9, -9}
				r := d.MemRangeGetAttributes(c, []driver.RangeAttribute{driver.RangeAccessedBy, driver.RangeLastPrefetchID, driver.RangeReadMostly},
					[]uint64{2, 1, 1}, ptr, 1<<33, out)
				return []any{out, r}
			},
			args:   le([]uint64{8, 4, 4}, []uint32{3, 8, 1}, uint64(3), ptr, uint64(1<<33)),
			values: []any{[]int32{300, 301, 800, 100, -9}}, takes: true,
		},
		driver.CallStreamAttachMemAsync: {
			do: func(d driver.Driver, c driver.Context) []any {
				return []any{d.StreamAttachMemAsync(c, stream, ptr, 1<<33, driver.AttachSingle)}
			},
			args: le(stream, ptr, uint64(1<<33), uint32(4)), takes: true,
		},
	} {
		rows[call] = r
	}
}

// Arrays that do not fit together never reach the driver.
func TestManagedCallsRefuseArraysThatDoNotFit(t *testing.T) {
	f := buildFake(t)
	d := f.open(t)
	for name, call := range map[string]func() driver.Result{
		"prefetch: fewer sizes":  func() driver.Result { return d.MemPrefetchBatchAsync(ours, ranges, sizes[:2], places, firsts, stream) },
		"prefetch: fewer firsts": func() driver.Result { return d.MemPrefetchBatchAsync(ours, ranges, sizes, places, firsts[:1], stream) },
		"copies: fewer sizes": func() driver.Result {
			return d.MemcpyBatchAsync(ours, ranges, ranges, sizes[:2], copies, firsts, stream)
		},
		"discard: fewer ranges": func() driver.Result { return d.Foreign().MemDiscardBatchAsync(ours, ranges[:2], sizes, stream) },
		"both: fewer locations": func() driver.Result {
			return d.MemDiscardAndPrefetchBatchAsync(ours, ranges, sizes, places[:1], firsts, stream)
		},
		"attributes: no room":         func() driver.Result { return attributes(d, []uint64{1, 1}, make([]int32, 1), 2) },
		"attributes: counts overflow": func() driver.Result { return attributes(d, []uint64{1<<63 + 1, 1 << 63}, make([]int32, 1), 2) },
		"attributes: fewer counts":    func() driver.Result { return attributes(d, []uint64{1}, make([]int32, 1), 2) },
		"attributes: more than eight": func() driver.Result { return attributes(d, make([]uint64, 9), nil, 9) },
	} {
		f.calls(t)
		require.Equal(t, driver.InvalidValue, call(), name)
		require.Empty(t, f.calls(t), name)
	}
}

func attributes(d driver.Driver, counts []uint64, out []int32, n int) driver.Result {
	return d.MemRangeGetAttributes(ours, make([]driver.RangeAttribute, n), counts, ptr, 1<<20, out)
}

// A driver has the form that its version knows, and Has tells which.
func TestFormsOfAdviseAndPrefetch(t *testing.T) {
	for variant, want := range map[string]struct{ first, second bool }{
		"FAKECUDA_VERSION=12010": {true, false},
		"FAKECUDA_VERSION=13000": {true, true},
	} {
		f := buildFake(t, variant)
		d := f.open(t)
		for call, has := range map[driver.Call]bool{
			driver.CallMemAdviseV1: want.first, driver.CallMemPrefetchAsyncV1: want.first,
			driver.CallMemAdvise: want.second, driver.CallMemPrefetchAsync: want.second,
		} {
			require.Equal(t, has, d.Has(call), "%v of %s", call, variant)
		}
		f.calls(t)
		require.Equal(t, driver.Success, d.MemPrefetchAsyncV1(ours, ptr, 1, 0, stream))
		require.Contains(t, entries(f.calls(t)), "cuMemPrefetchAsync_v1")
		if !want.second {
			require.Equal(t, driver.MissingEntryPoint, d.MemPrefetchAsync(ours, ptr, 1, place, stream))
		}
	}
}

func TestManagedCallsDoNotAllocate(t *testing.T) {
	f := buildFake(t)
	d := driver.Driver(f.open(t))
	f.quiet(true)
	defer f.quiet(false)
	out := make([]int32, 4)
	attrs, counts := []driver.RangeAttribute{driver.RangeReadMostly}, []uint64{1}
	for name, call := range map[string]func(){
		"MemAllocManaged":                 func() { d.MemAllocManaged(ours, 1, driver.AttachGlobal) },
		"MemAdvise":                       func() { d.MemAdvise(ours, ptr, 1, driver.AdviseSetReadMostly, place) },
		"MemPrefetchAsync":                func() { d.MemPrefetchAsync(ours, ptr, 1, place, stream) },
		"MemPrefetchBatchAsync":           func() { d.MemPrefetchBatchAsync(ours, ranges, sizes, places, firsts, stream) },
		"MemcpyBatchAsync":                func() { d.MemcpyBatchAsync(ours, ranges, ranges, sizes, copies, firsts, stream) },
		"MemDiscardBatchAsync":            func() { d.Foreign().MemDiscardBatchAsync(ours, ranges, sizes, stream) },
		"MemDiscardAndPrefetchBatchAsync": func() { d.MemDiscardAndPrefetchBatchAsync(ours, ranges, sizes, places, firsts, stream) },
		"MemRangeGetAttribute":            func() { d.MemRangeGetAttribute(ours, driver.RangeAccessedBy, ptr, 1, out) },
		"MemRangeGetAttributes":           func() { d.MemRangeGetAttributes(ours, attrs, counts, ptr, 1, out) },
	} {
		require.Zero(t, testing.AllocsPerRun(20, call), name)
	}
}
