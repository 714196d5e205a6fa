package vmm

import (
	"errors"
	"fmt"
	"math/bits"
	"slices"
	"sort"
	"sync"
	"sync/atomic"

	"github.com/cuvmm/cuvmm/cuda"
	"github.com/cuvmm/cuvmm/internal/core"
	"github.com/cuvmm/cuvmm/internal/driver"
	"github.com/cuvmm/cuvmm/internal/phys"
	"github.com/cuvmm/cuvmm/internal/ranges"
)

// Reservation is a range of address space. Nothing is behind it until memory
// is mapped into it. Address space is nearly free: a range of terabytes costs
// microseconds and no memory.
type Reservation struct {
	ranged
	r       *reservation
	watched core.Watched
}

// ReserveOptions change where Reserve reserves. The zero value lets the driver
// choose.
type ReserveOptions struct {
	// Align is a power of two that the address is a multiple of; 0 is the
	// granularity.
	Align int
	// Hint is the address that is wanted. It is a wish: compare Ptr.
	Hint cuda.Ptr
}

// Reserve reserves size bytes of address space, a multiple of the device's
// granularity. Memory of any location can be mapped into it; the device only
// says how. The caller closes it.
func Reserve(d *cuda.Device, size int, o ReserveOptions) (*Reservation, error) {
	r, err := reserve("vmm.Reserve", d, size, o)
	if err != nil {
		return nil, err
	}
	shell := &Reservation{ranged: ranges.Hold(r), r: r}
	shell.watched.Begin(&r.Object)
	return shell, nil
}

// reservation is the inner state: what mappings keep alive.
type reservation struct {
	core.Object
	closer core.Closer
	system *cuda.System
	base   driver.Ptr
	size   uint64
	gran   uint64 // of the device that it was reserved by

	// mu guards maps, which are sorted by offset and never overlap, and their
	// access. Driver calls on the range are made under it, so that two changes
	// of one range never mix.
	mu   sync.Mutex
	maps []*mapping
	one  [1]*mapping // where maps lies while there is one
	// left are mappings that are out of use and could not be given back: a
	// teardown failed, or the undo of something that failed. Their addresses
	// are not used again before they went, and only what tears down (Close,
	// UnmapRun, and Clip of a buffer) tries that.
	left []*mapping
	// leftBytes is the memory in left.
	leftBytes atomic.Uint64
	// dropped is what lost the device that mappings were dropped with. They are
	// still there for the driver, so the range is never used for others, nor
	// given back.
	dropped driver.Result
	views   views
}

func reserve(op string, d *cuda.Device, size int, o ReserveOptions) (*reservation, error) {
	gran, err := granule(op, d)
	if err != nil {
		return nil, err
	}
	if err := checkSize(op, size, gran); err != nil {
		return nil, err
	}
	if o.Align < 0 || bits.OnesCount(uint(o.Align)) > 1 {
		return nil, core.Invalid(op, fmt.Sprintf("an alignment of %d", o.Align), "use a power of two, or 0 for the granularity")
	}
	sys := core.SystemOf(d)
	sys.PollReclaim()
	base, res := sys.Drv.MemAddressReserve(uint64(size), uint64(o.Align), driver.Ptr(o.Hint))
	if res != driver.Success {
		return nil, sys.Fail(op, driver.CallMemAddressReserve, res, core.Bytes(size)+" of address space")
	}
	r := &reservation{system: d.System(), base: base, size: uint64(size), gran: gran}
	r.maps = r.one[:0]
	sys.Track(&r.Object, core.KindReservation, r.size)
	return r, nil
}

// granule is what address ranges are multiples of.
func granule(op string, d *cuda.Device) (uint64, error) {
	if d == nil {
		return 0, errNilDevice(op)
	}
	c, err := core.ContextOf(d)
	if err != nil {
		return 0, err
	}
	if g := c.Granule.Load(); g != 0 {
		return g, nil
	}
	_, g, err := Properties{}.resolve(op, d)
	if err == nil {
		c.Granule.Store(g)
	}
	return g, err
}

// Ptr is the address of the range, fixed for life.
func (r *Reservation) Ptr() cuda.Ptr { return cuda.Ptr(r.r.base) }

// Size is the size of the range in bytes.
func (r *Reservation) Size() int { return int(r.r.size) }

