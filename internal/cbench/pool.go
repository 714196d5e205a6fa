package cbench

import "time"

// PoolOp is an operation of PoolReplay. Its layout is that of the C side.
type PoolOp struct {
	Bytes uint64 // of PoolAlloc
	Block uint32 // of PoolAlloc and PoolFree
	Kind  uint32
}

// The kinds of PoolOp. PoolWait waits for the stream.
const (
	PoolAlloc uint32 = iota
	PoolFree
	PoolWait
)

// PoolReplayed is what PoolReplay measured.
type PoolReplayed struct {
	// Took is the time of allocating and freeing, Waited that of the waits.
	Took, Waited time.Duration
	// Reserved is the most memory that the pool held.
	Reserved uint64
}
