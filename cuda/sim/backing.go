package sim

import (
	"fmt"
	"unsafe"

	"github.com/cuvmm/cuvmm/cuda"
	"github.com/cuvmm/cuvmm/internal/driver"
	"github.com/cuvmm/cuvmm/internal/host"
	"github.com/cuvmm/cuvmm/internal/osmem"
)

// backing is a range of addresses behind which there is memory: a mapping,
// allocated device memory, or host memory that the driver knows.
type backing struct {
	m *Machine
	span
	kind    string      // as in the leak report
	object  *object     // in the leak report
	context *gpuContext // owner; nil for a mapping
	owner   *module     // of a module's variable
	busy    int         // copies in progress

	mem        *memory              // of a mapping or of device memory
	handle     *handle              // of a mapping
	access     []driver.AccessFlags // of a mapping, by device
	hostAccess driver.AccessFlags   // of a mapping, as granted to the host
	numaAccess driver.AccessFlags   // and to its node
	placed     bool                 // the CPU has pages at the mapping's address

	host    []byte                // host memory, pinned or registered
	flags   driver.HostAllocFlags // of pinned memory
	piece   *piece                // of a slab that small host memory is
	async   *async                // of stream-ordered device memory
	lease   *lease                // of device memory that a graph allocated
	managed *managed              // of managed memory
	history history               // of host memory
}

// evict ends the range: its memory is out of reach from now on. Copies in
// progress keep device memory alive; host memory they must leave first, since
// it goes back to the system. A caller that waited until the machine was closed
// finds it dismantled.
func (m *Machine) evict(r *backing) {
	if m.dismantled {
		return
	}
	m.backing.remove(r.lo)
	for r.host != nil && r.busy > 0 {
		m.changed.Wait()
	}
	if m.dismantled {
		return // all else went with the machine
	}
	m.finishStuck()
	m.finish(r)
}

// finishStuck retries the ranges that the operating system refused to unmap.
func (m *Machine) finishStuck() {
	again := m.stuck
	m.stuck = nil
	for _, r := range again {
		m.finish(r)
	}
}

// finish returns the range and its memory. If the system refuses, as it does to a process
// that has no mapping left for what would be cut, the range stays in use until a later
// call.
func (m *Machine) finish(r *backing) {
	if err := r.dismantle(); err != nil {
		m.note("%s at %#x stays in use, and is tried again: %v", r.kind, r.lo, err)
		m.stuck = append(m.stuck, r)
		return
	}
	if r.managed != nil {
		r.managed.pages.each(span{0, r.mem.size}, m.unpage)
	}
	if r.mem != nil {
		r.mem.drop()
	}
	switch {
	case r.lease != nil:
		r.lease.drop()
	case r.ownsAddresses():
		m.giveAddresses(r.addresses())
	}
	if r.kind == KindHostMemory {
		m.host.give(roundUp(r.size(), host.PageSize()))
	}
}

// ownsAddresses reports whether the addresses go back with the range: not those of a
// reservation, of a graph's lease, of the host or of a slab.
func (r *backing) ownsAddresses() bool {
	return r.lease == nil && (r.kind == KindDeviceMemory || r.kind == KindIPCMemory || r.kind == KindManagedMemory && r.mem.piece == nil)
}

// addresses returns the addresses that the range took: whole pages, for managed memory.
func (r *backing) addresses() span {
	if r.managed != nil {
		return span{r.lo, r.lo + r.mem.size}
	}
	return r.span
}

// dismantle returns to the system what the range itself took.
func (r *backing) dismantle() error {
	switch {
	case r.piece != nil:
		r.piece.free()
	case r.kind == KindHostMemory:
		return osmem.Free(r.host)
	case r.placed && (r.mem == nil || r.mem.piece == nil):
		return osmem.Clear(r.lo, r.addresses().size())
	}
	return nil
}

// covered reports whether there is memory behind all n addresses from p on, or
// will be when a graph runs.
func (m *Machine) covered(p, n uint64) bool {
	l, ok := m.leased.find(p)
	return m.backed(p, n) || ok && n <= l.hi-p || m.isSystem(p, n)
}

// backed reports whether there is memory behind all n addresses from p on.
func (m *Machine) backed(p, n uint64) bool {
	return n <= ^uint64(0)-p && m.backedTo(p, n) == p+n
}

// backedTo returns the first of n addresses from p on that has no memory, or else their end.
func (m *Machine) backedTo(p, n uint64) uint64 {
	at := p
	for r := range m.backing.overlapping(p, p+n) {
		if r.lo > at {
			break
		}
		at = r.hi
	}
	return min(at, p+n)
}

