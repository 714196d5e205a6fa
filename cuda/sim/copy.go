package sim

import (
	"bytes"
	"cmp"
	"encoding/binary"
	"fmt"
	"slices"
	"unsafe"

	"github.com/cuvmm/cuvmm/internal/driver"
)

// copyTask copies n bytes when it is done, at whatever the addresses then mean.
func (m *Machine) copyTask(call driver.Call, dst, src place, n uint64) task {
	return task{run: func(at site) *fault {
		to, f := m.pin(at, call, dst, n, driver.AccessReadWrite)
		if f != nil {
			return f
		}
		defer to.release()
		from, f := m.pin(at, call, src, n, driver.AccessRead)
		if f != nil {
			return f
		}
		defer from.release()
		if overlap(to.runs, from.runs) {
			return &fault{driver.IllegalAddress, fmt.Sprintf(
				"%v of %d bytes from %#x to %#x in context %#x: the two ranges share memory, and what a device leaves there then is undefined: copy by way of memory between them",
				call, n, src.addr, dst.addr, uintptr(at.handle))}
		}
		copyRuns(to.runs, from.runs)
		return nil
	}}
}

// overlap reports whether a byte of one list of pieces is one of the other's.
func overlap(a, b [][]byte) bool {
	type piece struct {
		lo, hi uintptr
		list   int
	}
	var all []piece
	for list, runs := range [2][][]byte{a, b} {
		for _, r := range runs {
			lo := uintptr(unsafe.Pointer(unsafe.SliceData(r)))
			all = append(all, piece{lo, lo + uintptr(len(r)), list})
		}
	}
	slices.SortFunc(all, func(p, q piece) int { return cmp.Compare(p.lo, q.lo) })
	var end [2]uintptr // of the pieces so far
	for _, p := range all {
		if p.lo < end[1-p.list] {
			return true
		}
		end[p.list] = max(end[p.list], p.hi)
	}
	return false
}

// copyRuns copies between two lists of pieces of the same total length.
func copyRuns(to, from [][]byte) {
	for len(to) > 0 && len(from) > 0 {
		n := copy(to[0], from[0])
		if to[0] = to[0][n:]; len(to[0]) == 0 {
			to = to[1:]
		}
		if from[0] = from[0][n:]; len(from[0]) == 0 {
			from = from[1:]
		}
	}
}

// fillTask repeats a pattern over n bytes, which are a multiple of its length.
func (m *Machine) fillTask(call driver.Call, dst place, pattern []byte, n uint64) task {
	return task{run: func(at site) *fault {
		to, f := m.pin(at, call, dst, n, driver.AccessReadWrite)
		if f != nil {
			return f
		}
		defer to.release()
		// Pieces are whole pages or whole words, so no pattern is cut.
		for _, b := range to.runs {
			done := copy(b, pattern)
			for done < len(b) {
				done += copy(b[done:], b[:done])
			}
		}
		return nil
	}}
}

func (a *api) MemcpyHtoDAsync(c driver.Context, dst driver.Ptr, src unsafe.Pointer, n uint64, h driver.Stream) driver.Result {
	return a.copyFromHost(driver.CallMemcpyHtoDAsync, c, dst, src, n, h, false)
}

func (a *api) MemcpyDtoHAsync(c driver.Context, dst unsafe.Pointer, src driver.Ptr, n uint64, h driver.Stream) driver.Result {
	return a.copyToHost(driver.CallMemcpyDtoHAsync, c, dst, src, n, h, false)
}

func (a *api) MemcpyDtoDAsync(c driver.Context, dst, src driver.Ptr, n uint64, h driver.Stream) driver.Result {
	return a.copyDevice(driver.CallMemcpyDtoDAsync, c, dst, src, n, h)
}

func (a *api) MemcpyBatchAsync(c driver.Context, dst, src []driver.Ptr, sizes []uint64, attrs []driver.CopyAttributes, first []uint64, h driver.Stream) driver.Result {
	const call = driver.CallMemcpyBatchAsync
	s, r := a.enterStream(call, c, h)
	if r != driver.Success {
		return r
	}
	defer a.leave()
	if s.isLegacy() || len(dst) == 0 || len(src) != len(dst) || len(sizes) != len(dst) || len(attrs) == 0 || len(attrs) > len(dst) || len(first) != len(attrs) {
		return driver.InvalidValue
	}
	for i, k := range first {
		if attrs[i].Order != driver.CopyInStreamOrder || i == 0 && k != 0 || i > 0 && k <= first[i-1] || k >= uint64(len(dst)) {
			return driver.InvalidValue
		}
	}
	copies := make([]task, len(dst))
	for i, n := range sizes {
		if n == 0 {
			return driver.InvalidValue
		}
		// An address that the real driver does not know is host memory to it, and where there is none the
		// process ends within the call. Here the work faults.
		copies[i] = a.m.copyTask(call, place{addr: uint64(dst[i])}, place{addr: uint64(src[i])}, n)
	}
	if r := s.refuseCapture(); r != driver.Success {
		return r
	}
	_, r = s.submit(task{run: func(at site) *fault {
		for _, t := range copies {
			if f := t.run(at); f != nil {
				return f
			}
		}
		return nil
	}})
	return r
}

