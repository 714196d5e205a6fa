package sim

import (
	"fmt"
	"slices"
	"strings"

	"github.com/cuvmm/cuvmm/cuda"
	"github.com/cuvmm/cuvmm/internal/driver"
	"github.com/cuvmm/cuvmm/internal/errs"
)

// Race is two accesses by GPU work to the same bytes of memory, of which at least one
// writes, and which nothing orders: what the bytes hold then is a matter of luck.
type Race struct {
	// First and Second are the accesses, in the order in which the machine did them.
	First, Second Access
	// Size is the number of bytes that both touch.
	Size int
}

// Access is one side of a [Race].
type Access struct {
	// Work is the driver call that submitted the access, or the kernel's name.
	Work string
	// Device and Stream are the device's ordinal and the stream's handle; the handle of
	// legacy and per-thread streams is 0.
	Device int
	Stream uintptr
	// Ptr is the first byte that both touch, at the address that this access used. One
	// memory can have several addresses.
	Ptr cuda.Ptr
	// Write reports whether the access writes. An allocation and a free in the order of a
	// stream count as writes of all of the memory.
	Write bool
	// Stack is where the work was submitted, as in [Leak]: for work of a graph, where that
	// was launched.
	Stack string
}

func (r Race) String() string {
	var b strings.Builder
	fmt.Fprintf(&b, "a race for %s of memory: %v\nand %v\nnothing orders them: record an event behind the first, and let the second's stream wait for it",
		errs.Count(r.Size, "byte"), r.First, r.Second)
	return b.String()
}

func (a Access) String() string {
	verb := "reads"
	if a.Write {
		verb = "writes"
	}
	return fmt.Sprintf("%s on stream %#x of device %d %s at %#x, submitted at:\n%s", a.Work, a.Stream, a.Device, verb, uint64(a.Ptr), a.Stack)
}

// mostRaces bounds the list of races: a program that has so many has one mistake in a loop.
const mostRaces = 100

// Races lists the races that the machine has seen so far, oldest first and at most 100: at
// most one for each two pieces of work. Without [Options.Races] there are none.
func (m *Machine) Races() []Race {
	m.mu.Lock()
	defer m.mu.Unlock()
	return slices.Clone(m.races)
}

// racesEnded returns an error that lists the races.
func (m *Machine) racesEnded() error {
	races := m.Races()
	if len(races) == 0 {
		return nil
	}
	var b strings.Builder
	fmt.Fprintf(&b, "sim: work on machine %s raced %s; order it by events:", m.name, errs.Count(len(races), "time"))
	for _, r := range races {
		fmt.Fprintf(&b, "\n%v", r)
	}
	return fmt.Errorf("%s", b.String())
}

// history is the touches of one memory that may race with work to come.
type history []*touch

// touch is an access of work to bytes of a memory.
type touch struct {
	op       *op
	nodes    []*node // where in its graph
	work     string
	device   int
	addr     uint64 // of the first byte
	span            // in the memory, wherever that is mapped
	write    bool
	released uint64 // when the op made it known to others; 0 before
}

// access describes the touch from a byte of the memory on.
func (t *touch) access(from uint64) Access {
	return Access{Work: t.work, Device: t.device, Stream: uintptr(t.op.stream.handle), Ptr: cuda.Ptr(t.addr + from - t.lo),
		Write: t.write, Stack: t.op.trail.stack.String()}
}

// covers reports whether whatever races with an earlier touch races with this one, too.
func (t *touch) covers(e *touch) bool {
	return e.op.stream == t.op.stream && t.lo <= e.lo && e.hi <= t.hi && (t.write || !e.write) &&
		(e.op != t.op || slices.Equal(e.nodes, t.nodes))
}

// racesWith notes that two ops race, and reports whether that is news.
func (o *op) racesWith(other *op) bool {
	if slices.Contains(o.trail.races, other) || slices.Contains(other.trail.races, o) {
		return false
	}
	o.trail.races = append(o.trail.races, other)
	return true
}

// touch records that work touches n bytes of memory, and reports what it races with. The
// bytes were found there. Words that order work do not come here: they are atomic.
func (m *Machine) touch(at site, call driver.Call, addr, n uint64, write bool) {
	if !at.op.followed() {
		return
	}
	work := call.String()
	if at.kernel != "" {
		work = "kernel " + at.kernel
	}
	for r := range m.backing.overlapping(addr, addr+n) {
		lo, hi := max(addr, r.lo), min(addr+n, r.hi)
		t := &touch{op: at.op, nodes: at.nodes, work: work, device: at.device.ordinal, addr: lo, span: span{lo - r.lo, hi - r.lo}, write: write}
		h := &r.v.history
		if r.v.mem != nil {
			h = &r.v.mem.history
		}
		m.races = append(m.races, h.add(t, m.engine.oldest())...)
		m.races = m.races[:min(len(m.races), mostRaces)]
	}
}

// add takes a touch into the history, without those before that can race with nothing to
// come, and returns its races.
func (h *history) add(t *touch, oldest uint64) (races []Race) {
	for _, e := range *h {
		if e.released == 0 && e.op == t.op && e.covers(t) {
			return nil // the same again, as a loop of a kernel does it
		}
	}
	kept := (*h)[:0]
	for _, e := range *h {
		both := span{max(e.lo, t.lo), min(e.hi, t.hi)}
		if both.lo < both.hi && (e.write || t.write) && !e.precedes(t.op, t.nodes) && t.op.racesWith(e.op) {
			races = append(races, Race{e.access(both.lo), t.access(both.lo), int(both.size())})
		}
		if !t.covers(e) && (e.released == 0 || e.released >= oldest) {
			kept = append(kept, e)
		}
	}
	clear((*h)[len(kept):])
	kept = append(kept, t)
	*h = kept
	t.op.trail.open = append(t.op.trail.open, t)
	return races
}
