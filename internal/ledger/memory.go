package ledger

import (
	"fmt"
	"slices"

	"github.com/cuvmm/cuvmm/internal/osmem"
)

// entry is where a memory's record was at the last look, and whose it was.
type entry struct {
	index int
	id    uint64
}

// aFew is how many memories are looked after at every turn.
const aFew = 4

func fileOf(id uint64) string { return fmt.Sprintf("memory-%016x", id) }

// Acquire counts n bytes of a pool as this holder's own, if so many are free.
func (l *Ledger) Acquire(pool int, n uint64) bool {
	l.lock()
	defer l.unlock()
	l.checkGivenUp()
	if n > l.free(pool) { // more may be free than the books say yet
		l.sweep()
		if n > l.free(pool) {
			return false
		}
	}
	l.me.own[pool].Add(n)
	return true
}

// Release counts n of this holder's own bytes as free again.
func (l *Ledger) Release(pool int, n uint64) { l.me.own[pool].Add(-n) }

// Own is how much of a pool this holder keeps to itself, in bytes.
func (l *Ledger) Own(pool int) uint64 { return l.me.own[pool].Load() }

// Free is how much of a pool is free, in bytes.
func (l *Ledger) Free(pool int) uint64 {
	l.lock()
	defer l.unlock()
	l.sweep()
	return l.free(pool)
}

// free is what the books say. It is exact after sweep.
func (l *Ledger) free(pool int) uint64 {
	return l.limits[pool].Load() - min(l.used(pool), l.limits[pool].Load())
}

func (l *Ledger) used(pool int) (n uint64) {
	for i := range l.usedHolders() {
		if h := &l.books.holders[i]; h.serial.Load() != 0 {
			n += h.own[pool].Load()
		}
	}
	for i := range l.usedMemories() {
		if m := &l.books.memories[i]; m.id.Load() != 0 && m.pool.Load() == uint64(pool) {
			n += m.size.Load()
		}
	}
	return n
}

// NewID numbers a memory. No memory of the machine ever has the same.
func (l *Ledger) NewID() uint64 { return l.ids.Add(1) }

// NewFile makes the file of a memory, of n bytes in all. Publish names it.
func (l *Ledger) NewFile(n uint64) (*osmem.Shared, error) { return l.folder.NewFile(n) }

// Publish makes size bytes, which are this holder's own so far, shared memory
// that it holds.
func (l *Ledger) Publish(file *osmem.Shared, id uint64, pool int, size uint64) error {
	l.lock()
	defer l.unlock()
	i, err := l.newMemory()
	if err != nil {
		return err
	}
	m := &l.books.memories[i]
	m.pool.Store(uint64(pool))
	m.size.Store(size)
	m.maker.Store(l.me.serial.Load())
	m.offered.Store(0)
	m.slot.Store(0)
	m.pins.Store(0)
	l.me.hold(i)
	m.id.Store(id)
	if err := l.folder.Link(file, fileOf(id)); err != nil {
		l.me.drop(i)
		m.id.Store(0)
		return err
	}
	l.me.own[pool].Add(-size)
	return nil
}

// newMemory finds a free record.
func (l *Ledger) newMemory() (int, error) {
	free := func() (int, bool) {
		used := l.usedMemories()
		for i := range used {
			if used[i].id.Load() == 0 {
				return i, true
			}
		}
		if len(used) < maxMemories {
			l.header.memories.Store(uint64(len(used)) + 1)
			return len(used), true
		}
		return 0, false
	}
	i, ok := free()
	if !ok {
		l.sweep()
		if i, ok = free(); !ok {
			return 0, fmt.Errorf("%d memories are shared: %w", maxMemories, ErrFull)
		}
	}
	// A process that was stopped while it published may have left its mark.
	for h := range l.usedHolders() {
		l.books.holders[h].drop(i)
	}
	return i, nil
}

// Hold holds a memory, if it is there.
func (l *Ledger) Hold(id uint64) bool {
	l.lock()
	defer l.unlock()
	i, ok := l.find(id)
	if ok {
		l.me.hold(i)
	}
	return ok
}

// Offer lets others hold a memory by its number alone, without a descriptor, for
// as long as this holder, which made it, holds it.
func (l *Ledger) Offer(id uint64) {
	l.lock()
	defer l.unlock()
	if i, ok := l.find(id); ok {
		l.books.memories[i].offered.Store(1)
	}
}

// Accept holds a memory that is offered.
func (l *Ledger) Accept(id uint64) bool {
	l.lock()
	defer l.unlock()
	l.bury()
	i, ok := l.find(id)
	if !ok || l.books.memories[i].offered.Load() == 0 {
		return false
	}
	for j := range l.usedHolders() {
		h := &l.books.holders[j]
		if h.serial.Load() == l.books.memories[i].maker.Load() && h.has(i) {
			l.me.hold(i)
			return true
		}
	}
	return false
}

// Drop ends Hold, Accept or Publish. The memory is gone with its last holder.
func (l *Ledger) Drop(id uint64) {
	l.lock()
	defer l.unlock()
	l.checkGivenUp()
	i, ok := l.find(id)
	if !ok {
		return
	}
	l.me.drop(i)
	if m := &l.books.memories[i]; m.maker.Load() == l.me.serial.Load() {
		m.offered.Store(0)
	}
	switch {
	case l.bury():
	case l.heldByHolder(i): // that process will remove it
	case !l.heldByDescriptor(i, l.pinned()):
		l.remove(i)
	case !slices.Contains(l.givenUp, entry{i, id}):
		l.givenUp = append(l.givenUp, entry{i, id})
	}
}

// Open maps a memory's file, which costs no descriptor. The holder must hold the
// memory.
func (l *Ledger) Open(id uint64) (*osmem.Shared, error) { return l.folder.OpenFile(fileOf(id)) }

// Export makes a descriptor of a memory that holds it while it is open anywhere.
// It belongs to the caller.
func (l *Ledger) Export(id uint64) (int, error) { return l.folder.Export(fileOf(id)) }

// Tail reads the last page of a memory's file by a descriptor, and returns the
// file's size in bytes too. [Ledger.Is] reports whether it was one.
func (l *Ledger) Tail(fd int) (page []byte, size uint64, err error) { return l.folder.Tail(fd) }

// Is reports whether a descriptor is of a memory.
func (l *Ledger) Is(id uint64, fd int) bool { return l.folder.Is(fileOf(id), fd) }

func (l *Ledger) find(id uint64) (int, bool) {
	for i := range l.usedMemories() {
		if id != 0 && l.books.memories[i].id.Load() == id {
			return i, true
		}
	}
	return 0, false
}