func (a *api) MemsetD8Async(c driver.Context, dst driver.Ptr, v uint8, n uint64, h driver.Stream) driver.Result {
	return a.fill(driver.CallMemsetD8Async, c, dst, []byte{v}, n, h, false)
}

func (a *api) MemsetD32Async(c driver.Context, dst driver.Ptr, v uint32, words uint64, h driver.Stream) driver.Result {
	return a.fill(driver.CallMemsetD32Async, c, dst, binary.NativeEndian.AppendUint32(nil, v), words, h, false)
}

// The synchronous calls work on the legacy stream. Copies from pinned memory, all copies to
// the host, and fills of memory that the host sees return when they are done. The other
// calls need not wait for their work, and do not.

func (a *api) MemcpyHtoD(c driver.Context, dst driver.Ptr, src unsafe.Pointer, n uint64) driver.Result {
	return a.copyFromHost(driver.CallMemcpyHtoD, c, dst, src, n, driver.StreamLegacy, true)
}

func (a *api) MemcpyDtoH(c driver.Context, dst unsafe.Pointer, src driver.Ptr, n uint64) driver.Result {
	return a.copyToHost(driver.CallMemcpyDtoH, c, dst, src, n, driver.StreamLegacy, true)
}

func (a *api) MemcpyDtoD(c driver.Context, dst, src driver.Ptr, n uint64) driver.Result {
	return a.copyDevice(driver.CallMemcpyDtoD, c, dst, src, n, driver.StreamLegacy)
}

func (a *api) MemsetD8(c driver.Context, dst driver.Ptr, v uint8, n uint64) driver.Result {
	return a.fill(driver.CallMemsetD8, c, dst, []byte{v}, n, driver.StreamLegacy, true)
}

// copyFromHost reads pageable memory before it returns, and memory that the driver knows
// when the work is done, for which a synchronous copy waits.
func (a *api) copyFromHost(call driver.Call, c driver.Context, dst driver.Ptr, src unsafe.Pointer, n uint64, h driver.Stream, synchronous bool) driver.Result {
	s, r := a.enterStream(call, c, h)
	if r != driver.Success {
		return r
	}
	defer a.leave()
	switch {
	case n == 0:
		return driver.Success
	case src == nil || a.m.missing(call, uint64(dst), n):
		return driver.InvalidValue
	}
	from, pageable := a.m.hostPlace(src, n)
	if pageable && s.joined == nil {
		from.bytes = bytes.Clone(from.bytes)
	}
	return s.submitAndWait(a.m.copyTask(call, place{addr: uint64(dst)}, from, n), synchronous && !pageable)
}

// copyToHost waits for the copy if it is synchronous or the memory is pageable.
func (a *api) copyToHost(call driver.Call, c driver.Context, dst unsafe.Pointer, src driver.Ptr, n uint64, h driver.Stream, synchronous bool) driver.Result {
	s, r := a.enterStream(call, c, h)
	if r != driver.Success {
		return r
	}
	defer a.leave()
	switch {
	case n == 0:
		return driver.Success
	case dst == nil || a.m.missing(call, uint64(src), n):
		return driver.InvalidValue
	}
	to, pageable := a.m.hostPlace(dst, n)
	return s.submitAndWait(a.m.copyTask(call, to, place{addr: uint64(src)}, n), synchronous || pageable)
}

// submitAndWait submits work, and waits for it if wait is set and the stream does not
// capture.
func (s *stream) submitAndWait(t task, wait bool) driver.Result {
	o, r := s.submit(t)
	if o == nil || !wait {
		return r
	}
	s.m.await(o)
	return s.m.outcome(s.context)
}

func (a *api) copyDevice(call driver.Call, c driver.Context, dst, src driver.Ptr, n uint64, h driver.Stream) driver.Result {
	s, r := a.enterStream(call, c, h)
	if r != driver.Success {
		return r
	}
	defer a.leave()
	switch {
	case n == 0:
		return driver.Success
	case a.m.missing(call, uint64(dst), n) || a.m.missing(call, uint64(src), n):
		return driver.InvalidValue
	}
	_, r = s.submit(a.m.copyTask(call, place{addr: uint64(dst)}, place{addr: uint64(src)}, n))
	return r
}

// fill writes a pattern so many times, to an address that is aligned to it.
func (a *api) fill(call driver.Call, c driver.Context, dst driver.Ptr, pattern []byte, times uint64, h driver.Stream, synchronous bool) driver.Result {
	s, r := a.enterStream(call, c, h)
	if r != driver.Success {
		return r
	}
	defer a.leave()
	size := uint64(len(pattern))
	switch {
	case uint64(dst)%size != 0 || times > ^uint64(0)/size:
		return driver.InvalidValue
	case times == 0:
		return driver.Success
	case a.m.missing(call, uint64(dst), times*size):
		return driver.InvalidValue
	}
	at, ok := a.m.backing.find(uint64(dst))
	wait := synchronous && ok && (at.v.host != nil || at.v.managed != nil)
	return s.submitAndWait(a.m.fillTask(call, place{addr: uint64(dst)}, pattern, times*size), wait)
}