// Map puts all of p at an offset of the range, which must be free there. Nobody
// may touch the memory until SetAccess says so. The mapping keeps both its
// memory and the range alive; the caller closes it.
func (r *Reservation) Map(off int, p Physical) (*Mapping, error) {
	const op = "vmm.Reservation.Map"
	if off < 0 {
		return nil, core.Error(core.Failure{Op: op, Kind: core.OutOfRange, Asked: fmt.Sprintf("offset %d", off),
			Hint: "offsets are not negative"})
	}
	if !r.r.closer.Hold() {
		return nil, core.ClosedError(op, "reservation")
	}
	defer r.r.closer.Drop()
	if gran := int(r.r.gran); off%gran != 0 {
		return nil, core.Invalid(op, fmt.Sprintf("offset %d", off), "offsets are multiples of the granularity, "+core.Bytes(gran))
	}
	h, err := hold(op, r.r.System(), p)
	if err != nil {
		return nil, err
	}
	if err := mappable(op, h); err != nil {
		return nil, r.r.release(err, h)
	}
	m := &Mapping{}
	var one [1]*mapping
	maps, err := r.r.mapRun(op, one[:0], uint64(off), []*phys.Handle{h}, nil)
	if err != nil {
		return nil, r.r.release(err, h)
	}
	m.m = maps[0]
	m.watched.Begin(&m.m.Object)
	return m, nil
}

// SetAccess changes who may touch a part of the range that consists of whole
// mappings, in one call of the driver. Where it takes access away it first
// waits for the devices concerned, as Close does.
func (r *Reservation) SetAccess(off, size int, access ...Access) error {
	const op = "vmm.Reservation.SetAccess"
	if off < 0 || size <= 0 {
		return core.Error(core.Failure{Op: op, Kind: core.OutOfRange, Asked: fmt.Sprintf("offset %d, %s", off, core.Count(size, "byte")),
			Hint: "name a part of the range"})
	}
	if !r.r.closer.Hold() {
		return core.ClosedError(op, "reservation")
	}
	defer r.r.closer.Drop()
	return r.r.setAccess(op, uint64(off), uint64(size), access)
}

// Close gives the range back. What is still mapped there and was closed with
// CloseAfter goes with it, after all work that could use it (see the package
// documentation). While anything else is mapped into the range the error is
// ErrInUse, and it stays open. After another error it may be called again.
func (r *Reservation) Close() error {
	const op = "vmm.Reservation.Close"
	if err := r.r.views.notInside(op, 0, rest); err != nil {
		return err
	}
	err := r.r.close(op)
	if err == nil {
		r.watched.Stop()
	}
	return err
}

// CloseAfter takes the range out of use at once and gives it back when the work
// that is on the streams now is done and everything that was mapped there is gone.
// It never blocks. While anything is mapped into the range that was not closed with
// CloseAfter the error is ErrInUse, without a stream it is ErrInvalidArgument, with
// one that captures a graph ErrCapturing, and nothing has changed.
func (r *Reservation) CloseAfter(streams ...*cuda.Stream) error {
	const op = "vmm.Reservation.CloseAfter"
	in := r.r
	sys := in.System()
	return in.closer.CloseAfter(sys, func() (*core.Fence, error) {
		f, err := core.FenceOf(sys, op, streams)
		if err != nil {
			return nil, err
		}
		if err := in.shut(op); err != nil {
			f.Drop()
			return nil, err
		}
		return f, nil
	}, func() error {
		in.mu.Lock()
		mapped := len(in.maps)
		in.mu.Unlock()
		if mapped > 0 {
			return core.ErrAgain
		}
		if err := in.free(op); err != nil {
			return err
		}
		r.watched.Stop()
		return nil
	})
}

// Released returns the end of the range's closing.
func (r *Reservation) Released() cuda.Completion {
	return r.r.closer.Completion()
}

// shut lets nothing more be mapped, unless something is that does not go by itself.
func (r *reservation) shut(op string) error {
	r.mu.Lock()
	defer r.mu.Unlock()
	for i, m := range r.maps {
		if !m.closing {
			return core.Error(core.Failure{Op: op, Kind: core.InUse,
				Asked: fmt.Sprintf("%s, the first %s at %#x", core.Count(len(r.maps)-i, "mapping"), core.Bytes(m.phys.Size), m.ptr()),
				Hint:  "close the mappings first"})
		}
	}
	// No mapping can come any more: mapRun asks under the lock.
	r.closer.Life.Close()
	return nil
}

