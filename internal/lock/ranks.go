// Package lock has the order of the library's locks, and lock types that check it. A
// goroutine that holds a lock takes only locks of a higher rank. Without the build tag
// invariants a [Mutex] is a [sync.Mutex] and an [RWMutex] a [sync.RWMutex]; with it they
// panic when a goroutine takes a lock out of order, whether another goroutine happens to
// block meanwhile or not.
package lock

// Rank is the rank of a lock: one of the types below.
type Rank interface {
	rank() order
}

// order is where a rank stands. Locks of one height follow each other in the order of their
// steps; a lock without a step and any other of its height may follow each other.
type order struct{ height, step int }

// The ranks, the first to be taken first. ARCHITECTURE.md says what each lock guards, and
// what it is held over.
type (
	// Long is the rank of locks that are held for as long as the driver, the GPU or another
	// process takes: of closings, changes, and the reclaimer's pass. They follow each other in
	// the order of ownership, or for an object that is closed and on which nothing runs.
	Long struct{}
	// Misses is the rank of what requests to a pool hold that make memory, among those of
	// Long: both kinds are taken under each other.
	Misses struct{}
	// Addresses is the rank of a pool's reservations of address space, likewise.
	Addresses struct{}
	// Pressing is the rank of what a pool holds while others have it give memory back,
	// likewise.
	Pressing struct{}
	// Clock is the rank of the event that counts the epochs of a stream.
	Clock struct{}
	// Pool is the rank of a pool's regions, spans and shards.
	Pool struct{}
	// Shard is the rank of the blocks of a pool's stream.
	Shard struct{}
	// Words is the rank of what orders a follower's streams, held over their submissions.
	Words struct{}
	// Waiting is the rank of a follower's list of streams that wait, and of those that read.
	Waiting struct{}
	// Publication is the rank of a publication's followers and generations.
	Publication struct{}
	// Staging is the rank of what a stream or a capture stages copies from Go memory in.
	Staging struct{}
	// Buffer is the rank of a buffer's list of chunks. Two are locked in the order of their
	// addresses.
	Buffer struct{}
	// Pages is the rank of a source's pages, and of the places where ranges have them.
	Pages struct{}
	// Range is the rank of the mappings of a range of addresses.
	Range struct{}
	// Block is the rank of a context's block of device memory.
	Block struct{}
	// Event is the rank of what is known of an event's last record. Two are locked in the
	// order of their handles.
	Event struct{}
	// Captures is the rank of what a stream knows of its captures.
	Captures struct{}
	// Stem is the rank of locks under which only leaves are taken.
	Stem struct{}
	// Leaf is the rank of locks under which no driver call is made and no lock is taken.
	Leaf struct{}
)

const none = 0 // no step

func (Long) rank() order        { return order{0, none} }
func (Misses) rank() order      { return order{0, 1} }
func (Addresses) rank() order   { return order{0, 2} }
func (Pressing) rank() order    { return order{0, 3} }
func (Clock) rank() order       { return order{1, 1} }
func (Pool) rank() order        { return order{2, 1} }
func (Shard) rank() order       { return order{3, 1} }
func (Words) rank() order       { return order{4, 1} }
func (Waiting) rank() order     { return order{5, 1} }
func (Publication) rank() order { return order{6, 1} }
func (Staging) rank() order     { return order{7, 1} }
func (Buffer) rank() order      { return order{8, none} }
func (Pages) rank() order       { return order{9, 1} }
func (Range) rank() order       { return order{10, 1} }
func (Block) rank() order       { return order{11, 1} }
func (Event) rank() order       { return order{12, none} }
func (Captures) rank() order    { return order{13, 1} }
func (Stem) rank() order        { return order{14, 1} }
func (Leaf) rank() order        { return order{15, 1} }
