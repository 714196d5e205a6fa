// Package suspend takes memory away beneath objects that live on, and brings it back at the
// same addresses. What can be suspended is a [Member]: buffers, mappings; a [Suspension] is
// one operation on several of them, because they may share chunks.
//
// state.go has what a member permits when, plan.go which chunks go, out.go and in.go the steps,
// publication.go and registrant.go who else is told,
// lane.go and copies.go how driver calls go beside copies, and guard.go what lies under the
// addresses meanwhile.
package suspend

import (
	"sync/atomic"

	"github.com/cuvmm/cuvmm/internal/core"
)

// State is where the bytes of a member are.
type State uint8

const (
	Awake      State = iota // in its memory
	Suspending              // on their way out: the memory is still there
	Suspended               // away: kept in host memory, or nowhere
	Resuming                // on their way back
	states
)

// event is what happens to a member.
type event uint8

const (
	begin  event = iota // its suspension begins, or the end of that
	done                // the bytes have moved
	undone              // they have not, and the memory is as it was before
	events
)

// illegal is what no member does in a state.
const illegal = states

// next is the state after an event. Closing is no event: a member is closed while it is awake
// or suspended, since whoever moves its bytes holds it open.
var next = [states][events]State{
	Awake:      {begin: Suspending, done: illegal, undone: illegal},
	Suspending: {begin: illegal, done: Suspended, undone: Awake},
	Suspended:  {begin: Resuming, done: illegal, undone: illegal},
	Resuming:   {begin: illegal, done: Awake, undone: Suspended},
}

// Status is a member's place in a Suspension. Its zero value is that of a member that is awake.
// Members embed one. It is read without a lock, and changed under the lock under which the
// member submits work on its memory.
type Status struct {
	state atomic.Uint32
	in    atomic.Pointer[place] // nil while awake
	gone  atomic.Bool           // the member is closed, and torn down
	told  registrants
}

// place is a member as its Suspension knows it.
type place struct {
	of    *Suspension
	m     Member
	sleep *core.Sleep
	// When the member is awake again, the registrants that were told to leave are told so, and
	// its publications are shown that were recalled.
	left     []*Registrant
	recalled []Publication
	blank    bool // some of its memory came back without the bytes
}

// State returns where the bytes are.
func (b *Status) State() State { return State(b.state.Load()) }

// Sleep says since when the member is not awake. It returns nil if it is.
func (b *Status) Sleep() *core.Sleep {
	if p := b.in.Load(); p != nil {
		return p.sleep
	}
	return nil
}

// step changes the state by an event of the place's Suspension.
func (p *place) step(e event) {
	b := p.m.Status()
	after := next[b.State()][e]
	if after == illegal {
		panic("suspend: an event that the state of the member does not have")
	}
	if after == Awake {
		defer b.in.Store(nil)
	} else {
		b.in.Store(p) // before the state: who sees that it sleeps sees since when
	}
	b.state.Store(uint32(after))
}

// Closed is what a member calls when it is torn down.
func (b *Status) Closed() {
	b.gone.Store(true)
	if p := b.in.Load(); p != nil {
		p.of.sys.RemoveSuspended(p.sleep)
		p.of.prune()
	}
}

// Unmapped is what a member calls after some of its mappings are gone: what was kept for them
// goes if no other member needs it.
func (b *Status) Unmapped() {
	if p := b.in.Load(); p != nil {
		p.of.prune()
	}
}