func (r *reservation) close(op string) error {
	if err := r.shut(op); err != nil {
		return err
	}
	return r.closer.Close(func() error {
		if err := r.unmapClosing(op); err != nil {
			return err
		}
		return r.free(op)
	})
}

// unmapClosing unmaps what was closed with CloseAfter and still waits, after all
// work of the devices that reach it. The reclaimer then finds nothing to do.
func (r *reservation) unmapClosing(op string) error {
	r.mu.Lock()
	maps := slices.Clone(r.maps)
	r.mu.Unlock()
	if len(maps) == 0 {
		return nil
	}
	if err := r.views.await(op, 0, rest); err != nil {
		return err
	}
	if err := r.System().WaitDevices(op, r.devices()); err != nil {
		return err
	}
	for _, m := range maps {
		if err := r.unmapRun(op, []*mapping{m}); err != nil {
			return err
		}
	}
	return nil
}

// lacks reports whether a mapping is not in the range any more.
func (r *reservation) lacks(m *mapping) bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	return !slices.Contains(r.maps, m)
}

// free gives the range back to the driver, and before that what was left in it.
func (r *reservation) free(op string) error {
	if err := r.finish(op); err != nil {
		return err
	}
	sys := r.System()
	if r.dropped == driver.Success && sys.DeviceLost() == driver.Success {
		res := sys.Note(sys.Drv.MemAddressFree(r.base, r.size))
		if res != driver.Success && !res.Lost() {
			return sys.Fail(op, driver.CallMemAddressFree, res, fmt.Sprintf("%s at %#x", core.Bytes(r.size), uint64(r.base)))
		}
	}
	r.Untrack()
	return nil
}

// abandon gives back a range that no other object has, after what failed with
// cause.
func (r *reservation) abandon(op string, cause error) error {
	return r.undone(cause, func() error { return r.close(op) })
}

// undone undoes what failed with cause. If that fails too the reclaimer tries it
// once more.
func (r *reservation) undone(cause error, undo func() error) error {
	err := undo()
	if err == nil {
		return cause
	}
	life := new(core.Life)
	life.Close()
	r.System().Reclaim(new(core.Fence), life, undo)
	return fmt.Errorf("%w (and undoing it failed, which System.Drain tries again: %w)", cause, err)
}

// find is the index of the first mapping that ends behind off.
func (r *reservation) find(off uint64) int {
	return sort.Search(len(r.maps), func(i int) bool { return r.maps[i].off+r.maps[i].phys.Size > off })
}

