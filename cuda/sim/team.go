package sim

import (
	"fmt"
	"slices"
	"sync/atomic"
	"time"
	"unsafe"

	"github.com/cuvmm/cuvmm/internal/driver"
	"github.com/cuvmm/cuvmm/internal/osmem"
)

const (
	maxTeam        = 64
	maxBinds       = 1 << 10
	multicastSlots = 128 // of the machine's switches
	multicastUnit  = 2 << 20
)

// team is what a multicast object has where memory has bytes: the devices that
// take part, and what memory is bound for each of them, which are the replicas.
//
// An object that processes share has its state in the memory file under its
// handle, and changes it under the lock of the machine's books. A process that
// is killed leaves what it bound, which no process uses any more: a bind is good for
// as long as the process that made it lives.
//
// A bind does not hold memory. What is freed while it is bound is missing from
// then on, as on a GPU.
type team struct {
	m     *Machine
	mem   *memory // the object as handles and mappings know it
	state *teamState
	slot  bool // taken for this process, not for the object
	// files are the replicas that lie in memory files, by their numbers.
	files map[uint64]*osmem.Shared
	busy  int // accesses in progress, which need the files
}

type teamState struct {
	devices atomic.Uint64 // how many there will be
	size    atomic.Uint64
	types   atomic.Uint64
	clique  atomic.Uint64
	cluster [2]atomic.Uint64
	added   atomic.Uint64 // how many there are
	members [maxTeam]atomic.Uint64
	binds   [maxBinds]bind
}

// bind ties a piece of memory to a part of the object, for one device.
type bind struct {
	holder atomic.Uint64 // the process that made it; 0 in a free record
	device atomic.Uint64
	offset atomic.Uint64 // in the object
	size   atomic.Uint64
	memory atomic.Uint64 // its number, in the books or on this machine
	at     atomic.Uint64 // offset in the memory
}

var teamBytes = uint64(unsafe.Sizeof(teamState{}))

// number names a device on the whole machine.
func (d *device) number() uint64 {
	if d.pool.books != nil {
		return uint64(d.pool.index)
	}
	return uint64(d.ordinal)
}

// across reports whether other processes may take part.
func (t *team) across() bool { return t.mem.id != 0 }

// do changes the state.
func (t *team) do(f func()) {
	if t.across() {
		t.m.books.Do(f)
		return
	}
	f()
}

func (t *team) complete() bool { return t.state.added.Load() == t.state.devices.Load() }

// members are the devices that were added, by their numbers.
func (t *team) members() []uint64 {
	devices := make([]uint64, min(t.state.added.Load(), maxTeam))
	for i := range devices {
		devices[i] = t.state.members[i].Load()
	}
	return devices
}

func (t *team) has(device uint64) bool { return slices.Contains(t.members(), device) }

// await blocks until all devices were added. Only closing the machine ends the wait
// earlier.
func (t *team) await() driver.Result {
	m := t.m
	t.mem.refs++
	defer t.mem.drop()
	for polls := 0; !t.complete() && !m.closed; polls++ {
		m.mu.Unlock()
		time.Sleep(pollAfter(polls)) // another process adds them unseen
		m.mu.Lock()
	}
	if m.closed {
		return driver.Deinitialized
	}
	return driver.Success
}

// acquireSlot acquires one of the switches' slots for the object, once.
func (t *team) acquireSlot() bool {
	m := t.m
	switch {
	case t.across():
		return m.books.AcquireSlot(t.mem.id, multicastSlots)
	case t.slot:
		return true
	case m.books != nil:
		t.slot = m.books.AcquireSlot(0, multicastSlots)
	case m.slots < multicastSlots:
		m.slots++
		t.slot = true
	}
	return t.slot
}

// end releases what this process holds of an object.
func (t *team) end() {
	m := t.m
	switch {
	case !t.slot:
	case m.books != nil:
		m.books.ReleaseSlot()
	default:
		m.slots--
	}
	t.closeFiles(func(uint64) bool { return true })
	delete(m.teams, t)
}

func (t *team) closeFiles(which func(memory uint64) bool) {
	for id, file := range t.files {
		if which(id) {
			_ = file.Close()
			delete(t.files, id)
		}
	}
}

// owner is the process in the state of this object.
func (t *team) owner() uint64 {
	if t.across() {
		return t.m.books.Serial()
	}
	return 1
}

// numberOf names memory in the state of this object.
func (t *team) numberOf(mem *memory) (uint64, error) {
	if t.across() {
		err := t.m.share(mem)
		return mem.id, err
	}
	if mem.bound == 0 {
		t.m.bounds++
		mem.bound = t.m.bounds
		t.m.bound[mem.bound] = mem
	}
	return mem.bound, nil
}

