//go:build linux && cgo && (amd64 || arm64) && !cuvmm_nocgo

package main

import (
	"errors"
	"fmt"
	"slices"
	"sync"
	"time"

	"github.com/cuvmm/cuvmm/cuda"
	"github.com/cuvmm/cuvmm/internal/core"
	"github.com/cuvmm/cuvmm/internal/driver"
	"github.com/cuvmm/cuvmm/internal/errs"
	"github.com/cuvmm/cuvmm/vmm/pool"
)

// arena is the memory of graphs that one owner captured. The entry's mu guards its
// fields.
type arena struct {
	arena *pool.Arena
	going map[uint64]*pool.Capture // by the driver's number
	kept  []*pool.Capture          // ended; their graphs may be launched
}

// released is an arena whose owner is done with it, until its memory is the pool's again.
type released struct {
	*arena
	mu   sync.Mutex // held over the wait for the device
	done bool
}

func (e *entry) openArena() (uint64, error) {
	a, err := e.pool.NewArena()
	if err != nil {
		return 0, err
	}
	e.mu.Lock()
	defer e.mu.Unlock()
	e.last++
	e.arenas[e.last] = &arena{arena: a, going: map[uint64]*pool.Capture{}}
	return e.last, nil
}

// joinCapture makes the arena serve the capture in which the stream takes part, if any.
func (e *entry) joinCapture(s *cuda.Stream, number uint64) error {
	e.mu.Lock()
	defer e.mu.Unlock()
	a := e.arenas[number]
	if a == nil {
		return errs.ClosedError("cuvmm_alloc", fmt.Sprintf("arena %d", number))
	}
	status, id, r := core.StreamOf(s).Capture()
	if r != driver.Success || status != driver.CaptureActive {
		return nil // Alloc reports a failure or a broken capture
	}
	if a.going[id] != nil {
		return nil
	}
	c, err := e.pool.BeginCapture(s, pool.CaptureOptions{Arena: a.arena})
	if err != nil {
		return err
	}
	a.going[id] = c
	return nil
}

func (e *entry) endArena(number uint64) (err error) {
	e.mu.Lock()
	defer e.mu.Unlock()
	a := e.arenas[number]
	if a == nil {
		return errs.ClosedError("cuvmm_arena_end", fmt.Sprintf("arena %d", number))
	}
	return a.end()
}

// end ends the captures in progress. The caller holds the entry's mu.
func (a *arena) end() (err error) {
	for id, c := range a.going {
		_, failed := c.End()
		err = errors.Join(err, failed)
		a.kept = append(a.kept, c)
		delete(a.going, id)
	}
	return err
}

// settling is how long the owner has to destroy its graphs after the release: PyTorch
// releases first. Nothing launches them any more, so a graph that is destroyed later does
// no harm.
const settling = 100 * time.Millisecond

// releaseArena returns the memory to the pool when the work that is in flight is done.
// The caller does not wait for that.
func (e *entry) releaseArena(number uint64) error {
	e.mu.Lock()
	a := e.arenas[number]
	if a == nil {
		e.mu.Unlock()
		return errs.ClosedError("cuvmm_arena_release", fmt.Sprintf("arena %d", number))
	}
	err := a.end()
	delete(e.arenas, number)
	r := &released{arena: a}
	e.released = append(e.released, r)
	e.mu.Unlock()
	background(func() {
		for pause := settling; ; pause = min(2*pause, time.Minute) {
			time.Sleep(pause)
			err := e.giveBack(r)
			if err == nil {
				return
			}
			core.SystemOf(e.dev).Config.Log.Error("cuvmm: the memory of released graphs stays with the pool, which tries again", "error", err)
		}
	})
	return err
}

// giveBack returns the memory of a released arena to the pool, after all work of the device.
func (e *entry) giveBack(r *released) error {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.done {
		return nil
	}
	err := core.SystemOf(e.dev).WaitDevices("cuvmm_arena_release", []driver.Device{driver.Device(e.dev.Ordinal())})
	if err != nil {
		return err
	}
	for _, c := range r.kept {
		err = errors.Join(err, c.Close())
	}
	if err = errors.Join(err, r.arena.arena.Close()); err != nil {
		return err
	}
	r.done = true
	e.mu.Lock()
	defer e.mu.Unlock()
	e.released = slices.DeleteFunc(e.released, func(o *released) bool { return o == r })
	return nil
}

// giveBackAll is giveBack for all released arenas: the pool is about to be closed, and an
// arena that its owner released must not keep it open.
func (e *entry) giveBackAll() (err error) {
	e.mu.Lock()
	all := slices.Clone(e.released)
	e.mu.Unlock()
	for _, r := range all {
		err = errors.Join(err, e.giveBack(r))
	}
	return err
}

// captures returns how many captures keep memory.
func (e *entry) captures() (n int) {
	e.mu.Lock()
	defer e.mu.Unlock()
	for _, a := range e.arenas {
		n += len(a.going) + len(a.kept)
	}
	return n
}
