package ledger

// sweep brings the books up to date: it removes holders that are gone and memories
// without a holder.
func (l *Ledger) sweep() {
	l.sweepHolders()
	l.sweepMemories()
}

// bury is sweep where a holder is gone, which it reports. Otherwise it asks about
// no memory.
func (l *Ledger) bury() bool {
	gone := l.sweepHolders()
	if gone {
		l.sweepMemories()
	}
	return gone
}

// sweepHolders takes out the holders that are gone, and reports whether there
// were any.
func (l *Ledger) sweepHolders() (any bool) {
	for i := range l.usedHolders() {
		h := &l.books.holders[i]
		if h == l.me || h.serial.Load() == 0 {
			continue
		}
		// If that cannot be determined, the holder counts as alive.
		if locked, err := l.board.Locked(lockHolder + uint64(i)); !locked && err == nil {
			h.clear()
			any = true
		}
	}
	return any
}

func (l *Ledger) sweepMemories() {
	pinned := l.pinned()
	for i := range l.usedMemories() {
		if l.books.memories[i].id.Load() != 0 && !l.heldByHolder(i) && !l.heldByDescriptor(i, pinned) {
			l.remove(i)
		}
	}
}

// checkGivenUp checks a few of the memories that this holder gave up, so that files
// without a holder do not pile up until memory runs out.
func (l *Ledger) checkGivenUp() {
	for range min(aFew, len(l.givenUp)) {
		e := l.givenUp[0]
		l.givenUp = l.givenUp[1:]
		switch {
		case l.books.memories[e.index].id.Load() != e.id:
		case l.heldByHolder(e.index) || l.heldByDescriptor(e.index, l.pinned()):
			l.givenUp = append(l.givenUp, e)
		default:
			l.remove(e.index)
		}
	}
}

// heldByHolder and heldByDescriptor report what holds a memory. The first is exact after
// sweepHolders.

func (l *Ledger) heldByHolder(memory int) bool {
	for i := range l.usedHolders() {
		if h := &l.books.holders[i]; h.serial.Load() != 0 && h.has(memory) {
			return true
		}
	}
	return false
}

func (l *Ledger) heldByDescriptor(memory int, pinned map[uint64]bool) bool {
	id := l.books.memories[memory].id.Load()
	return pinned[id] || l.folder.Held(fileOf(id))
}

// remove takes a memory out. Its record goes last: without it no process would look for
// the file.
func (l *Ledger) remove(memory int) {
	m := &l.books.memories[memory]
	if err := l.folder.Remove(fileOf(m.id.Load())); err == nil {
		m.id.Store(0)
	}
}
