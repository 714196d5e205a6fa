package main

// # The cache in front of a pool
//
// Notes for readers of the source. A request of a C program or of PyTorch that entered Go
// would take a microsecond, and have the runtime's monitor thread look some 60 times in the 10 ms that the runtime
// then leaves the thread its processor. So the C front keeps
// blocks that were freed, and serves requests from them (cache.c). In the steady state of
// a training loop it enters Go for nothing.
//
//	cuvmm_alloc ──► the driver: does the stream capture? ──► cache ──serves──► block
//	                         │ yes, or an error                │ has none
//	                         └─────────► Go: the pool ◄────────┘ ──► one block, and up to 16 more that are free
//	cuvmm_free  ──► cache ──keeps──► (done)
//	                  │ more than 64 MiB ──► Go: the pool has up to 128 back at once
//	                  └ not to be kept   ──► Go: the pool frees it
//
// # What it keeps
//
// Blocks of requests up to 256 KiB, which are slots of slabs (vmm/pool/slab.go), and of larger
// ones up to 4 MiB, which the pool then rounds up to a class (vmm/pool/front.go): each on a list of
// its stream and its class. While live blocks have no more than 8 MiB that they do not need, the pool rounds
// up by as much as half, so that caches of keys and values, which grow with each step, reach the next class
// seldom; a request is then also served from classes up to half as large again. Else
// the pool rounds up by an eighth at most, and not at all while more than 128 MiB are requested, or before more
// large blocks were freed than are live: a program first requests its weights, which stay, and would serve no other request.
// What is freed on a stream serves the stream's next request at once, whatever the GPU does,
// since its order is the order of use: as in a shard of the pool. So nothing waits, and a
// thread may free what another requested. To the pool such a block is live. When it goes back
// its epoch is a later one than when it was freed, which is safe.
//
// The pool frees at once, as before: larger blocks; blocks of a capture; blocks that a further
// stream uses (cuvmm_use); those of a stream that was closed, and of streams beyond the 64th.
// Requests of a stream that captures go to the pool. The driver tells that in one call, which
// finds its context by the stream and ends no capture in any mode. The legacy stream is not asked
// about: it never captures. While a blocking stream does, the pool refuses requests on the legacy
// stream, whose work would end that capture; what the cache has it serves, since the block was free
// in the legacy stream's own order. As a lost device shows in this call first, on the
// legacy stream it shows in the caller's next launch.
//
// A table finds a block's record by its address: the callers of cuvmm_free name nothing else.
// All blocks of the pool have one, whether they may be kept or not. So the cache refuses what
// is freed twice, knows the size of each, and counts for the pool (front.Counts): what it keeps
// is free to everyone.
//
// # When it stands aside
//
// What asks the pool for memory that the cache may have, or looks at blocks, holds it first
// (Pool.aside, cache.Hold): it passes every call on to the pool, gives back what it has, waits
// for what other threads carry between the two, and goes on when the holder is done.
//
//	a small request that needs a new slab       until it is served: so the cache makes the pool
//	                                            hold no more, but for 8 MiB, which it gets when
//	                                            that empties it again and again (pool/front.go)
//	a larger request that nothing free serves   it only gives back its larger blocks, at once
//	a request that finds no memory              until it is served or refused, before anything is trimmed
//	Trim, and pressure from outside             until that ends
//	a capture begins, a stream closes           for a moment
//	decay                                       for a moment in each window
//	Snapshot, Live                              while they read; the pool first learns at which
//	                                            sizes its blocks were served since
//	a history                                   as long as it is kept
//	the pool is suspended (vmm.Suspend)         until it is awake
//	Close                                       until it ends
//
// # What a call costs
//
// A program's own work leaves the processor's caches cold between two calls, so what counts is
// the number of lines that a call touches. Those of a warm stream are: the flags and pools of
// torch.cc, the table of caches, the cache's first line and its counts, the stream, the list of the
// class, and the record; for a request also where its class is found, for a free the bucket.
// The functions of this way lie side by side (CUVMM_HOT), and are called directly. What needs
// more of the stack, such as an error's text, is in functions of its own.
//
// # Locks
//
// A cache has one lock, below all of the pool's, held over no call but the C library's
// allocations. It is a byte that threads spin on, and soon sleep for a moment. Who holds the cache
// may have the pool's pressing lock, and none of misses, mu
// and a shard's: what it waits for, calls of Free and More, takes shards' locks only.
//
// # Forks, faults, the end
//
// A child of fork has no caches, so no call waits for a lock that another thread of the parent may have held,
// and each is refused. After a fault of the library there are none either: every call enters Go, which refuses it.
// The cache installs no signal handler, and leaves errno alone. A closed pool's cache stays as an
// empty shell of a kilobyte, because a call with the old number may still be in it. At the end
// of the process nothing is given back.
//
// # What graph trees would need
//
// torch.compile with mode="reduce-overhead" captures a tree of graphs in one memory pool: before
// it captures or replays another branch it sets the pool back to what it was behind the parent's
// graph. An arena would need four operations; none is built.
//
//   - Whether the live blocks of an arena are exactly those of a list of addresses
//     (checkPoolLiveAllocations). Its shards know that.
//   - A checkpoint (getCheckpointState): for each span and slab of its shards the blocks with
//     their addresses, sizes and classes, in order, and what is live. It holds no memory: an
//     arena's chunks never move or leave while a graph is there.
//   - To set a checkpoint back (setCheckpointPoolState): every live block is made stale, waiting
//     ones are settled, since the tree orders its graphs; then each live block of the checkpoint
//     is made again at its address: an extent carved out at a given place, a slot taken by its
//     number, in a slab that has its chunk and class back. The caller gets the addresses that
//     were freed and made, and PyTorch ends the tensors that had the former without freeing
//     them. Later frees of these addresses belong to the blocks made anew, so the table of the
//     cache must be replaced in the same step.
//   - A capture that begins in an arena with live blocks of the checkpoint, whose free blocks
//     serve any of its streams: as sealed epochs do now for what the capture before left.
//
// PyTorch 2.11 asks its allocator for the three by virtual functions that a pluggable allocator
// raises in, and has no setters for. A shim compiled against its headers, as the one of
// own_error, would have to stand in for the whole allocator.
