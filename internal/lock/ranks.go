// Package lock has the order of the library's locks, and lock types that check it. A
// goroutine that holds a lock takes only locks of a higher rank. Without the build tag
// invariants a [Mutex] is a [sync.Mutex] and an [RWMutex] a [sync.RWMutex]; with it they
// panic when a goroutine takes a lock out of order, whether another goroutine happens to
// block meanwhile or not.
package lock

// Rank is the rank of a lock: one of the types below.
type Rank interface{ rank() int }

// The ranks, the first to be taken first. ARCHITECTURE.md says what each lock guards, and
// what it is held over.
type (
	// Long is the rank of locks that are held for as long as the driver, the GPU or another
	// process takes: of closings, changes, and the reclaimer's pass. They follow each other in
	// the order of ownership, or for an object that is closed and on which nothing runs.
	Long struct{}
	// Words is the rank of what orders a follower's streams, held over their submissions.
	Words struct{}
	// Waiting is the rank of a follower's list of streams that wait.
	Waiting struct{}
	// Publication is the rank of a publication's followers and generations.
	Publication struct{}
	// Buffer is the rank of a buffer's list of chunks. Two are locked in the order of their
	// addresses.
	Buffer struct{}
	// Range is the rank of the mappings of a range of addresses.
	Range struct{}
	// Block is the rank of a context's block of device memory.
	Block struct{}
	// Captures is the rank of what a stream knows of its captures.
	Captures struct{}
	// Leaf is the rank of locks under which no driver call is made and no lock is taken.
	Leaf struct{}
)

func (Long) rank() int        { return 0 }
func (Words) rank() int       { return 1 }
func (Waiting) rank() int     { return 2 }
func (Publication) rank() int { return 3 }
func (Buffer) rank() int      { return 4 }
func (Range) rank() int       { return 5 }
func (Block) rank() int       { return 6 }
func (Captures) rank() int    { return 7 }
func (Leaf) rank() int        { return 8 }

// Locks of these ranks follow each other.
func (Long) nests() bool   { return true }
func (Buffer) nests() bool { return true }
