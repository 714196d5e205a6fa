package ledger

import (
	"errors"
	"fmt"
	"io/fs"
	"math/rand/v2"
	"os"

	"github.com/cuvmm/cuvmm/internal/osmem"
)

const machineFile = "machine"

// Ledger is the books of a machine as one opening of it sees them. One goroutine
// at a time may use it.
type Ledger struct {
	folder *osmem.Folder
	board  *osmem.Board
	books
	me      *holder // the own record; nil without a part in the machine
	givenUp []entry // memories that this holder gave up while others held them
}

// Machine is what the first process says of a machine.
type Machine struct {
	// Description is kept unchanged for later processes.
	Description []byte
	// Limits are the sizes of the pools of memory, in bytes.
	Limits []uint64
}

// ErrFull says that the books have no free record.
var ErrFull = errors.New("the machine's folder has no room for more")

// Open opens the books of the machine in a folder. Where there is none yet, it
// is made: the folder too, for this user alone, and the machine as described.
// The one that is there may have another [Ledger.Description]. [Ledger.Join]
// comes next.
func Open(path string, m Machine) (*Ledger, error) {
	if len(m.Description) > maxDescription || len(m.Limits) > maxPools {
		return nil, fmt.Errorf("a description of %d bytes and %d pools of memory; at most %d and %d",
			len(m.Description), len(m.Limits), maxDescription, maxPools)
	}
	if err := os.MkdirAll(path, 0o700); err != nil {
		return nil, err
	}
	return open(path, &m)
}

// Read opens the books of a machine that is there, without a part in it.
func Read(path string) (*Ledger, error) { return open(path, nil) }

func open(path string, m *Machine) (*Ledger, error) {
	folder, err := osmem.OpenFolder(path)
	if err != nil {
		return nil, err
	}
	board, err := folder.OpenBoard(machineFile)
	if m != nil && errors.Is(err, fs.ErrNotExist) {
		if err = found(folder, *m); err == nil {
			board, err = folder.OpenBoard(machineFile)
		}
	}
	if err == nil {
		if b := board.Bytes(); uint64(len(b)) != fileSize || booksIn(b).magic.Load() != magic {
			_ = board.Close()
			err = fmt.Errorf("the file %q in it is not of a machine, or of another version of this library", machineFile)
		}
	}
	if err != nil {
		_ = folder.Close()
		return nil, err
	}
	return &Ledger{folder: folder, board: board, books: booksIn(board.Bytes())}, nil
}

// found writes the books of a new machine, unless another process is first.
func found(folder *osmem.Folder, m Machine) error {
	file, err := folder.NewFile(fileSize)
	if err != nil {
		return err
	}
	defer func() { _ = file.Close() }()
	b := booksIn(file.Bytes())
	copy(b.text, m.Description)
	b.description.Store(uint64(len(m.Description)))
	for i, n := range m.Limits {
		b.limits[i].Store(n)
	}
	for i := range b.identity {
		b.identity[i].Store(rand.Uint64())
	}
	b.pools.Store(uint64(len(m.Limits)))
	b.magic.Store(magic)
	if err := folder.Link(file, machineFile); !errors.Is(err, fs.ErrExist) {
		return err
	}
	return nil
}

// Description is what the first process said of the machine.
func (l *Ledger) Description() []byte {
	return l.text[:min(l.description.Load(), maxDescription)]
}

// Identity tells machines apart.
func (l *Ledger) Identity() [2]uint64 { return [2]uint64{l.identity[0].Load(), l.identity[1].Load()} }

// Join makes a record for this opening. It lives until Close, or as long as the
// process.
func (l *Ledger) Join() error {
	l.lock()
	defer l.unlock()
	l.sweep() // files of killed processes use memory of the system
	for i := range l.books.holders {
		h := &l.books.holders[i]
		if h.serial.Load() != 0 {
			continue
		}
		if locked, _ := l.board.Locked(lockHolder + uint64(i)); locked {
			continue // its holder is just leaving
		}
		if err := l.board.Lock(lockHolder + uint64(i)); err != nil {
			return fmt.Errorf("lock a record: %w", err)
		}
		if locked, err := l.asOthers(i); err != nil || !locked {
			return errors.Join(fmt.Errorf("the folder's file system keeps no locks; take a folder on another"), err)
		}
		h.clear() // a process was stopped while it joined
		h.pid.Store(uint64(os.Getpid()))
		l.header.holders.Store(max(l.header.holders.Load(), uint64(i)+1))
		h.serial.Store(l.serials.Add(1))
		l.me = h
		return nil
	}
	return fmt.Errorf("%d processes are on the machine: %w", maxHolders, ErrFull)
}

// asOthers looks at a record's lock as another process sees it.
func (l *Ledger) asOthers(i int) (bool, error) {
	other, err := l.folder.OpenBoard(machineFile)
	if err != nil {
		return false, err
	}
	defer func() { _ = other.Close() }()
	return other.Locked(lockHolder + uint64(i))
}

// Close gives up what the holder holds, and its record. It must have unmapped
// its memory.
func (l *Ledger) Close() error {
	if l.me != nil {
		l.lock()
		l.me.clear()
		l.sweepMemories()
		l.unlock()
	}
	return errors.Join(l.board.Close(), l.folder.Close())
}

// lock begins a transaction. It never fails but by a defect.
func (l *Ledger) lock() {
	if err := l.board.Lock(lockBooks); err != nil {
		panic(fmt.Sprintf("ledger: the lock of the machine's books: %v", err))
	}
}

func (l *Ledger) unlock() {
	if err := l.board.Unlock(lockBooks); err != nil {
		panic(fmt.Sprintf("ledger: the lock of the machine's books: %v", err))
	}
}
