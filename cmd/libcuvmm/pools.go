//go:build linux && cgo && (amd64 || arm64) && !cuvmm_nocgo

package main

import (
	"errors"
	"fmt"
	"maps"
	"slices"
	"sync"
	"sync/atomic"

	"github.com/cuvmm/cuvmm/cuda"
	"github.com/cuvmm/cuvmm/cuda/auto"
	"github.com/cuvmm/cuvmm/internal/driver"
	"github.com/cuvmm/cuvmm/internal/errs"
	"github.com/cuvmm/cuvmm/internal/front"
	"github.com/cuvmm/cuvmm/vmm"
	"github.com/cuvmm/cuvmm/vmm/pool"
)

// entry is a pool with what C callers name by numbers: streams, blocks that further
// streams use, arenas and segments.
type entry struct {
	dev    *cuda.Device
	pool   *pool.Pool
	behind front.Pool // the same, for the cache
	cache  *cache     // in front of it

	// streams are borrowed when they are first named, until closeStream or the pool's
	// end. The map is replaced, so that no call needs a lock to read it.
	streams atomic.Pointer[map[uintptr]*cuda.Stream]
	refused atomic.Int64 // requests that found no memory

	mu       sync.Mutex
	used     map[uintptr][]*cuda.Stream // blocks that further streams use
	marked   atomic.Int64               // len(used)
	arenas   map[uint64]*arena
	released []*released
	last     uint64 // the number of the latest arena
	segments map[uintptr]*vmm.Buffer
	ranges   map[uintptr]*grown
	closed   bool // to new segments and ranges
	peers    []vmm.Access
}

var (
	open   sync.Mutex                        // while a pool is opened or closed
	sys    *cuda.System                      // opened with the first pool, and never closed
	pools  atomic.Pointer[map[uint64]*entry] // replaced at each change
	serial uint64
)

func poolOf(handle uint64) (*entry, error) {
	if all := pools.Load(); all != nil {
		if p := (*all)[handle]; p != nil {
			return p, nil
		}
	}
	return nil, errs.ClosedError("cuvmm", fmt.Sprintf("pool %d", handle))
}

// changeLocked replaces the table. The caller has open.
func changeLocked(change func(map[uint64]*entry)) {
	next := map[uint64]*entry{}
	if all := pools.Load(); all != nil {
		maps.Copy(next, *all)
	}
	change(next)
	pools.Store(&next)
}

func openPool(device, limit int, tag cuda.Tag) (handle uint64, err error) {
	err = whileAwake("cuvmm_pool_open", tag, func() error {
		open.Lock()
		defer open.Unlock()
		handle, err = openPoolLocked(device, limit, tag)
		return err
	})
	return handle, err
}

// openPoolLocked is openPool of a tag that is awake. The caller has open.
func openPoolLocked(device, limit int, tag cuda.Tag) (uint64, error) {
	if sys == nil {
		s, err := auto.Open(auto.Options{})
		if err != nil {
			return 0, err
		}
		sys = s
	}
	dev, err := sys.Device(device)
	if err != nil {
		return 0, err
	}
	p, err := pool.New(dev, pool.Options{Limit: limit, Tag: tag})
	if err != nil {
		return 0, err
	}
	e := &entry{dev: dev, pool: p, behind: front.Of(p), used: map[uintptr][]*cuda.Stream{}, arenas: map[uint64]*arena{}, segments: map[uintptr]*vmm.Buffer{}, ranges: map[uintptr]*grown{}}
	e.streams.Store(&map[uintptr]*cuda.Stream{})
	if all := pools.Load(); all != nil {
		for _, other := range *all {
			if err := errors.Join(e.grant(other.dev), other.grant(dev)); err != nil {
				return 0, errors.Join(err, p.Close()) // an empty pool, which has nothing of the driver's
			}
		}
	}
	serial++
	if e.cache, err = newCache(serial, e); err != nil {
		return 0, errors.Join(err, p.Close())
	}
	changeLocked(func(all map[uint64]*entry) { all[serial] = e })
	return serial, nil
}

// grant lets another device of the process access the memory of the pool and its segments,
// if it can: programs copy between the devices that they use.
func (e *entry) grant(peer *cuda.Device) error {
	if peer == e.dev {
		return nil
	}
	if can, err := peer.CanAccess(e.dev); err != nil || !can {
		return err
	}
	access := vmm.Access{Location: peer.Location(), Mode: vmm.ReadWrite}
	if err := e.pool.Grant(access); err != nil {
		return err
	}
	e.mu.Lock()
	defer e.mu.Unlock()
	if slices.Contains(e.peers, access) {
		return nil
	}
	for _, b := range e.segments {
		if err := b.SetAccess(access); err != nil {
			return err
		}
	}
	e.peers = append(e.peers, access)
	return nil
}

func closePool(handle uint64) error {
	open.Lock()
	defer open.Unlock()
	e, err := poolOf(handle)
	if err != nil {
		return err
	}
	if err := e.endSegments(); err != nil {
		return err
	}
	err = e.giveBackAll()
	if err == nil {
		err = e.pool.Close()
	}
	if err != nil {
		e.mu.Lock()
		e.closed = false
		e.mu.Unlock()
		return err
	}
	for _, s := range *e.streams.Load() {
		err = errors.Join(err, s.Close())
	}
	if err != nil {
		return err // closing the pool again closes the other streams
	}
	changeLocked(func(all map[uint64]*entry) { delete(all, handle) })
	e.cache.close()
	return err
}

