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
	s, r := a.enterStream(driver.CallMemcpyHtoDAsync, c, h)
	if r != driver.Success {
		return r
	}
	defer a.leave()
	_, _, r = s.copyFromHost(driver.CallMemcpyHtoDAsync, dst, src, n)
	return r
}

func (a *api) MemcpyDtoHAsync(c driver.Context, dst unsafe.Pointer, src driver.Ptr, n uint64, h driver.Stream) driver.Result {
	s, r := a.enterStream(driver.CallMemcpyDtoHAsync, c, h)
	if r != driver.Success {
		return r
	}
	defer a.leave()
	o, pageable, r := s.copyToHost(driver.CallMemcpyDtoHAsync, dst, src, n)
	if o == nil || !pageable {
		return r
	}
	a.m.await(o)
	return a.m.outcome(s.context)
}

func (a *api) MemcpyDtoDAsync(c driver.Context, dst, src driver.Ptr, n uint64, h driver.Stream) driver.Result {
	s, r := a.enterStream(driver.CallMemcpyDtoDAsync, c, h)
	if r != driver.Success {
		return r
	}
	defer a.leave()
	return s.copyDevice(driver.CallMemcpyDtoDAsync, dst, src, n)
}

func (a *api) MemsetD8Async(c driver.Context, dst driver.Ptr, v uint8, n uint64, h driver.Stream) driver.Result {
	s, r := a.enterStream(driver.CallMemsetD8Async, c, h)
	if r != driver.Success {
		return r
	}
	defer a.leave()
	return s.fill(driver.CallMemsetD8Async, dst, []byte{v}, n)
}

func (a *api) MemsetD32Async(c driver.Context, dst driver.Ptr, v uint32, words uint64, h driver.Stream) driver.Result {
	s, r := a.enterStream(driver.CallMemsetD32Async, c, h)
	if r != driver.Success {
		return r
	}
	defer a.leave()
	if dst%4 != 0 || words > ^uint64(0)/4 {
		return driver.InvalidValue
	}
	return s.fill(driver.CallMemsetD32Async, dst, binary.NativeEndian.AppendUint32(nil, v), 4*words)
}

// The synchronous calls work on the legacy stream. Copies to pageable host
// memory and pinned copies wait until they have landed; the others need not,
// and do not.

func (a *api) MemcpyHtoD(c driver.Context, dst driver.Ptr, src unsafe.Pointer, n uint64) driver.Result {
	s, r := a.enterStream(driver.CallMemcpyHtoD, c, driver.StreamLegacy)
	if r != driver.Success {
		return r
	}
	defer a.leave()
	o, pageable, r := s.copyFromHost(driver.CallMemcpyHtoD, dst, src, n)
	if o == nil || pageable {
		return r
	}
	a.m.await(o)
	return a.m.outcome(s.context)
}

func (a *api) MemcpyDtoH(c driver.Context, dst unsafe.Pointer, src driver.Ptr, n uint64) driver.Result {
	s, r := a.enterStream(driver.CallMemcpyDtoH, c, driver.StreamLegacy)
	if r != driver.Success {
		return r
	}
	defer a.leave()
	o, _, r := s.copyToHost(driver.CallMemcpyDtoH, dst, src, n)
	if o == nil {
		return r
	}
	a.m.await(o)
	return a.m.outcome(s.context)
}

func (a *api) MemcpyDtoD(c driver.Context, dst, src driver.Ptr, n uint64) driver.Result {
	s, r := a.enterStream(driver.CallMemcpyDtoD, c, driver.StreamLegacy)
	if r != driver.Success {
		return r
	}
	defer a.leave()
	return s.copyDevice(driver.CallMemcpyDtoD, dst, src, n)
}

func (a *api) MemsetD8(c driver.Context, dst driver.Ptr, v uint8, n uint64) driver.Result {
	s, r := a.enterStream(driver.CallMemsetD8, c, driver.StreamLegacy)
	if r != driver.Success {
		return r
	}
	defer a.leave()
	return s.fill(driver.CallMemsetD8, dst, []byte{v}, n)
}

// copyFromHost reads pageable memory before it returns, and memory that the
// driver knows when the work is done. There is no op if nothing is to be done
// now.
func (s *stream) copyFromHost(call driver.Call, dst driver.Ptr, src unsafe.Pointer, n uint64) (o *op, pageable bool, r driver.Result) {
	switch {
	case n == 0:
		return nil, false, driver.Success
	case src == nil || !s.m.covered(uint64(dst), n):
		return nil, false, driver.InvalidValue
	}
	from, pageable := s.m.hostPlace(src, n)
	if pageable && s.joined == nil {
		from.bytes = bytes.Clone(from.bytes)
	}
	o, r = s.submit(s.m.copyTask(call, place{addr: uint64(dst)}, from, n))
	return o, pageable, r
}

// copyToHost only submits: a copy to pageable memory must be waited for.
func (s *stream) copyToHost(call driver.Call, dst unsafe.Pointer, src driver.Ptr, n uint64) (o *op, pageable bool, r driver.Result) {
	switch {
	case n == 0:
		return nil, false, driver.Success
	case dst == nil || !s.m.covered(uint64(src), n):
		return nil, false, driver.InvalidValue
	}
	to, pageable := s.m.hostPlace(dst, n)
	o, r = s.submit(s.m.copyTask(call, to, place{addr: uint64(src)}, n))
	return o, pageable, r
}

func (s *stream) copyDevice(call driver.Call, dst, src driver.Ptr, n uint64) driver.Result {
	switch {
	case n == 0:
		return driver.Success
	case !s.m.covered(uint64(dst), n) || !s.m.covered(uint64(src), n):
		return driver.InvalidValue
	}
	_, r := s.submit(s.m.copyTask(call, place{addr: uint64(dst)}, place{addr: uint64(src)}, n))
	return r
}

func (s *stream) fill(call driver.Call, dst driver.Ptr, pattern []byte, n uint64) driver.Result {
	switch {
	case n == 0:
		return driver.Success
	case !s.m.covered(uint64(dst), n):
		return driver.InvalidValue
	}
	_, r := s.submit(s.m.fillTask(call, place{addr: uint64(dst)}, pattern, n))
	return r
}
