package phys

import (
	"sync/atomic"

	"github.com/cuvmm/cuvmm/internal/driver"
	"github.com/cuvmm/cuvmm/internal/errs"
	"github.com/cuvmm/cuvmm/internal/life"
)

// memory is the driver's memory of a Handle. It can be taken from the handle and other
// memory be given to it, while counts, mappings and tables of the handle's users stay. No
// driver call names memory that is being taken: each runs between Use and Done, and Take
// refuses until the last one is done.
//
//	state    the driver's memory       Use      Done   Take     Return  Drop  Give, Renew
//	present  is there, with n users    n+1      n-1    taken*   -       -     -
//	taken    is there, to be unmapped  refused  -      refused  present away  -
//	away     was released              refused  -      refused  -       -     present, with another identity
//
// * refused while n > 0, of imported memory, and of multicast objects. "-" is a mistake of
// the library, and panics.
type memory struct {
	// users is n if the memory is present, or else taken or away.
	users atomic.Int64
	// driver is the driver's handle. It is read while users is not negative, or by whoever
	// took the memory: the real driver crashes on a handle that is not live.
	driver driver.MemHandle
	id     atomic.Uint64
}

const (
	taken = -1 - iota
	away
)

var lastID atomic.Uint64

// init sets the driver's handle, and a new identity.
func (m *memory) init(d driver.MemHandle) {
	m.driver = d
	m.id.Store(lastID.Add(1))
}

// must panics unless the memory is in a state that only the caller changes.
func (m *memory) must(state int64) {
	if m.users.Load() != state {
		panic("phys: memory that was not taken before")
	}
}

// ID returns the identity of the memory: no other memory of the process ever has it.
func (h *Handle) ID() uint64 { return h.memory.id.Load() }

// Use returns the driver's handle for a driver call. The memory is not taken until Done,
// which the caller calls. The caller holds a count.
func (h *Handle) Use(op string) (driver.MemHandle, error) {
	for {
		n := h.memory.users.Load()
		if n < 0 {
			return 0, errs.New(errs.Failure{Op: op, Kind: errs.Suspended, Asked: errs.Bytes(h.Size) + " of memory that was suspended",
				Hint: "call Resume of its Suspension first"})
		}
		if h.memory.users.CompareAndSwap(n, n+1) {
			return h.memory.driver, nil
		}
	}
}

// Done ends a Use.
func (h *Handle) Done() {
	if h.memory.users.Add(-1) < 0 {
		h.memory.users.Add(1)
		panic("phys: Done without Use")
	}
}

// Take takes the memory from the handle. It returns ErrInUse while a driver call or a
// multicast binding uses the memory, or if the memory was taken before. The caller unmaps
// the memory and then calls Drop, or calls Return; it holds a count.
func (h *Handle) Take(op string) error {
	f := errs.Failure{Op: op, Kind: errs.NotSupported, Asked: "taking " + errs.Bytes(h.Size) + " away"}
	switch {
	case h.Kind() == life.KindMulticast:
		f.Asked, f.Hint = "taking a multicast object away", "close it, and make another one later"
	case h.Imported:
		f.Asked, f.Hint = f.Asked+", which were imported", "let the process that created the memory take it"
	case h.memory.users.CompareAndSwap(0, taken):
		return nil
	default:
		f.Kind, f.Hint = errs.InUse, "let the driver calls that use the memory return, close its multicast bindings, and take it once"
	}
	return errs.New(f)
}

// Return gives the handle the memory back that Take took, unchanged.
func (h *Handle) Return() {
	h.memory.must(taken)
	h.memory.users.Store(0)
}

// Drop releases the memory that Take took, and that is mapped nowhere. After a failure it
// may be called again.
func (h *Handle) Drop() driver.Result {
	h.memory.must(taken)
	if r := h.free(); r != driver.Success {
		return r
	}
	h.SetBytes(0)
	h.System().Away.Add(h.Size)
	h.memory.users.Store(away)
	return driver.Success
}

// Away reports whether the memory was dropped.
func (h *Handle) Away() bool { return h.memory.users.Load() == away }

// Taken reports whether the memory was taken, and neither dropped nor returned.
func (h *Handle) Taken() bool { return h.memory.users.Load() == taken }

// Renew creates memory in place of what was dropped, and charges the account that paid for
// that; see Create for what it does if there is none.
func (h *Handle) Renew() (driver.Result, error) {
	h.memory.must(away)
	d, r, err := charged(h.System(), h.Size, h.Asked, h.account, h.System().Allocate)
	if err == nil && r == driver.Success {
		h.Give(d)
	}
	return r, err
}

// Give gives the handle memory of the same size and properties in place of what was
// dropped. It is other memory, so its identity is new. No other process holds it, so
// it may be exported, unless Recycle was called for the handle: the memory may get the
// bytes of an earlier owner back.
func (h *Handle) Give(d driver.MemHandle) {
	h.memory.must(away)
	h.memory.init(d)
	h.outside.known.Store(nil)
	if h.Exported() {
		h.sharing.Store(private)
	}
	h.SetBytes(h.Size)
	h.System().Away.Sub(h.Size)
	h.memory.users.Store(0)
}

// free releases the driver's memory, and the descriptors that pin it before.
func (h *Handle) free() driver.Result {
	h.UnpinFD()
	h.dropSource()
	s := h.System()
	r := s.Teardown(func() driver.Result { return s.Drv.MemRelease(h.memory.driver) }, h.Devices()...)
	if r != driver.Success {
		return r
	}
	h.account.Credit(h.Size)
	if shared(h.sharing.Load()) {
		s.Shared.Release(h.Size)
	}
	return r
}