// stream borrows a stream by its handle.
func (e *entry) stream(handle uintptr) (*cuda.Stream, error) {
	if s := (*e.streams.Load())[handle]; s != nil {
		return s, nil
	}
	e.mu.Lock()
	defer e.mu.Unlock()
	known := *e.streams.Load()
	if s := known[handle]; s != nil {
		return s, nil
	}
	s, err := e.dev.BorrowStream(handle)
	if err != nil {
		return nil, err
	}
	next := maps.Clone(known)
	next[handle] = s
	e.streams.Store(&next)
	return s, nil
}

// closeStream gives back a stream that its owner is about to destroy. A stream that is
// made later may have the same handle, and must not count as this one.
func (e *entry) closeStream(handle uintptr) error {
	e.mu.Lock()
	s := (*e.streams.Load())[handle]
	if s != nil {
		next := maps.Clone(*e.streams.Load())
		delete(next, handle)
		e.streams.Store(&next)
	}
	e.mu.Unlock()
	if s == nil {
		return nil
	}
	e.cache.closeStream(handle)
	return s.Close()
}

func (e *entry) alloc(bytes int, stream uintptr, arena uint64) (b front.Block, class int, err error) {
	s, err := e.stream(stream)
	if err != nil {
		return b, -1, err
	}
	if arena != 0 {
		if err := e.joinCapture(s, arena); err != nil {
			return b, -1, err
		}
	}
	b, class, err = e.behind.Alloc(bytes, s, e.cache.rounds())
	if errors.Is(err, cuda.ErrOutOfMemory) || errors.Is(err, cuda.ErrBudget) || errors.Is(err, cuda.ErrOutOfAddressSpace) {
		e.refused.Add(1)
		err = e.exhausted(bytes, err)
	}
	return b, class, err
}

// exhausted words the error as PyTorch does, since programs look for that text.
func (e *entry) exhausted(bytes int, err error) error {
	s := e.pool.Stats()
	free := "an unknown amount"
	if n, _, failed := e.dev.MemoryInfo(); failed == nil {
		free = rounded(uint64(n))
	}
	return fmt.Errorf("CUDA out of memory. Tried to allocate %s. GPU %d has a total capacity of %s of which %s is free. The pool has %s, of which %s are in use: %w",
		rounded(uint64(bytes)), e.dev.Ordinal(), rounded(uint64(e.dev.TotalMemory())), free, rounded(uint64(s.Reserved)), rounded(uint64(s.Requested)), err)
}

// rounded formats a size as PyTorch does.
func rounded(n uint64) string {
	switch {
	case n < 1<<10:
		return fmt.Sprintf("%d bytes", n)
	case n < 1<<20:
		return fmt.Sprintf("%.2f KiB", float64(n)/(1<<10))
	case n < 1<<30:
		return fmt.Sprintf("%.2f MiB", float64(n)/(1<<20))
	}
	return fmt.Sprintf("%.2f GiB", float64(n)/(1<<30))
}

func (e *entry) free(block uintptr) error {
	var streams []*cuda.Stream
	if e.marked.Load() > 0 {
		e.mu.Lock()
		streams = e.used[block]
		delete(e.used, block)
		e.marked.Store(int64(len(e.used)))
		e.mu.Unlock()
	}
	return e.pool.FreePtr(cuda.Ptr(block), streams...)
}

// use notes that a further stream uses a live block.
func (e *entry) use(block, stream uintptr) error {
	all, err := e.users(stream)
	if err != nil {
		return err
	}
	e.mu.Lock()
	defer e.mu.Unlock()
	for _, s := range all {
		if !slices.Contains(e.used[block], s) {
			e.used[block] = append(e.used[block], s)
		}
	}
	e.marked.Store(int64(len(e.used)))
	return nil
}

// users returns the streams that a handle may mean: one of this device, or of another that has a pool
// in the process, which then borrows it. The handle of the legacy stream names no device, so it is
// all of theirs.
func (e *entry) users(handle uintptr) ([]*cuda.Stream, error) {
	s, err := e.stream(handle)
	legacy := driver.Stream(handle) == driver.StreamNull || driver.Stream(handle) == driver.StreamLegacy
	if err == nil && !legacy {
		return []*cuda.Stream{s}, nil
	}
	var found []*cuda.Stream
	if err == nil {
		found = append(found, s)
	}
	for _, other := range *pools.Load() {
		if other.dev == e.dev || !e.grants(other.dev) {
			continue // it cannot use the block
		}
		if s, failed := other.stream(handle); failed == nil {
			found = append(found, s)
		}
	}
	if len(found) == 0 {
		return nil, err
	}
	return found, nil
}

// grants reports whether another device of the process has access to the pool's memory.
func (e *entry) grants(peer *cuda.Device) bool {
	e.mu.Lock()
	defer e.mu.Unlock()
	return slices.ContainsFunc(e.peers, func(a vmm.Access) bool { return a.Location == peer.Location() })
}
