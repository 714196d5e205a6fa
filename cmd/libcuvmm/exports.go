//go:build linux && cgo && (amd64 || arm64) && !cuvmm_nocgo

package main

// #include <stdlib.h>
// #include "cache.h"
// #include "front.h"
import "C"

import (
	"encoding/json"
	"fmt"
	"hash/crc32"
	"time"
	"unsafe"

	"github.com/cuvmm/cuvmm/cuda"
	"github.com/cuvmm/cuvmm/internal/errs"
	"github.com/cuvmm/cuvmm/vmm"
	"github.com/cuvmm/cuvmm/vmm/pool"
)

// The C front calls these, with pointers that it has checked. Each returns a status, and
// fills in the error if that is not CUVMM_OK.

//export goPoolOpen
func goPoolOpen(device C.int32_t, limit C.int64_t, tag *C.char, out *C.uint64_t, e *C.cuvmm_error) C.int32_t {
	return call(e, func() error {
		p, err := openPool(int(device), int(limit), tagOf(tag))
		*out = C.uint64_t(p)
		return err
	})
}

//export goPoolClose
func goPoolClose(pool C.uint64_t, e *C.cuvmm_error) C.int32_t {
	return call(e, func() error { return closePool(uint64(pool)) })
}

//export goAlloc
func goAlloc(pool C.uint64_t, bytes C.size_t, stream C.uintptr_t, arena C.uint64_t, got *C.cuvmm_got, e *C.cuvmm_error) C.int32_t {
	return onPool(pool, e, func(p *entry) error {
		return p.serve(int(bytes), uintptr(stream), uint64(arena), got)
	})
}

//export goCaptures
func goCaptures(pool C.uint64_t, stream C.uintptr_t) C.int32_t {
	return onPool(pool, nil, func(p *entry) error { return p.unlessCapturing(uintptr(stream)) })
}

//export goFree
func goFree(pool C.uint64_t, block C.uintptr_t, e *C.cuvmm_error) C.int32_t {
	return onPool(pool, e, func(p *entry) error {
		return p.free(uintptr(block))
	})
}

//export goFreeBlocks
func goFreeBlocks(pool C.uint64_t, blocks *C.cuvmm_block, n C.size_t) C.int32_t {
	return onPool(pool, nil, func(p *entry) error {
		p.behind.Free(blocksOf(blocks, n))
		return nil
	})
}

//export goNotLive
func goNotLive(pool C.uint64_t, block C.uintptr_t, e *C.cuvmm_error) C.int32_t {
	return onPool(pool, e, func(p *entry) error { return p.behind.NotLive(uint64(block)) })
}

//export goUse
func goUse(pool C.uint64_t, block, stream C.uintptr_t, e *C.cuvmm_error) C.int32_t {
	return onPool(pool, e, func(p *entry) error {
		return p.use(uintptr(block), uintptr(stream))
	})
}

//export goFind
func goFind(pool C.uint64_t, block C.uintptr_t, e *C.cuvmm_error) C.int32_t {
	return onPool(pool, e, func(*entry) error {
		return errs.Invalid("cuvmm_find", fmt.Sprintf("no live block begins at %#x", uintptr(block)), "pass the address that cuvmm_alloc gave")
	})
}

//export goTrim
func goTrim(pool C.uint64_t, freed *C.uint64_t, e *C.cuvmm_error) C.int32_t {
	return onPool(pool, e, func(p *entry) error {
		n, err := p.pool.Trim(0)
		*freed = C.uint64_t(n)
		return err
	})
}

//export goSetLimit
func goSetLimit(pool C.uint64_t, bytes C.int64_t, e *C.cuvmm_error) C.int32_t {
	return onPool(pool, e, func(p *entry) error {
		return p.pool.SetLimit(int(bytes))
	})
}

//export goTotalMemory
func goTotalMemory(pool C.uint64_t, out *C.size_t, e *C.cuvmm_error) C.int32_t {
	return onPool(pool, e, func(p *entry) error {
		*out = C.size_t(p.dev.TotalMemory())
		return nil
	})
}