// freedWhileBound logs that memory is freed while it is bound.
func (m *Machine) freedWhileBound(mem *memory) {
	if mem.bound != 0 {
		delete(m.bound, mem.bound)
	}
	for t := range m.teams {
		number := mem.bound
		if t.across() {
			number = mem.id
		}
		for i := range t.state.binds {
			b := &t.state.binds[i]
			if number != 0 && b.holder.Load() == t.owner() && b.memory.Load() == number {
				m.note("%d bytes are freed while they are bound at offset %#x of a multicast object, for device %d: unbind them first",
					mem.size, b.offset.Load(), b.device.Load())
			}
		}
	}
}

// bind records a bind.
func (t *team) bind(d *device, offset, memory, at, size uint64) (r driver.Result) {
	t.do(func() {
		var free *bind
		for i := range t.state.binds {
			b := &t.state.binds[i]
			switch {
			case b.holder.Load() == 0:
				if free == nil {
					free = b
				}
			case b.device.Load() == d.number() && b.offset.Load() < offset+size && offset < b.offset.Load()+b.size.Load():
				r = driver.InvalidValue // something is bound there
				return
			}
		}
		if free == nil {
			r = driver.OutOfMemory
			return
		}
		free.device.Store(d.number())
		free.offset.Store(offset)
		free.size.Store(size)
		free.memory.Store(memory)
		free.at.Store(at)
		free.holder.Store(t.owner())
	})
	return r
}

// forget frees the binds of processes that have ended, so that other processes can bind
// there.
func (t *team) forget() {
	if !t.across() {
		return
	}
	gone := map[uint64]bool{}
	for i := range t.state.binds {
		if h := t.state.binds[i].holder.Load(); h != 0 {
			gone[h] = gone[h] || !t.m.books.Alive(h)
		}
	}
	t.do(func() {
		for i := range t.state.binds {
			if b := &t.state.binds[i]; gone[b.holder.Load()] {
				b.holder.Store(0)
			}
		}
	})
}

func (t *team) unbind(d *device, offset, size uint64) bool {
	found := false
	t.do(func() {
		for i := range t.state.binds {
			b := &t.state.binds[i]
			if b.holder.Load() != 0 && b.device.Load() == d.number() && b.offset.Load() == offset && b.size.Load() == size {
				b.holder.Store(0)
				found = true
			}
		}
	})
	return found
}

// replica is n bytes of a device's replica in as many pieces as they lie in, and
// the memory that must not move meanwhile; or why there are none.
func (t *team) replica(device, offset, n uint64) (runs [][]byte, held []*memory, why string) {
	for n > 0 {
		b := t.boundAt(device, offset)
		if b == nil {
			return nil, nil, fmt.Sprintf("device %d of the team has nothing bound at offset %#x: bind its memory first", device, offset)
		}
		at := offset - b.offset.Load()
		part := min(n, b.size.Load()-at)
		at += b.at.Load()
		number := b.memory.Load()
		const freed = "the memory that device %d had bound at offset %#x was freed before it was unbound, or its process has ended"
		if !t.across() {
			mem := t.m.bound[number]
			if mem == nil {
				return nil, nil, fmt.Sprintf(freed, device, offset)
			}
			for r := range mem.runs(at, part) {
				runs = append(runs, r)
			}
			held = append(held, mem)
		} else {
			file := t.replicaFile(b.holder.Load(), number)
			if file == nil || at+part > uint64(len(file.Bytes())) {
				return nil, nil, fmt.Sprintf(freed, device, offset)
			}
			runs = append(runs, file.Bytes()[at:][:part])
		}
		offset, n = offset+part, n-part
	}
	return runs, held, ""
}

func (t *team) boundAt(device, offset uint64) *bind {
	for i := range t.state.binds {
		b := &t.state.binds[i]
		if lo := b.offset.Load(); b.holder.Load() != 0 && b.device.Load() == device && offset >= lo && offset-lo < b.size.Load() {
			return b
		}
	}
	return nil
}

// replicaFile returns the memory file of a replica, or nil if that is gone.
func (t *team) replicaFile(holder, number uint64) *osmem.Shared {
	books := t.m.books
	if !books.Alive(holder) || !books.Exists(number) {
		return nil
	}
	file := t.files[number]
	if file == nil {
		file, _ = books.Open(number)
		if file != nil {
			t.files[number] = file
		}
	}
	return file
}
