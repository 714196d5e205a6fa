package ledger

// A machine has a fixed number of slots for some things. One is taken by a
// memory, and free again when that is gone, or by a holder itself.

// AcquireSlot acquires one of so many slots, if one is free: for the memory of that
// number, or for this holder itself where it is 0. A memory takes one only once.
func (l *Ledger) AcquireSlot(id uint64, limit int) bool {
	l.lock()
	defer l.unlock()
	i, ok := l.find(id)
	if ok && l.books.memories[i].slot.Load() != 0 {
		return true
	}
	if l.slots() >= limit {
		l.sweep()
		if l.slots() >= limit {
			return false
		}
	}
	if ok {
		l.books.memories[i].slot.Store(1)
	} else {
		l.me.slots.Add(1)
	}
	return true
}

// ReleaseSlot releases a slot that the holder acquired for itself.
func (l *Ledger) ReleaseSlot() { l.me.slots.Add(^uint64(0)) }

func (l *Ledger) slots() (n int) {
	for i := range l.usedHolders() {
		if h := &l.books.holders[i]; h.serial.Load() != 0 {
			n += int(h.slots.Load())
		}
	}
	for i := range l.usedMemories() {
		if m := &l.books.memories[i]; m.id.Load() != 0 {
			n += int(m.slot.Load())
		}
	}
	return n
}

// Do calls f while no other process reads or changes the books, for state that
// processes keep in memory files that they share. f must not use the ledger.
func (l *Ledger) Do(f func()) {
	l.lock()
	defer l.unlock()
	f()
}

// Serial names this holder. No holder of the machine ever has the same.
func (l *Ledger) Serial() uint64 { return l.me.serial.Load() }

// Alive reports whether a holder is still there.
func (l *Ledger) Alive(serial uint64) bool {
	for i := range l.usedHolders() {
		h := &l.books.holders[i]
		if h.serial.Load() != serial {
			continue
		}
		if h == l.me {
			return true
		}
		locked, err := l.board.Locked(lockHolder + uint64(i))
		return locked || err != nil
	}
	return false
}

// Exists reports whether a memory is still there, as far as the books say.
func (l *Ledger) Exists(id uint64) bool {
	_, ok := l.find(id)
	return ok
}