//export goStats
func goStats(pool C.uint64_t, out *C.cuvmm_stats, e *C.cuvmm_error) C.int32_t {
	return onPool(pool, e, func(p *entry) error {
		s := p.pool.Stats()
		out.requested, out.peak_requested = C.uint64_t(s.Requested), C.uint64_t(s.PeakRequested)
		out.requested_total = C.uint64_t(s.AllocatedBytes)
		out.reserved, out.peak_reserved = C.uint64_t(s.Reserved), C.uint64_t(s.PeakReserved)
		out.blocks, out.peak_blocks = C.uint64_t(s.Blocks), C.uint64_t(s.PeakBlocks)
		out.allocs, out.frees = C.uint64_t(s.Allocs), C.uint64_t(s.Frees)
		out.limit, out.captures = C.uint64_t(s.Limit), C.uint64_t(p.captures())
		out.waiting, out.refused = C.uint64_t(s.Waiting), C.uint64_t(p.refused.Load())
		return nil
	})
}

//export goResetPeaks
func goResetPeaks(pool C.uint64_t, e *C.cuvmm_error) C.int32_t {
	return onPool(pool, e, func(p *entry) error {
		p.pool.ResetPeaks()
		return nil
	})
}

//export goRecordHistory
func goRecordHistory(handle, events C.uint64_t, e *C.cuvmm_error) C.int32_t {
	return onPool(handle, e, func(p *entry) error {
		if events == 0 {
			p.pool.StopHistory()
		} else {
			p.pool.StartHistory(pool.HistoryOptions{Events: int(events)})
		}
		return nil
	})
}

//export goSnapshot
func goSnapshot(pool C.uint64_t, to *C.char, n *C.size_t, e *C.cuvmm_error) C.int32_t {
	return onPool(pool, e, func(p *entry) error { return fillJSON(to, n, p.pool.Snapshot()) })
}

//export goTorchSnapshot
func goTorchSnapshot(to *C.char, n *C.size_t, e *C.cuvmm_error) C.int32_t {
	return call(e, func() error {
		text, err := torchSnapshot()
		if err == nil {
			fill(to, n, text)
		}
		return err
	})
}

// fill copies text to the caller's buffer if it fits, and says how long it is.
func fill(to *C.char, n *C.size_t, text []byte) {
	if int(*n) >= len(text) {
		copy(unsafe.Slice((*byte)(unsafe.Pointer(to)), len(text)), text)
	}
	*n = C.size_t(len(text))
}

//export goStreamClose
func goStreamClose(pool C.uint64_t, stream C.uintptr_t, e *C.cuvmm_error) C.int32_t {
	return onPool(pool, e, func(p *entry) error {
		return p.closeStream(uintptr(stream))
	})
}

//export goArenaOpen
func goArenaOpen(pool C.uint64_t, out *C.uint64_t, e *C.cuvmm_error) C.int32_t {
	return onPool(pool, e, func(p *entry) error {
		n, err := p.openArena()
		*out = C.uint64_t(n)
		return err
	})
}

//export goArenaEnd
func goArenaEnd(pool, arena C.uint64_t, e *C.cuvmm_error) C.int32_t {
	return onPool(pool, e, func(p *entry) error {
		return p.endArena(uint64(arena))
	})
}

//export goArenaRelease
func goArenaRelease(pool, arena C.uint64_t, e *C.cuvmm_error) C.int32_t {
	return onPool(pool, e, func(p *entry) error {
		return p.releaseArena(uint64(arena))
	})
}

//export goSegmentAlloc
func goSegmentAlloc(pool C.uint64_t, bytes C.size_t, tag *C.char, out *C.uintptr_t, e *C.cuvmm_error) C.int32_t {
	return onPool(pool, e, func(p *entry) error {
		ptr, err := p.newSegment(int(bytes), tagOf(tag))
		*out = C.uintptr_t(ptr)
		return err
	})
}

