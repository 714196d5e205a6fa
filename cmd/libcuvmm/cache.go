//go:build linux && cgo && (amd64 || arm64) && !cuvmm_nocgo

package main

// #include "cache.h"
// #include "front.h"
import "C"

import (
	"errors"
	"time"
	"unsafe"

	"github.com/cuvmm/cuvmm/cuda"
	"github.com/cuvmm/cuvmm/internal/core"
	"github.com/cuvmm/cuvmm/internal/driver"
	"github.com/cuvmm/cuvmm/internal/front"
)

// cacheBytes is how much a cache keeps at most: more than a training step of small layers
// frees before it requests it again.
const cacheBytes = 64 << 20

// cache is the C cache in front of a pool, as the pool sees it: a front.Cache.
type cache struct {
	c      *C.cuvmm_cache
	behind front.Pool
}

// newCache puts a cache in front of the pool with that number.
func newCache(number uint64, e *entry) (*cache, error) {
	sizes, large, of := e.behind.Classes()
	var capturing uintptr
	if d, ok := core.SystemOf(e.dev).Drv.(driver.Direct); ok {
		capturing = d.EntryPoint(driver.CallStreamIsCapturing)
	}
	c := C.cuvmm_cache_open(C.uint64_t(number), (*C.uint64_t)(&sizes[0]), C.size_t(len(sizes)), C.size_t(large), (*C.uint8_t)(&of[0]), C.size_t(len(of)), cacheBytes,
		C.uintptr_t(capturing))
	if c == nil {
		return nil, errors.New("cuvmm_pool_open: the host has no memory for the cache of blocks")
	}
	n := &cache{c, e.behind}
	e.behind.SetCache(n)
	return n, nil
}

func (c *cache) close() { C.cuvmm_cache_close(c.c) }

// closeStream gives back what is cached for a stream, and keeps nothing for it any more.
func (c *cache) closeStream(handle uintptr) {
	c.Hold(false)()
	C.cuvmm_cache_close_stream(c.c, C.uintptr_t(handle))
}

// Hold waits for blocks that other threads move, which need no lock that its caller may hold.
func (c *cache) Hold(exact bool) (release func()) {
	C.cuvmm_cache_hold(c.c)
	var room [C.CUVMM_BATCH]C.cuvmm_block
	for {
		moving := C.cuvmm_cache_moving(c.c)
		n := C.cuvmm_cache_drain(c.c, C.CUVMM_ALL, &room[0], C.size_t(len(room)))
		if n > 0 {
			c.behind.Free(blocksOf(&room[0], n))
			C.cuvmm_cache_moved(c.c)
		} else if moving == 0 {
			break
		} else {
			time.Sleep(10 * time.Microsecond)
		}
	}
	for at := C.uint32_t(0); exact; {
		n := C.cuvmm_cache_resized(c.c, &at, &room[0], C.size_t(len(room)))
		if n == 0 {
			break
		}
		c.behind.Resize(blocksOf(&room[0], n))
	}
	return func() { C.cuvmm_cache_release(c.c) }
}

func (c *cache) Bytes() uint64 { return uint64(C.cuvmm_cache_bytes(c.c)) }

func (c *cache) rounds() int { return int(C.cuvmm_cache_rounds(c.c)) }

// GiveLarge leaves what other threads carry to them.
func (c *cache) GiveLarge() {
	var room [C.CUVMM_BATCH]C.cuvmm_block
	for {
		n := C.cuvmm_cache_drain(c.c, C.CUVMM_LARGE, &room[0], C.size_t(len(room)))
		if n == 0 {
			return
		}
		c.behind.Free(blocksOf(&room[0], n))
		C.cuvmm_cache_moved(c.c)
	}
}

func (c *cache) Counts() front.Counts {
	n := C.cuvmm_cache_counts(c.c)
	return front.Counts{Requested: int(n.requested), PeakRequested: int(n.peak_requested), Blocks: int(n.blocks), PeakBlocks: int(n.peak_blocks),
		Allocs: int(n.allocs), Frees: int(n.frees), AllocatedBytes: int(n.requested_total)}
}

func (c *cache) ResetPeaks() { C.cuvmm_cache_reset_peaks(c.c) }

// serve is alloc for the cache, which gets some more blocks like it if it keeps such blocks.
func (e *entry) serve(bytes int, stream uintptr, arena uint64, got *C.cuvmm_got) error {
	b, class, err := e.alloc(bytes, stream, arena)
	if err != nil {
		return err
	}
	got.block = C.cuvmm_block{ptr: C.uint64_t(b.Ptr), gen: C.uint64_t(b.Gen), bytes: C.uint64_t(b.Bytes)}
	got.size_class, got.more = C.CUVMM_NO_CLASS, 0
	if class < 0 {
		return nil
	}
	got.size_class = C.int32_t(class)
	if n := C.cuvmm_cache_wants(e.cache.c, C.uintptr_t(stream), got.size_class); n > 0 {
		s, err := e.stream(stream)
		if err == nil {
			n = C.int32_t(e.behind.More(class, s, blocksOf(&got.extra[0], C.size_t(n))))
		}
		if got.more = n; n == 0 {
			C.cuvmm_cache_moved(e.cache.c)
		}
	}
	return nil
}

// unlessCapturing fails if the stream captures, or if that is unknown.
func (e *entry) unlessCapturing(stream uintptr) error {
	s, err := e.stream(stream)
	if err != nil {
		return err
	}
	capturing, r := core.StreamOf(s).Capturing()
	switch {
	case r != driver.Success:
		return core.StreamOf(s).Ctx.CallError("cuvmm_alloc", driver.CallStreamIsCapturing, r, "a stream")
	case capturing:
		return cuda.ErrCapturing
	}
	return nil
}

// blocksOf is C's list of blocks, whose layout is Go's.
func blocksOf(first *C.cuvmm_block, n C.size_t) []front.Block {
	return unsafe.Slice((*front.Block)(unsafe.Pointer(first)), n)
}

var _ [unsafe.Sizeof(front.Block{})]byte = [unsafe.Sizeof(C.cuvmm_block{})]byte{}