// missing reports whether a call must be refused because some of n addresses have no memory.
// Its result does not say where, so the log does.
func (m *Machine) missing(call driver.Call, p, n uint64) bool {
	if m.covered(p, n) {
		return false
	}
	if n <= ^uint64(0)-p {
		at := m.backedTo(p, n)
		m.explain(call, "%v on [%#x, %#x+%#x): illegal address %#x: %s", call, p, p, n, at, m.whatIsAt(at, created.Add(1)))
	}
	return true
}

// place is one side of a copy: an address that is resolved when the work is
// done, or bytes that are there already.
type place struct {
	addr  uint64
	bytes []byte
}

// hostPlace is the host side of a copy. Memory that the driver knows is
// resolved late; other memory is pageable.
func (m *Machine) hostPlace(p unsafe.Pointer, n uint64) (at place, pageable bool) {
	if addr := uint64(uintptr(p)); m.backed(addr, n) {
		return place{addr: addr}, false
	}
	return place{bytes: unsafe.Slice((*byte)(p), n)}, true
}

// pins keep memory in place while it is copied.
type pins struct {
	m    *Machine
	held []*backing
	runs [][]byte
}

// pin resolves n bytes for work somewhere, which needs the given access. What races with the
// access is reported.
func (m *Machine) pin(at site, call driver.Call, to place, n uint64, need driver.AccessFlags) (*pins, *fault) {
	if to.bytes != nil {
		return &pins{runs: [][]byte{to.bytes}}, nil
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	p, f := m.pinLocked(at, call, to.addr, n, need)
	if f == nil {
		m.touch(at, call, to.addr, n, need == driver.AccessReadWrite)
	}
	return p, f
}

// pinWord is pin for a word that orders work: it is accessed atomically, and races with
// nothing. What the work touched before precedes what is done behind a read of the word.
func (m *Machine) pinWord(at site, call driver.Call, addr, size uint64, need driver.AccessFlags) (*pins, *fault) {
	m.mu.Lock()
	defer m.mu.Unlock()
	p, f := m.pinLocked(at, call, addr, size, need)
	if f == nil && need == driver.AccessReadWrite {
		at.op.release()
	}
	return p, f
}

// pinLocked locates n bytes and keeps them there until the pins are released.
func (m *Machine) pinLocked(at site, call driver.Call, addr, n uint64, need driver.AccessFlags) (*pins, *fault) {
	p, f := m.locate(at, call, addr, n, need)
	if f != nil {
		return nil, f
	}
	for _, r := range p.held {
		r.busy++
		if r.mem != nil {
			r.mem.refs++
			r.mem.busy++
		}
	}
	return p, nil
}

// locate is pin without holding anything: it serves for as long as the lock is
// held.
func (m *Machine) locate(at site, call driver.Call, addr, n uint64, need driver.AccessFlags) (*pins, *fault) {
	if n > ^uint64(0)-addr {
		return nil, m.illegal(at, call, addr, addr, n, "the addresses end before it does")
	}
	if why := m.mustNotUse(span{addr, addr + n}, at.submitted); why != "" {
		return nil, m.illegal(at, call, addr, addr, n, why)
	}
	p := &pins{m: m}
	next := addr
	for r := range m.backing.overlapping(addr, addr+n) {
		if r.lo > next {
			break
		}
		if why := r.v.refuses(at, call, need); why != "" {
			return nil, m.illegal(at, call, next, addr, n, why)
		}
		part := min(r.hi, addr+n) - next
		if why := r.v.replaces(at, call, span{next, next + part}); why != "" {
			return nil, m.illegal(at, call, next, addr, n, why)
		}
		if r.v.managed != nil && at.device.concurrent() {
			_, pages, _ := m.pagesAt(driver.Ptr(next), part)
			if why := r.v.touch(int32(at.device.ordinal), pages, need == driver.AccessReadWrite); why != "" {
				return nil, m.illegal(at, call, next, addr, n, why)
			}
		}
		p.runs = append(p.runs, r.v.runs(next-r.lo, part)...)
		p.held = append(p.held, r.v)
		next += part
	}
	if next < addr+n && at.device.pageable() && m.isSystem(next, addr+n-next) {
		part := span{next, addr + n}
		if why := m.system.touch(int32(at.device.ordinal), m.system.whole(part), need == driver.AccessReadWrite); why != "" {
			return nil, m.illegal(at, call, next, addr, n, why)
		}
		p.runs = append(p.runs, systemBytes(part))
		next = part.hi
	}
	if next < addr+n {
		return nil, m.illegal(at, call, next, addr, n, m.whatIsAt(next, at.submitted))
	}
	return p, nil
}

func (p *pins) release() {
	if p.m == nil {
		return
	}
	p.m.mu.Lock()
	defer p.m.mu.Unlock()
	for _, r := range p.held {
		r.busy--
		if r.mem != nil {
			r.mem.busy--
			r.mem.drop()
		}
	}
	p.m.changed.Broadcast()
}

// accessText describes an access.
func accessText(f driver.AccessFlags) string {
	switch f {
	case driver.AccessNone:
		return "no access"
	case driver.AccessRead:
		return "read access"
	}
	return "read and write access"
}

// refuses says why work must not touch the range, or "".
func (r *backing) refuses(at site, call driver.Call, need driver.AccessFlags) string {
	switch {
	case r.mem != nil && r.mem.team != nil:
		return "it is a multicast address, which only multimem instructions may touch: a load, a store, a copy or a memset there is undefined; use the device's own address of its memory"
	case r.kind == KindDeviceMemory && call == driver.CallLaunchKernel && r.context.device != at.device && !at.peers[r.context]:
		return fmt.Sprintf("the memory is allocated on device %d: a kernel of device %d reaches it only with peer access, which cuCtxEnablePeerAccess of libcuda gives and the library has no use for",
			r.context.device.ordinal, at.device.ordinal)
	case r.kind == KindMapping && r.access[at.device.ordinal]&need != need:
		return fmt.Sprintf("device %d has %s to the mapping [%#x, %#x), and this needs %s: grant it with cuMemSetAccess",
			at.device.ordinal, accessText(r.access[at.device.ordinal]), r.lo, r.hi, accessText(need))
	case r.async != nil:
		return r.async.refuses()
	case r.managed != nil:
		return r.attached(at)
	}
	return ""
}

// illegal returns the fault of work that touches an address that it must not touch.
func (m *Machine) illegal(at site, call driver.Call, addr, start, n uint64, why string) *fault {
	return &fault{driver.IllegalAddress, fmt.Sprintf("%v on [%#x, %#x+%#x) in context %#x of device %d: illegal address %#x: %s",
		call, start, start, n, uintptr(at.handle), at.device.ordinal, addr, why)}
}

// Bytes copies n bytes out of device memory, as they are now, whatever has access
// to it. Where not all of it is memory, and on a machine that was closed, the
// error says so.
func (m *Machine) Bytes(ptr cuda.Ptr, n int) ([]byte, error) {
	if n < 0 {
		return nil, fmt.Errorf("sim: %d bytes at %v; lengths are not negative", n, ptr)
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	runs, err := m.bytesAt(uint64(ptr), uint64(n))
	if err != nil {
		return nil, err
	}
	b := make([]byte, n)
	copyRuns([][]byte{b}, runs)
	return b, nil
}

// Poke copies b into device memory, whatever has access to it. It fails where
// Bytes does, and then has written nothing.
func (m *Machine) Poke(ptr cuda.Ptr, b []byte) error {
	m.mu.Lock()
	defer m.mu.Unlock()
	runs, err := m.bytesAt(uint64(ptr), uint64(len(b)))
	if err != nil {
		return err
	}
	copyRuns(runs, [][]byte{b})
	return nil
}

// bytesAt returns n bytes of device memory, in the pieces that they lie in.
func (m *Machine) bytesAt(ptr, n uint64) (runs [][]byte, err error) {
	switch {
	case m.closed:
		return nil, fmt.Errorf("sim: machine %s was closed, and its memory went with it; read it before", m.name)
	case !m.backed(ptr, n):
		return nil, fmt.Errorf("sim: not all of [%#x, %#x+%#x) is memory of machine %s; map it, or ask for less", ptr, ptr, n, m.name)
	}
	for r := range m.backing.overlapping(ptr, ptr+n) {
		if r.v.mem != nil && r.v.mem.team != nil {
			return nil, fmt.Errorf("sim: [%#x, %#x) are multicast addresses, which have no bytes of their own: take those of a device's memory", r.lo, r.hi)
		}
		lo, hi := max(ptr, r.lo), min(ptr+n, r.hi)
		runs = append(runs, r.v.runs(lo-r.lo, hi-lo)...)
	}
	return runs, nil
}

// runs are n bytes of the range in as many pieces as they lie in.
func (r *backing) runs(off, n uint64) [][]byte {
	if r.mem == nil {
		return [][]byte{r.host[off:][:n]}
	}
	var all [][]byte
	for b := range r.mem.runs(off, n) {
		all = append(all, b)
	}
	return all
}

func roundUp(n, unit uint64) uint64 { return (n + unit - 1) / unit * unit }
