package sim

import (
	"fmt"
	"sync/atomic"
	"unsafe"

	"github.com/cuvmm/cuvmm/csrc/kernels"
	"github.com/cuvmm/cuvmm/internal/driver"
)

// MultimemStore writes v to a multicast address, and so to every replica, as
// multimem.st does. T holds no pointers and is a multiple of 4 bytes large.
func MultimemStore[T any](k *Kernel, mc uint64, v []T) {
	b := bytesOf(unsafe.SliceData(v), len(v))
	unit := 4
	if unsafe.Sizeof(*new(T))%8 == 0 {
		unit = 8
	}
	k.multimem(mc, uint64(len(b)), unit, driver.AccessReadWrite, func(i int, replicas []lane) {
		value := loadUnit(b[i*unit:], unit)
		for _, r := range replicas {
			r.store(value)
		}
	})
}

// MultimemReduce adds v to every replica at a multicast address, as
// multimem.red does. T holds no pointers and is one unit of the element: a pair
// of 16-bit elements, or one element.
func MultimemReduce[T any](k *Kernel, e kernels.Element, mc uint64, v []T) {
	unit := unitOf[T](e)
	add := adder(e)
	b := bytesOf(unsafe.SliceData(v), len(v))
	k.multimem(mc, uint64(len(b)), unit, driver.AccessReadWrite, func(i int, replicas []lane) {
		value := loadUnit(b[i*unit:], unit)
		for _, r := range replicas {
			for {
				old := r.load()
				if r.swap(old, add(old, value)) {
					break
				}
			}
		}
	})
}

// MultimemLoadReduce reads n units at a multicast address, each the sum of those
// of all replicas, as multimem.ld_reduce does; sums of 16-bit elements add up in
// 32 bits. In which order they are added is not defined, and differs from unit
// to unit. T is as for MultimemReduce.
func MultimemLoadReduce[T any](k *Kernel, e kernels.Element, mc uint64, n int) []T {
	unit := unitOf[T](e)
	all := wideSum(e)
	if all == nil {
		add := adder(e)
		all = func(units []uint64) uint64 {
			sum := units[0]
			for _, u := range units[1:] {
				sum = add(sum, u)
			}
			return sum
		}
	}
	v := make([]T, n)
	b := bytesOf(unsafe.SliceData(v), n)
	var units []uint64
	k.multimem(mc, uint64(len(b)), unit, driver.AccessRead, func(i int, replicas []lane) {
		units = units[:0]
		for j := range replicas {
			units = append(units, replicas[(i+j)%len(replicas)].load())
		}
		storeUnit(b[i*unit:], unit, all(units))
	})
	return v
}

// unitOf returns the size of the element's unit, which T must have.
func unitOf[T any](e kernels.Element) int {
	var v T
	unit := e.UnitBytes()
	if int(unsafe.Sizeof(v)) != unit {
		panic(fmt.Sprintf("%T is not a unit of %v, which has %d bytes", v, e, unit))
	}
	return unit
}

func loadUnit(b []byte, unit int) uint64 {
	if unit == 4 {
		return uint64(*(*uint32)(unsafe.Pointer(unsafe.SliceData(b))))
	}
	return *(*uint64)(unsafe.Pointer(unsafe.SliceData(b)))
}

func storeUnit(b []byte, unit int, v uint64) {
	if unit == 4 {
		*(*uint32)(unsafe.Pointer(unsafe.SliceData(b))) = uint32(v)
		return
	}
	*(*uint64)(unsafe.Pointer(unsafe.SliceData(b))) = v
}

// lane is a place in a replica, which devices and processes touch at once.
type lane struct {
	runs [][]byte
	unit int
}

func (l *lane) narrow() *atomic.Uint32 {
	return (*atomic.Uint32)(unsafe.Pointer(unsafe.SliceData(l.runs[0])))
}

