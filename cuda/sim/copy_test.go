package sim

import (
	"testing"

	"github.com/cuvmm/cuvmm/internal/driver"
	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"
)

// Copies and memsets against a byte slice, over memory of many pieces.
func TestCopiesMatchASlice(t *testing.T) {
	r := start(t, Options{})
	const size = 4 * chunk
	p, s := r.mapped(4), r.stream(driver.StreamNonBlocking)
	model := make([]byte, size)
	rapid.Check(t, func(t *rapid.T) {
		// Lengths and places near the borders of chunks.
		place := rapid.Custom(func(t *rapid.T) int {
			near := rapid.IntRange(0, 4).Draw(t, "chunk") * chunk
			return max(0, min(size, near+rapid.IntRange(-64, 64).Draw(t, "off")))
		})
		a, b := place.Draw(t, "a"), place.Draw(t, "b")
		n := min(rapid.SampledFrom([]int{0, 1, 7, 64, 4096, chunk + 3}).Draw(t, "n"), size-a, size-b)
		switch rapid.IntRange(0, 4).Draw(t, "what") {
		case 0:
			v := rapid.Byte().Draw(t, "v")
			r.ok(r.MemsetD8Async(r.ctx, p+driver.Ptr(a), v, uint64(n), s))
			fill(model[a:a+n], v)
		case 1:
			a, n = a&^3, n&^3
			r.ok(r.MemsetD32Async(r.ctx, p+driver.Ptr(a), 0x04030201, uint64(n/4), s))
			for i := range n {
				model[a+i] = byte(i%4 + 1)
			}
		case 2:
			src := pattern(n)
			if n > 0 {
				r.ok(r.MemcpyHtoDAsync(r.ctx, p+driver.Ptr(a), pointer(src), uint64(n), s))
			}
			copy(model[a:], src)
		case 3:
			if a < b+n && b < a+n {
				t.Skip("overlapping")
			}
			r.ok(r.MemcpyDtoDAsync(r.ctx, p+driver.Ptr(a), p+driver.Ptr(b), uint64(n), s))
			copy(model[a:a+n], model[b:b+n])
		case 4:
			dst := make([]byte, n)
			if n > 0 {
				r.ok(r.MemcpyDtoHAsync(r.ctx, pointer(dst), p+driver.Ptr(a), uint64(n), s))
			}
			require.Equal(t, model[a:a+n], dst) // pageable: it has landed
		}
	})
	r.ok(r.StreamSynchronize(r.ctx, s))
	require.Equal(t, model, r.bytes(p, size))
}

func TestPageableMemoryIsReadBeforeTheCallReturns(t *testing.T) {
	r := start(t, Options{})
	p, s, src := r.mapped(1), r.stream(0), []byte("as it was")
	r.m.Hold(uintptr(s))
	r.ok(r.MemcpyHtoDAsync(r.ctx, p, pointer(src), 9, s))
	copy(src, "different")
	r.m.Release(uintptr(s))
	r.ok(r.StreamSynchronize(r.ctx, s))
	require.Equal(t, "as it was", string(r.bytes(p, 9)))
}

func TestSynchronousCopies(t *testing.T) {
	r := start(t, Options{})
	p, host := r.mapped(1), r.pinned(16)
	copy(host, "pinned")
	r.ok(r.MemcpyHtoD(r.ctx, p, pointer(host), 16))
	require.Equal(t, "pinned", string(r.bytes(p, 6))) // a pinned copy has landed
	src := []byte("pageable")
	r.ok(r.MemcpyHtoD(r.ctx, p, pointer(src), 8))
	r.ok(r.MemcpyDtoD(r.ctx, p+8, p, 8))
	r.ok(r.MemsetD8(r.ctx, p+16, '!', 1))
	dst := make([]byte, 17)
	r.ok(r.MemcpyDtoH(r.ctx, pointer(dst), p, 17))
	require.Equal(t, "pageablepageable!", string(dst))
}