//export goSegmentFree
func goSegmentFree(pool C.uint64_t, segment, stream C.uintptr_t, e *C.cuvmm_error) C.int32_t {
	return onPool(pool, e, func(p *entry) error {
		return p.freeSegment(uintptr(segment), uintptr(stream))
	})
}

//export goRangeOpen
func goRangeOpen(pool C.uint64_t, bytes, page C.size_t, null C.int32_t, tag *C.char, out *C.uintptr_t, e *C.cuvmm_error) C.int32_t {
	return onPool(pool, e, func(p *entry) error {
		ptr, err := p.newRange(int(bytes), int(page), null != 0, tagOf(tag))
		*out = C.uintptr_t(ptr)
		return err
	})
}

//export goRangeCommit
func goRangeCommit(pool C.uint64_t, ptr C.uintptr_t, bytes C.size_t, stream C.uintptr_t, e *C.cuvmm_error) C.int32_t {
	return onPool(pool, e, func(p *entry) error {
		r, err := p.rangeAt("cuvmm_range_commit", uintptr(ptr))
		if err != nil {
			return err
		}
		on, err := p.stream(uintptr(stream))
		if err != nil {
			return err
		}
		return r.commit(int(bytes), on)
	})
}

//export goRangeRelease
func goRangeRelease(pool C.uint64_t, ptr C.uintptr_t, bytes C.size_t, e *C.cuvmm_error) C.int32_t {
	return onPool(pool, e, func(p *entry) error {
		r, err := p.rangeAt("cuvmm_range_release", uintptr(ptr))
		if err != nil {
			return err
		}
		return r.release(int(bytes))
	})
}

//export goRangeClose
func goRangeClose(pool C.uint64_t, ptr C.uintptr_t, e *C.cuvmm_error) C.int32_t {
	return onPool(pool, e, func(p *entry) error { return p.closeRange(uintptr(ptr)) })
}

func tagOf(tag *C.char) cuda.Tag { return cuda.Tag(C.GoString(tag)) }

func tagsOf(all **C.char, n C.size_t) []cuda.Tag {
	named := make([]cuda.Tag, n)
	for i, t := range unsafe.Slice(all, n) {
		named[i] = tagOf(t)
	}
	return named
}

//export goSuspend
func goSuspend(all **C.char, n C.size_t, drop, guard C.int32_t, out *C.cuvmm_suspended, e *C.cuvmm_error) C.int32_t {
	return call(e, func() error {
		o := vmm.SuspendOptions{Guard: guard != 0}
		if drop != 0 {
			o.Keep = vmm.Drop
		}
		r, err := suspendTags("cuvmm_suspend", tagsOf(all, n), o)
		out.given, out.held, out.host = C.uint64_t(r.Given), C.uint64_t(r.Held), C.uint64_t(r.Host)
		return err
	})
}

//export goResume
func goResume(all **C.char, n C.size_t, milliseconds C.int64_t, e *C.cuvmm_error) C.int32_t {
	return call(e, func() error {
		return resumeTags(tagsOf(all, n), time.Duration(milliseconds)*time.Millisecond)
	})
}

//export goDiscard
func goDiscard(all **C.char, n C.size_t, e *C.cuvmm_error) C.int32_t {
	return call(e, func() error { return discardTags(tagsOf(all, n)) })
}

//export goTags
func goTags(to *C.char, n *C.size_t, e *C.cuvmm_error) C.int32_t {
	return call(e, func() error { return fillJSON(to, n, describeTags()) })
}

//export goCRC32C
func goCRC32C(data unsafe.Pointer, n C.size_t, sum *C.uint32_t, e *C.cuvmm_error) C.int32_t {
	return call(e, func() error {
		*sum = C.uint32_t(crc32.Checksum(unsafe.Slice((*byte)(data), int(n)), castagnoli))
		return nil
	})
}

var castagnoli = crc32.MakeTable(crc32.Castagnoli)

// fillJSON is fill with a value as JSON, and a NUL.
func fillJSON(to *C.char, n *C.size_t, v any) error {
	text, err := json.Marshal(v)
	if err == nil {
		fill(to, n, append(text, 0))
	}
	return err
}
