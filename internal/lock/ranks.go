// Package lock has the order of the library's locks, and lock types that check it. A
// goroutine that holds a lock takes only locks of a higher rank. Without the build tag
// invariants a [Mutex] is a [sync.Mutex] and an [RWMutex] a [sync.RWMutex]; with it they
// panic when a goroutine takes a lock out of order, whether another goroutine happens to
// block meanwhile or not.
package lock

// Rank is the rank of a lock: one of the types below.
type Rank interface {
	rank() (height int, nests bool)
}

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

// Locks of the ranks that nest follow each other.
func (Long) rank() (height int, nests bool)        { return 0, true }
func (Words) rank() (height int, nests bool)       { return 1, false }
func (Waiting) rank() (height int, nests bool)     { return 2, false }
func (Publication) rank() (height int, nests bool) { return 3, false }
func (Buffer) rank() (height int, nests bool)      { return 4, true }
func (Range) rank() (height int, nests bool)       { return 5, false }
func (Block) rank() (height int, nests bool)       { return 6, false }
func (Captures) rank() (height int, nests bool)    { return 7, false }
func (Leaf) rank() (height int, nests bool)        { return 8, false }