func TestBadRangesAreRefusedWithoutHarm(t *testing.T) {
	r := start(t, Options{})
	p, s, host := r.mapped(1), r.stream(0), pattern(64)
	hole := r.reserve(chunk)
	d, res := r.MemAlloc(r.ctx, 100)
	r.ok(res)
	for _, bad := range []driver.Ptr{hole, p + chunk - 32, d + 64, 0, 0x1234} {
		r.is(driver.InvalidValue, r.MemsetD8Async(r.ctx, bad, 1, 64, s))
		r.is(driver.InvalidValue, r.MemcpyHtoDAsync(r.ctx, bad, pointer(host), 64, s))
		r.is(driver.InvalidValue, r.MemcpyDtoHAsync(r.ctx, pointer(host), bad, 64, s))
		r.is(driver.InvalidValue, r.MemcpyDtoDAsync(r.ctx, bad, p, 64, s))
		r.is(driver.InvalidValue, r.MemcpyDtoDAsync(r.ctx, p, bad, 64, s))
		r.is(driver.InvalidValue, r.MemsetD8(r.ctx, bad, 1, 64))
	}
	r.is(driver.InvalidValue, r.MemsetD32Async(r.ctx, p+1, 1, 1, s))
	r.ok(r.MemsetD8Async(r.ctx, hole, 1, 0, s)) // nothing is to be done
	r.ok(r.StreamSynchronize(r.ctx, s))
	require.Empty(t, r.m.Fault())
	r.ok(r.MemFree(r.ctx, d))
	r.ok(r.MemAddressFree(hole, chunk))
}

// faulty makes a context lose itself and checks what is left of it.
func faulty(t *testing.T, want driver.Result, culprit string, do func(r *rig, c driver.Context, s driver.Stream)) {
	r := start(t, Options{Devices: []DeviceOptions{{}, {}}})
	c, res := r.CtxCreate(0, 0)
	r.ok(res)
	r.t.Cleanup(func() { r.ok(r.CtxDestroy(c)) })
	s, res := r.StreamCreate(c, driver.StreamNonBlocking)
	r.ok(res)
	e, res := r.EventCreate(c, 0)
	r.ok(res)
	d, res := r.MemAlloc(c, 8)
	r.ok(res)
	do(r, c, s)
	r.is(want, r.StreamSynchronize(c, s))
	r.is(want, r.StreamSynchronize(c, s))
	r.is(want, r.EventQuery(c, e))
	r.is(want, r.MemsetD8Async(c, d, 1, 8, s))
	_, res = r.MemAlloc(c, 8)
	r.is(want, res)
	require.Contains(t, r.m.Fault(), culprit)
	// Another context of the device lives, and so does virtual memory.
	p := r.mapped(1)
	r.ok(r.MemsetD8Async(r.ctx, p, 1, 8, driver.StreamNull))
	r.ok(r.StreamSynchronize(r.ctx, driver.StreamNull))
	// What is given back is gone, whatever the call returns.
	r.is(want, r.MemFree(c, d))
	r.is(driver.InvalidValue, r.MemFree(c, d))
	r.is(want, r.EventDestroy(c, e))
	r.is(want, r.StreamDestroy(c, s))
}

func TestWorkOnMemoryTakenAwayDestroysTheContext(t *testing.T) {
	faulty(t, driver.IllegalAddress, "nothing is mapped there in the reservation", func(r *rig, c driver.Context, s driver.Stream) {
		p := r.reserve(chunk)
		h := r.create(chunk, on(0, 0))
		r.ok(r.MemMap(p, chunk, 0, h))
		r.ok(r.MemRelease(h))
		r.allow(p, chunk, 0)
		r.m.Hold(uintptr(s))
		r.ok(r.MemsetD8Async(c, p, 1, chunk, s))
		r.ok(r.MemUnmap(p, chunk))
		r.m.Release(uintptr(s))
		r.t.Cleanup(func() { r.ok(r.MemAddressFree(p, chunk)) })
	})
}

func TestWorkWithoutAccessDestroysTheContext(t *testing.T) {
	for _, f := range []driver.AccessFlags{driver.AccessNone, driver.AccessRead} {
		faulty(t, driver.IllegalAddress, "grant it with cuMemSetAccess", func(r *rig, c driver.Context, s driver.Stream) {
			p := r.mapped(1)
			r.ok(r.MemSetAccess(p, chunk, []driver.AccessDesc{grant(driver.LocationDevice, 0, f)}))
			r.ok(r.MemsetD8Async(c, p, 1, 8, s))
		})
	}
	// A device that was not granted, though another one was.
	faulty(t, driver.IllegalAddress, "device 1 has no access", func(r *rig, c driver.Context, s driver.Stream) {
		p := r.mapped(1)
		other, res := r.CtxCreate(0, 1)
		r.ok(res)
		r.ok(r.MemsetD8Async(other, p, 1, 8, driver.StreamNull))
		r.is(driver.IllegalAddress, r.CtxSynchronize(other))
		r.ok(r.CtxDestroy(other))
		r.ok(r.MemSetAccess(p, chunk, []driver.AccessDesc{grant(driver.LocationDevice, 0, driver.AccessNone)}))
		r.ok(r.MemsetD8Async(c, p, 1, 8, s))
	})
}