// mapRun maps handles one behind the other, grants the run in one call where
// access is given, and takes over one count of each handle. Where any step
// fails everything is as it was, and the counts are still the caller's. The
// mappings are appended to maps, which is empty and only gives the room.
func (r *reservation) mapRun(op string, maps []*mapping, off uint64, handles []*phys.Handle, access accessList) ([]*mapping, error) {
	var size uint64
	for _, h := range handles {
		size += h.Size
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.closer.Closed() {
		return nil, core.ClosedError(op, "reservation")
	}
	at := r.find(off)
	if err := r.checkFree(op, off, size, at); err != nil {
		return nil, err
	}
	if err := r.checkLoss(op, handles); err != nil {
		return nil, err
	}
	sys := r.System()
	end := off
	for _, h := range handles {
		if res := sys.Drv.MemMap(r.base+driver.Ptr(end), h.Size, 0, h.Driver); res != driver.Success {
			return nil, r.undoRun(maps, sys.Fail(op, driver.CallMemMap, res,
				fmt.Sprintf("%s at %#x", core.Bytes(h.Size), uint64(r.base)+end), h.Devices()...))
		}
		maps = append(maps, &mapping{res: r, phys: h, off: end, access: access})
		end += h.Size
	}
	if len(access) > 0 {
		if res := sys.Drv.MemSetAccess(r.base+driver.Ptr(off), size, access); res != driver.Success {
			return nil, r.undoRun(maps, sys.Fail(op, driver.CallMemSetAccess, res,
				fmt.Sprintf("%s at %#x", core.Bytes(size), uint64(r.base)+off), concerned(maps, access)...))
		}
	}
	for _, m := range maps {
		m.phys.Mappings.Add(1)
		sys.Track(&m.Object, core.KindMapping, m.phys.Size)
	}
	r.maps = slices.Insert(r.maps, at, maps...)
	return maps, nil
}

// checkLoss refuses to map what lies on a lost device, or into a range from
// which something was dropped.
func (r *reservation) checkLoss(op string, handles []*phys.Handle) error {
	if r.dropped != driver.Success {
		return core.Error(core.Failure{Op: op, Kind: core.DeviceLost, Result: r.dropped,
			Asked: fmt.Sprintf("the range at %#x, of which a part was dropped with its device", uint64(r.base)),
			Hint:  "reserve another range for memory of the devices that go on"})
	}
	for _, h := range handles {
		if res := h.Lost(); res != driver.Success {
			return core.Error(core.Failure{Op: op, Call: driver.CallMemMap, Result: res, Asked: core.Bytes(h.Size)})
		}
	}
	return nil
}

// concerned are the devices that a call on mappings can have to do with: those
// that the memory lies on, and those that have or get access.
func concerned(maps []*mapping, access accessList) []driver.Device {
	devices := access.devices()
	for _, m := range maps {
		devices = append(append(devices, m.phys.Devices()...), m.access.devices()...)
	}
	return devices
}

// checkFree refuses a range that leaves the reservation, is taken, or has
// something left in it.
func (r *reservation) checkFree(op string, off, size uint64, at int) error {
	if off > r.size || size > r.size-off {
		return core.Error(core.Failure{Op: op, Kind: core.OutOfRange,
			Asked: fmt.Sprintf("%s at offset %s of %s", core.Bytes(size), core.Bytes(off), core.Bytes(r.size)),
			Hint:  "map inside the range, or reserve a larger one"})
	}
	if at < len(r.maps) && r.maps[at].off < off+size {
		m := r.maps[at]
		return core.Error(core.Failure{Op: op, Kind: core.InUse,
			Asked: fmt.Sprintf("%s at offset %s, where %s are mapped at offset %s",
				core.Bytes(size), core.Bytes(off), core.Bytes(m.phys.Size), core.Bytes(m.off)),
			Hint: "map elsewhere, or close that mapping first"})
	}
	for _, m := range r.left {
		if !m.unmapped && m.off < off+size && off < m.off+m.phys.Size {
			return core.Error(core.Failure{Op: op, Kind: core.InUse,
				Asked: fmt.Sprintf("%s at offset %s, where %s at offset %s could not be unmapped after an earlier failure",
					core.Bytes(size), core.Bytes(off), core.Bytes(m.phys.Size), core.Bytes(m.off)),
				Hint: "use another range; Close of the range, or Clip of the buffer, tries the unmapping again"})
		}
	}
	return nil
}

// undoRun unmaps a run that nobody has used yet. Where that fails too the run
// is left, with a count of its memory: the error names it.
func (r *reservation) undoRun(maps []*mapping, cause error) error {
	if len(maps) == 0 {
		return cause
	}
	sys := r.System()
	first, last := maps[0], maps[len(maps)-1]
	size := last.off + last.phys.Size - first.off
	res := first.phys.Lost() // mapRun has refused what was lost before
	if res == driver.Success {
		res = sys.Drv.MemUnmap(first.ptr(), size)
		if res == driver.Success {
			return cause
		}
		sys.Note(res, concerned(maps, nil)...)
	}
	if res.Lost() {
		r.dropped = res
		return cause
	}
	for _, m := range maps {
		m.phys.Retain()
		m.tried = true
		m.phys.Mappings.Add(1)
		sys.Track(&m.Object, core.KindMapping, m.phys.Size)
	}
	r.keep(maps)
	return fmt.Errorf("%w (and undoing it failed: %v answered %v, so %s at %#x are out of use)",
		cause, driver.CallMemUnmap, res, core.Bytes(size), uint64(first.ptr()))
}

// keep remembers mappings as left.
func (r *reservation) keep(maps []*mapping) {
	for _, m := range maps {
		if !m.released && !slices.Contains(r.left, m) {
			r.left = append(r.left, m)
			r.leftBytes.Add(m.phys.Size)
		}
	}
}

// release lets go of memory whose mapping failed with cause. Where that fails
// too the memory is left, and the error says so.
func (r *reservation) release(cause error, handles ...*phys.Handle) error {
	for _, h := range handles {
		if res := h.Release(); res != driver.Success {
			r.mu.Lock()
			r.keep([]*mapping{{res: r, phys: h, tried: true, unmapped: true}})
			r.mu.Unlock()
			cause = fmt.Errorf("%w (and undoing it failed: %v answered %v, so %s stay taken)",
				cause, driver.CallMemRelease, res, core.Bytes(h.Size))
		}
	}
	return cause
}

// unmapRun takes adjacent mappings out of use, unmaps them in one call and gives
// up their handles. It goes forward: what it does not manage is left, and it may
// be called again with the same mappings.
func (r *reservation) unmapRun(op string, maps []*mapping) error {
	if len(maps) == 0 {
		return nil
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	if at := r.find(maps[0].off); at < len(r.maps) && r.maps[at] == maps[0] {
		r.maps = slices.Delete(r.maps, at, at+len(maps))
	}
	return r.giveBack(op, maps)
}

// finish gives back what was left, as far as the driver lets it.
func (r *reservation) finish(op string) error {
	r.mu.Lock()
	defer r.mu.Unlock()
	if len(r.left) == 0 {
		return nil
	}
	return r.giveBack(op, slices.Clone(r.left))
}

// giveBack is unmapRun for mappings that are out of use, with the lock held. A
// run that failed once may be half unmapped, so it is tried again piece by
// piece: unmapping what is not mapped is no error (measured).
func (r *reservation) giveBack(op string, maps []*mapping) (err error) {
	sys := r.System()
	unmap := func(maps []*mapping) error {
		first, last := maps[0], maps[len(maps)-1]
		size := last.off + last.phys.Size - first.off
		res := first.phys.Lost()
		if res == driver.Success {
			res = sys.Drv.MemUnmap(first.ptr(), size)
		}
		switch {
		case res.Lost():
			sys.Note(res, concerned(maps, nil)...)
			r.dropped = res
		case res != driver.Success:
			for _, m := range maps {
				m.tried = true
			}
			return sys.Fail(op, driver.CallMemUnmap, res, fmt.Sprintf("%s at %#x", core.Bytes(size), uint64(first.ptr())))
		}
		for _, m := range maps {
			m.unmapped = true
			m.phys.Mappings.Add(-1)
			m.Untrack()
		}
		return nil
	}
	if !maps[0].tried && !maps[0].unmapped {
		err = unmap(maps)
	}
	for i := 0; i < len(maps) && err == nil; i++ {
		m := maps[i]
		if !m.unmapped {
			err = unmap(maps[i : i+1])
		}
		if err == nil && !m.released {
			if res := m.phys.Release(); res != driver.Success {
				err = sys.Fail(op, driver.CallMemRelease, res, core.Bytes(m.phys.Size), m.phys.Devices()...)
			} else {
				m.released = true
			}
		}
	}
	if err != nil {
		r.keep(maps)
	}
	r.left = slices.DeleteFunc(r.left, func(m *mapping) bool {
		if m.released {
			r.leftBytes.Add(-m.phys.Size)
		}
		return m.released
	})
	return err
}

// devices are those that have access to anything in the range, as the driver
// knows it.
func (r *reservation) devices() (with []driver.Device) {
	r.mu.Lock()
	defer r.mu.Unlock()
	for i, m := range r.maps {
		if i > 0 && m.access.same(r.maps[i-1].access) {
			continue
		}
		for _, d := range m.access.devices() {
			if !slices.Contains(with, d) {
				with = append(with, d)
			}
		}
	}
	return with
}

// setAccess changes the access of the whole mappings in a part of the range.
func (r *reservation) setAccess(op string, off, size uint64, access []Access) error {
	for {
		changes, from, err := r.planAccess(op, off, size, access)
		if err != nil {
			return err
		}
		// Whoever loses access must not be using it.
		if err := r.System().WaitDevices(op, from); err != nil {
			return err
		}
		if err := r.applyAccess(op, off, size, changes); !errors.Is(err, core.ErrAgain) {
			return err
		}
		if err := r.views.await(op, off, off+size); err != nil {
			return err
		}
	}
}

// planAccess checks a change, and answers which devices lose by it.
func (r *reservation) planAccess(op string, off, size uint64, access []Access) (changes accessList, from []driver.Device, err error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	run, err := r.run(op, off, size)
	if err != nil {
		return nil, nil, err
	}
	for i, m := range run {
		if i == 0 || m.phys.Asked.Location != run[i-1].phys.Asked.Location {
			if changes, err = checkAccess(op, r.system, m.phys.Asked.Location, access); err != nil {
				return nil, nil, err
			}
		}
		if i == 0 || !m.access.same(run[i-1].access) {
			from = append(from, m.access.lowered(changes)...)
		}
	}
	return changes, from, nil
}

// applyAccess makes a change that was checked, and waited for. Where it fails
// the access is as it was. While a function looks at memory that the host would
// lose it changes nothing and answers core.ErrAgain.
func (r *reservation) applyAccess(op string, off, size uint64, changes accessList) error {
	r.mu.Lock()
	defer r.mu.Unlock()
	run, err := r.run(op, off, size)
	if err != nil {
		return err
	}
	sys := r.System()
	for _, m := range run {
		if res := m.phys.Lost(); res != driver.Success {
			return core.Error(core.Failure{Op: op, Call: driver.CallMemSetAccess, Result: res,
				Asked: fmt.Sprintf("%s at %#x", core.Bytes(m.phys.Size), uint64(m.ptr()))})
		}
		if home := m.phys.Asked.Location; home.Type != driver.LocationDevice && changes.names(home) &&
			changes.mode(home) < m.access.mode(home) && r.views.over(m.off, m.off+m.phys.Size) != nil {
			return core.ErrAgain
		}
	}
	if res := sys.Drv.MemSetAccess(r.base+driver.Ptr(off), size, changes); res != driver.Success {
		err := sys.Fail(op, driver.CallMemSetAccess, res,
			fmt.Sprintf("%s at %#x", core.Bytes(size), uint64(r.base)+off), concerned(run, changes)...)
		if res.Lost() {
			return err // closing drops what lies there
		}
		return r.undoAccess(run, changes, err)
	}
	var before, after accessList
	for i, m := range run {
		if i == 0 || !m.access.same(before) {
			before, after = m.access, m.access.with(changes)
		}
		m.access = after
		m.revoking.end(changes)
		if len(m.unsure) > 0 {
			m.unsure = m.unsure.except(changes, 0)
		}
	}
	return nil
}

// undoAccess puts the access of a run back after a change that may have reached
// a part of it. A mapping where that fails too is unsure until a change succeeds.
func (r *reservation) undoAccess(run []*mapping, changes accessList, cause error) error {
	sys := r.System()
	var unsure uint64
	last := driver.Success
	for _, m := range run {
		res := sys.Drv.MemSetAccess(m.ptr(), m.phys.Size, m.access.of(changes))
		if res == driver.Success {
			m.unsure = m.unsure.except(changes, 0)
			continue
		}
		m.access = m.access.upper(changes)
		m.unsure = append(m.unsure.except(changes, len(changes)), changes...)
		unsure, last = unsure+m.phys.Size, sys.Note(res, concerned([]*mapping{m}, changes)...)
	}
	if unsure == 0 || last.Lost() {
		return cause
	}
	return fmt.Errorf("%w (and undoing it failed: %v answered %v, so who may touch %s of it is not known until a change of access succeeds)",
		cause, driver.CallMemSetAccess, last, core.Bytes(unsure))
}

// unsure reports whether the access of anything in the range is not known.
func (r *reservation) unsure() bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	return slices.ContainsFunc(r.maps, func(m *mapping) bool { return len(m.unsure) > 0 })
}

// run are the mappings that make up exactly a part of the range.
func (r *reservation) run(op string, off, size uint64) ([]*mapping, error) {
	from := r.find(off)
	to := from
	end := off
	for to < len(r.maps) && r.maps[to].off == end && end < off+size {
		end += r.maps[to].phys.Size
		to++
	}
	if to == from || end != off+size || r.maps[from].off != off {
		return nil, core.Error(core.Failure{Op: op, Kind: core.OutOfRange,
			Asked: fmt.Sprintf("%s at offset %s, which is no run of whole mappings", core.Bytes(size), core.Bytes(off)),
			Hint:  "a mapping changes access as a whole, and gaps have none"})
	}
	return r.maps[from:to], nil
}
