package ledger

// Usage is what is taken of a machine, and by whom.
type Usage struct {
	Limits, Taken []int // by pool, in bytes
	Holders       []Holder
	Memories      []Memory
}

// Holder is an opening of the machine.
type Holder struct {
	Serial uint64
	PID    int
	Own    []int // by pool, in bytes
}

// Memory is a piece of shared memory.
type Memory struct {
	Pool  int
	Size  int
	Maker uint64   // the serial of the holder that made it, which may be gone
	Held  []uint64 // the serials of the holders
	Open  bool     // an exported descriptor of it is open somewhere
}

// Usage returns what is taken of the machine, at one instant.
func (l *Ledger) Usage() Usage {
	l.lock()
	defer l.unlock()
	l.sweep()
	var u Usage
	pools := int(min(l.pools.Load(), maxPools))
	for p := range pools {
		u.Limits = append(u.Limits, int(l.limits[p].Load()))
		u.Taken = append(u.Taken, int(l.used(p)))
	}
	for i := range l.usedHolders() {
		h := &l.books.holders[i]
		if h.serial.Load() == 0 {
			continue
		}
		holder := Holder{Serial: h.serial.Load(), PID: int(h.pid.Load())}
		for p := range pools {
			holder.Own = append(holder.Own, int(h.own[p].Load()))
		}
		u.Holders = append(u.Holders, holder)
	}
	pinned := l.pinned()
	for i := range l.usedMemories() {
		m := &l.books.memories[i]
		if m.id.Load() == 0 {
			continue
		}
		piece := Memory{Pool: int(m.pool.Load()), Size: int(m.size.Load()), Maker: m.maker.Load(), Open: l.heldByDescriptor(i, pinned)}
		for j := range l.usedHolders() {
			if h := &l.books.holders[j]; h.serial.Load() != 0 && h.has(i) {
				piece.Held = append(piece.Held, h.serial.Load())
			}
		}
		u.Memories = append(u.Memories, piece)
	}
	return u
}
