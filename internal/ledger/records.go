package ledger

import (
	"sync/atomic"
	"unsafe"
)

// The file: the header, the description, the holders, the memories.
const (
	magic = 0x6375766d6d000005 // its last byte is the version

	maxHolders  = 1 << 10
	maxMemories = 1 << 15
	maxPools    = 1 << 8

	descriptionAt  = 4096
	maxDescription = 1<<16 - descriptionAt
	holdersAt      = 1 << 16
)

// The bytes that are locked: one by each transaction on the books, and one by each
// holder for as long as it lives.
const (
	lockBooks  = 0
	lockHolder = 1 // and as many more as the holder's index
)

type header struct {
	magic       atomic.Uint64
	identity    [2]atomic.Uint64 // random: no other machine has it
	description atomic.Uint64    // its length in bytes
	pools       atomic.Uint64
	serials     atomic.Uint64           // how many holders there ever were
	ids         atomic.Uint64           // how many memories
	holders     atomic.Uint64           // one past the last record that was ever used
	memories    atomic.Uint64           // the same
	limits      [maxPools]atomic.Uint64 // of the pools, in bytes
}

// holder is an opening of the machine.
type holder struct {
	serial atomic.Uint64 // never used twice; 0 in a free record
	pid    atomic.Uint64
	// slots is how many things it has that the machine has a fixed number of.
	slots atomic.Uint64
	_     [5]uint64
	// own is what it keeps to itself of each pool, in bytes.
	own [maxPools]atomic.Uint64
	// holds has a bit for each memory.
	holds [maxMemories / 64]atomic.Uint64
}

func (h *holder) has(memory int) bool { return h.holds[memory/64].Load()&(1<<(memory%64)) != 0 }
func (h *holder) hold(memory int)     { h.holds[memory/64].Or(1 << (memory % 64)) }
func (h *holder) drop(memory int)     { h.holds[memory/64].And(^uint64(1 << (memory % 64))) }

// clear leaves a free record.
func (h *holder) clear() {
	h.slots.Store(0)
	for i := range h.own {
		h.own[i].Store(0)
	}
	for i := range h.holds {
		h.holds[i].Store(0)
	}
	h.serial.Store(0) // last, so that a process that is stopped before begins again
}

// memory is a piece of shared memory.
type memory struct {
	id    atomic.Uint64 // never used twice; 0 in a free record
	pool  atomic.Uint64
	size  atomic.Uint64
	maker atomic.Uint64 // its holder's serial
	// offered is 1 while others may hold it without a descriptor, as long as its
	// maker holds it.
	offered atomic.Uint64
	// slot is 1 while it takes one of the slots.
	slot atomic.Uint64
	// pins is how many memories it holds while a descriptor of it is open: its
	// file begins with their numbers.
	pins atomic.Uint64
	_    [1]uint64
}

const (
	memoriesAt = holdersAt + maxHolders*unsafe.Sizeof(holder{})
	fileSize   = uint64(memoriesAt + maxMemories*unsafe.Sizeof(memory{}))
)

// books is the mapped file.
type books struct {
	*header
	text     []byte // of the description
	holders  *[maxHolders]holder
	memories *[maxMemories]memory
}

func booksIn(b []byte) books {
	base := unsafe.Pointer(unsafe.SliceData(b))
	return books{
		(*header)(base), b[descriptionAt:][:maxDescription],
		(*[maxHolders]holder)(unsafe.Add(base, holdersAt)),
		(*[maxMemories]memory)(unsafe.Add(base, memoriesAt)),
	}
}

// The records that were ever used. The file's numbers are bounded here, once, since any
// process may have written them.

func (b *books) usedHolders() []holder { return b.holders[:min(b.header.holders.Load(), maxHolders)] }

func (b *books) usedMemories() []memory {
	return b.memories[:min(b.header.memories.Load(), maxMemories)]
}