func (l *lane) load() uint64 {
	if l.unit == 4 {
		return uint64(l.narrow().Load())
	}
	return word(l.runs[0]).Load()
}

func (l *lane) store(v uint64) {
	if l.unit == 4 {
		l.narrow().Store(uint32(v))
		return
	}
	word(l.runs[0]).Store(v)
}

func (l *lane) swap(old, v uint64) bool {
	if l.unit == 4 {
		return l.narrow().CompareAndSwap(uint32(old), uint32(v))
	}
	return word(l.runs[0]).CompareAndSwap(old, v)
}

// next goes on by one unit. Pieces are whole pages, so none cuts a unit.
func (l *lane) next() {
	if l.runs[0] = l.runs[0][l.unit:]; len(l.runs[0]) == 0 {
		l.runs = l.runs[1:]
	}
}

// multimem calls do for each unit of n bytes at a multicast address, with its
// place in every replica. Its accesses are atomic, as those of words that order work.
func (k *Kernel) multimem(p, n uint64, unit int, need driver.AccessFlags, do func(i int, replicas []lane)) {
	k.check()
	if n == 0 {
		return
	}
	lanes, release, f := k.m.lanes(k.at, p, n, unit, need)
	if f != nil {
		f.text = "kernel " + k.Name + ": " + f.text
		panic(stop{f})
	}
	defer release()
	defer k.at.acquire()
	k.at.release()
	for i := range int(n) / unit {
		do(i, lanes)
		for j := range lanes {
			lanes[j].next()
		}
	}
}

// lanes finds n bytes at a multicast address in every replica.
func (m *Machine) lanes(at site, p, n uint64, unit int, need driver.AccessFlags) ([]lane, func(), *fault) {
	m.mu.Lock()
	defer m.mu.Unlock()
	const call = driver.CallLaunchKernel
	if p%uint64(unit) != 0 {
		return nil, nil, &fault{driver.MisalignedAddress, fmt.Sprintf("the multicast address %#x is not aligned to %d bytes", p, unit)}
	}
	r, ok := m.backing.find(p)
	switch {
	case !ok:
		return nil, nil, m.illegal(at, call, p, p, n, m.whatIsAt(p, at.submitted))
	case r.v.mem == nil || r.v.mem.team == nil:
		return nil, nil, m.illegal(at, call, p, p, n, "a multimem instruction takes multicast addresses only, and this is an address of one device's or the host's memory")
	case n > r.hi-p:
		return nil, nil, m.illegal(at, call, r.hi, p, n, "it is behind the end of the multicast object's mapping")
	case r.v.access[at.device.ordinal]&need != need:
		return nil, nil, m.illegal(at, call, p, p, n, fmt.Sprintf("device %d has %s to the multicast object, and this needs %s: grant it with cuMemSetAccess",
			at.device.ordinal, accessText(r.v.access[at.device.ordinal]), accessText(need)))
	}
	t := r.v.mem.team
	if t.busy == 0 {
		t.closeFiles(func(memory uint64) bool { return !t.isBound(memory) })
	}
	var lanes []lane
	var held []*memory
	for _, device := range t.members() {
		runs, memories, why := t.replica(device, p-r.lo, n)
		if why != "" {
			return nil, nil, m.illegal(at, call, p, p, n, why)
		}
		lanes = append(lanes, lane{runs, unit})
		held = append(held, memories...)
	}
	held = append(held, t.mem)
	t.busy++
	for _, mem := range held {
		mem.refs++
		mem.busy++
	}
	return lanes, func() {
		m.mu.Lock()
		defer m.mu.Unlock()
		t.busy--
		for _, mem := range held {
			mem.busy--
			mem.drop()
		}
		m.changed.Broadcast()
	}, nil
}

func (t *team) isBound(memory uint64) bool {
	for i := range t.state.binds {
		if b := &t.state.binds[i]; b.holder.Load() != 0 && b.memory.Load() == memory {
			return true
		}
	}
	return false
}
