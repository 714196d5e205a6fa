package vmm

import (
	"sync"
	"sync/atomic"

	"github.com/cuvmm/cuvmm/internal/driver"
)

// revoking tracks an object's RevokeAfter calls, by place: access is taken when the last
// of them has passed, unless it was changed since. Its lock is a leaf, so that
// RevokeAfter waits for no driver call.
type revoking struct {
	used atomic.Bool // saves others the lock
	mu   sync.Mutex
	all  map[driver.Location]revocation
}

type revocation struct {
	waiting int // calls that have not passed
	undone  bool
}

// begin counts a call.
func (r *revoking) begin(place driver.Location) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.all == nil {
		r.all = map[driver.Location]revocation{}
		r.used.Store(true)
	}
	r.all[place] = revocation{waiting: r.all[place].waiting + 1}
}

// pass records that the work which one of the calls named has passed.
func (r *revoking) pass(place driver.Location) {
	r.mu.Lock()
	defer r.mu.Unlock()
	v := r.all[place]
	v.waiting--
	r.all[place] = v
}

// due reports whether all calls have passed and the access is still to be taken.
func (r *revoking) due(place driver.Location) bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	v := r.all[place]
	return v.waiting == 0 && !v.undone
}

// end records that the access of some places was changed.
func (r *revoking) end(changes accessList) {
	if !r.used.Load() {
		return
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	for _, c := range changes {
		if v, ok := r.all[c.Location]; ok {
			v.undone = true
			r.all[c.Location] = v
		}
	}
}
