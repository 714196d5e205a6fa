package ledger

import "encoding/binary"

// Pin makes a descriptor that holds memories while it is open in any process, without
// giving access to them. It belongs to the caller. write fills in the rest of its file
// of n bytes, which begins with the memories' numbers.
func (l *Ledger) Pin(ids []uint64, n uint64, write func(file []byte, id uint64)) (int, error) {
	id := l.NewID()
	file, err := l.NewFile(n)
	if err != nil {
		return -1, err
	}
	defer func() { _ = file.Close() }()
	b := file.Bytes()[:0]
	for _, pinned := range ids {
		b = binary.LittleEndian.AppendUint64(b, pinned)
	}
	write(file.Bytes(), id)
	if err := l.Publish(file, id, 0, 0); err != nil {
		return -1, err
	}
	l.Do(func() {
		if i, ok := l.find(id); ok {
			l.books.memories[i].pins.Store(uint64(len(ids)))
		}
	})
	fd, err := l.Export(id)
	l.Drop(id) // from here on the descriptor holds it
	return fd, err
}

// pinned are the memories that descriptors of others hold.
func (l *Ledger) pinned() map[uint64]bool {
	var all map[uint64]bool
	for i := range l.usedMemories() {
		m := &l.books.memories[i]
		if m.id.Load() == 0 || m.pins.Load() == 0 || !l.folder.Held(fileOf(m.id.Load())) {
			continue
		}
		if all == nil {
			all = map[uint64]bool{}
		}
		for _, id := range l.pinsOf(m) {
			all[id] = true
		}
	}
	return all
}

// pinsOf are the numbers that a memory pins.
func (l *Ledger) pinsOf(m *memory) (ids []uint64) {
	file, err := l.Open(m.id.Load())
	if err != nil {
		return nil
	}
	defer func() { _ = file.Close() }()
	b := file.Bytes()
	for range min(m.pins.Load(), uint64(len(b)/8)) {
		ids = append(ids, binary.LittleEndian.Uint64(b))
		b = b[8:]
	}
	return ids
}
