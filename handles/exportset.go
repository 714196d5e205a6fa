package handles

import (
	"context"
	"sync"

	"github.com/cuvmm/cuvmm/internal/phys"
)

// exportSet are the descriptors of a publication's memory that are open now:
// each only while it is being sent, and one for all followers that are sent it
// at the same time, since making one is dear and keeping one pins the memory.
type exportSet struct {
	mu  sync.Mutex         // a leaf
	all map[uint64]*opened // by the handle's id
}

type opened struct {
	fd    *FD
	users int
}

// opening lets one set at a time wait for the budget with part of what it needs,
// or two could wait for each other.
var opening = newSlot()

// open makes a descriptor of each handle, or shares that which is there. The
// caller closes them.
func (e *exportSet) open(ctx context.Context, op string, handles []*phys.Handle) (fds []*FD, err error) {
	if !opening.take(ctx, nil) {
		return nil, waitError(ctx, op, "others export memory", "share less at a time")
	}
	defer opening.give()
	budget := 0
	defer func() {
		if budget > 0 {
			exports.give(budget)
		}
		if err != nil {
			e.close(handles[:len(fds)])
		}
	}()
	for i, h := range handles {
		e.mu.Lock()
		x := e.all[h.ID]
		if x != nil {
			x.users++
		}
		e.mu.Unlock()
		if x == nil {
			if budget == 0 {
				if budget, err = exports.take(ctx, op, len(handles)-i); err != nil {
					return fds, err
				}
			}
			n, err := h.Export(op)
			if err != nil {
				return fds, err
			}
			budget--
			x = &opened{fd: own(n), users: 1}
			e.mu.Lock()
			if e.all == nil {
				e.all = map[uint64]*opened{}
			}
			e.all[h.ID] = x
			e.mu.Unlock()
		}
		fds = append(fds, x.fd)
	}
	return fds, nil
}

// share answers the descriptors of all handles if all are open now, for the
// caller to close, and otherwise nil.
func (e *exportSet) share(handles []*phys.Handle) (fds []*FD) {
	e.mu.Lock()
	defer e.mu.Unlock()
	for _, h := range handles {
		x := e.all[h.ID]
		if x == nil {
			return nil
		}
		fds = append(fds, x.fd)
	}
	for _, h := range handles {
		e.all[h.ID].users++
	}
	return fds
}

// close gives back what open and share answered.
func (e *exportSet) close(handles []*phys.Handle) {
	e.mu.Lock()
	defer e.mu.Unlock()
	for _, h := range handles {
		x := e.all[h.ID]
		if x.users--; x.users == 0 {
			_ = x.fd.Close() // the number is given back whatever it answers
			delete(e.all, h.ID)
			exports.give(1)
		}
	}
}
