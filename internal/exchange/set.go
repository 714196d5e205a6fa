package exchange

import (
	"context"
	"time"

	"github.com/cuvmm/cuvmm/handles/peer"
	"github.com/cuvmm/cuvmm/internal/lock"
	"github.com/cuvmm/cuvmm/internal/phys"
	"github.com/cuvmm/cuvmm/internal/wire"
)

// Set has the open descriptors of memory that is being sent. Each is open only so long, since
// it pins the memory, and one serves all processes that it is sent to at the same time, since
// exporting is expensive.
type Set struct {
	// Followed: all receivers unmap the memory when they are told, and say so.
	Followed bool

	mu  lock.Mutex[lock.Leaf]
	all map[uint64]*peer.FD  // of memory that is present, by its identity
	by  map[*peer.FD]*opened // all that are open, also of memory that was taken since
}

type opened struct {
	id    uint64
	users int
}

// Open returns a descriptor of each handle, open ones or new ones, and waits for the
// budget. It holds no part of the budget while it waits, so that two callers cannot wait
// for each other. The caller closes the descriptors with Close.
func (e *Set) Open(ctx context.Context, op string, handles []*phys.Handle) ([]*peer.FD, error) {
	if len(handles) == 0 {
		return nil, nil
	}
	if fds := e.Share(handles); fds != nil {
		return fds, nil
	}
	if _, err := Exports.Acquire(ctx, op, len(handles), len(handles)); err != nil {
		return nil, err
	}
	return e.make(op, handles)
}

// OpenNow is Open without waiting: it returns nil if the budget is too small.
func (e *Set) OpenNow(op string, handles []*phys.Handle) ([]*peer.FD, error) {
	if len(handles) == 0 {
		return nil, nil
	}
	if ok, err := Exports.try(op, len(handles)); !ok {
		return nil, err
	}
	return e.make(op, handles)
}

// OpenSome is Open for the first of the handles: at most wire.MaxBatch, or fewer if the budget
// has no more. It waits for the budget at most for a limit.
func (e *Set) OpenSome(ctx context.Context, op string, handles []*phys.Handle, limit time.Duration) ([]*peer.FD, error) {
	n, err := Exports.takeWithin(ctx, op, min(len(handles), wire.MaxBatch), limit)
	if err != nil {
		return nil, err
	}
	return e.make(op, handles[:n])
}

// make is Open for a caller that has taken the budget for all.
func (e *Set) make(op string, handles []*phys.Handle) (fds []*peer.FD, err error) {
	budget := len(handles)
	defer func() {
		if budget > 0 {
			Exports.Give(budget)
		}
		if err != nil {
			e.Close(fds)
			fds = nil
		}
	}()
	for _, h := range handles {
		f := e.use(h, nil)
		if f == nil {
			made, err := Warm.export(op, h, e.Followed)
			if err != nil {
				return fds, err
			}
			if f = e.use(h, made); f == made {
				budget--
			} else {
				_ = made.Close() // another goroutine was faster
			}
		}
		fds = append(fds, f)
	}
	return fds, nil
}

// use counts a user of a handle's open descriptor, or else of made.
func (e *Set) use(h *phys.Handle, made *peer.FD) *peer.FD {
	e.mu.Lock()
	defer e.mu.Unlock()
	id := h.ID()
	f := e.all[id]
	switch {
	case f != nil:
		e.by[f].users++
		return f
	case made == nil:
		return nil
	}
	if e.all == nil {
		e.all, e.by = map[uint64]*peer.FD{}, map[*peer.FD]*opened{}
	}
	e.all[id], e.by[made] = made, &opened{id, 1}
	return made
}

// Share returns the descriptors of all handles, which the caller closes, if all are open,
// and otherwise nil.
func (e *Set) Share(handles []*phys.Handle) (fds []*peer.FD) {
	e.mu.Lock()
	defer e.mu.Unlock()
	for _, h := range handles {
		f := e.all[h.ID()]
		if f == nil {
			return nil
		}
		fds = append(fds, f)
	}
	for _, f := range fds {
		e.by[f].users++
	}
	return fds
}

// Close closes descriptors that another method returned, before their memory is released.
func (e *Set) Close(fds []*peer.FD) {
	var unused []*peer.FD
	e.mu.Lock()
	for _, f := range fds {
		x := e.by[f]
		if x.users--; x.users == 0 {
			unused = append(unused, f)
			delete(e.by, f)
			delete(e.all, x.id)
		}
	}
	e.mu.Unlock()
	for _, f := range unused {
		_ = f.Close() // even after an error the number is released
		Exports.Give(1)
	}
}
