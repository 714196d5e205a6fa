package pool

// # How the pool works
//
// Notes for readers of the source; the package document is for users.
//
// A pool is cut by stream. Each stream that it serves has a shard (shard.go), found
// without a map (core.StreamLocals), with its own lock, free lists and blocks. A
// request that the shard can serve takes that lock and nothing else, and makes no
// driver call; so goroutines on different streams never meet. A request that it cannot
// serve is a miss (miss.go, pressure.go), which escalates: frees that waited and have
// passed, then free memory of other streams that has passed, then chunks that are made
// or moved. docs/life-miss.md follows one. Misses go on side by side, because driver calls
// are made outside of the pool's lock: a miss reserves its gap and takes its chunks under
// it, all at once or none if it is to wait for more. A miss that finds no memory goes on
// alone (Pool.misses), so that it is not refused for chunks that another has gathered.
// Chunks are mapped 16 at a time, since a region, like the driver, maps for one caller at
// a time: a small request waits for one such piece of a large one, not for all of it. Pieces
// of one region take turns in the order in which they come (region.inTurn).
//
// # Two kinds of memory
//
// Small blocks are slots of slabs (slab.go), one chunk each. The header of a slot takes
// half a cache line, and only the slab knows its size class. A slab that loses its chunk
// keeps its headers for the shard's next chunk of its class: chunks of a server that loads
// models change their class thousands of times in a pass. Slabs stay where they were
// mapped, in regions as long as the device's memory. Empty ones serve any size class, and
// before a request is refused also requests up to the granularity: that is what one chunk
// holds, and chunks of slabs are not side by side. Larger requests get their memory by a
// trim, which gives empty slabs back.
//
// All other memory moves. It lies in regions several times as long, filled chunk by
// chunk. A span there is a run of chunks that one shard owns. Its extents (extent.go),
// taken and free, are linked by address between two walls, and the free ones are in a
// tree by size. Of the best fits the one with the lowest address serves a request. Free
// neighbors are coalesced, except that the extent freed last stays apart for the next
// request of its size. Growing and moving are one operation: the pool finds the gap that
// takes the fewest chunks, counting free extents that touch it, and fills it with free
// chunks out of holes and with new ones (gap.go). Large requests take the middle of a
// gap, because what is packed close cannot grow. A request of about a chunk or more that
// is cut out of a much larger free extent comes from its back, so that the extent can
// grow downward when a large request wants it again (shard.position). A graph network
// whose blocks of several GiB vary by a tenth mapped 2,824 chunks in its first pass with
// packed blocks, 1,290 with room between them, and maps 870 from two ends; in its second
// pass 50 in place of 310. Handing memory to another stream as it is mapped changes the
// owner of a span, and calls no driver.
//
// # Address space
//
// A region reserves its range once, so a new chunk takes three driver calls: create, map,
// grant. A slab's chunk takes the first free place. A region's table names the chunk at
// each place, so a block is found by its address under no lock but its shard's. Ranges
// are kept for later, trimmed or not; if address space runs short, empty ones are given
// back first (region.go).
//
// # Map first, unmap later
//
// A chunk that moves is mapped at its new address at once, and stays mapped at its old
// place until the GPU has passed. The order of the stream that freed it is the order of
// use, whichever address the work names (measured: docs/driver-facts.md). So moving
// waits for nothing, a GPU that is behind costs no memory, and a failure leaves
// everything as it was, because nothing was unmapped. The unmap of an old place is
// deferred (move.go): a timer does it (upkeep.go) once no chunk has moved for ten seconds, or too
// many are deferred, and in pieces, because the driver does one call at a time, and
// unmapping competes with the program's own calls. On an H200 a graph network took 5.8
// µs an operation in its second pass with places unmapped after 20 ms, and 2.0 µs with
// places that stayed. A trim first unmaps the old places of what it gives back, since
// only then the memory is gone. A large request unmaps old places itself if a free
// extent can then grow over them and the GPU has passed them. Chunks of other streams
// move once they have passed. Chunks of arenas, chunks that peers were granted, and
// chunks that may be shared do not move. New memory is made only if these are not
// enough, and a request gives nothing back to the driver except to stay within a limit
// or the device: creating soon after a large release takes up to some tens of
// milliseconds.
//
//	address   A          B                 C
//	          ├─ chunk ─┤
//	move      ├▒▒ old ▒▒┤├─ chunk ─┤                      work at A, then at B, in the
//	move      ├▒▒ old ▒▒┤├▒▒ old ▒▒┤       ├─ chunk ─┤    stream's order
//	unmap                                  ├─ chunk ─┤    10 s later, by a trim, or by a
//	                                                      request that needs the place
//
// Seven other designs were measured, with the same traces. Reusing old places, if all or
// most of their memory is free again, saves a fifth of the mappings of a graph network,
// and none where blocks grow by reallocation. Sparing a free extent that is several
// times as long as the request, in favor of shorter ones that are put together, doubles
// what a graph network maps, and triples it where blocks grow by reallocation. Chunks of
// several sizes, larger ones for larger requests, halve the time of large blocks, and
// hold 1.06 of what the graph network requests in place of 1.02, and 1.12 in place of
// 1.006 for growing caches, since holes fit less well. Making new memory in place of
// moving, up to 1.03 of what was requested at once, saves a tenth of the graph network's
// mappings in its second pass, and none in its first. Making the GPU wait for memory of
// another stream, in place of the request, saves the waiting, and can deadlock a program
// whose other stream waits for the host or for another process. Of two designs for programs
// with several streams (counted on a software driver with an H200's costs), one serves a
// large request from free memory of several streams that lies side by side, and saves a
// tenth of the mappings. The other takes an extent of another stream that is half as large
// as the request, and grows it. It saves a third of the graph network's mappings in its
// second pass; but requests of four goroutines take such extents from each other, and wait
// up to three times as long.
//
// # Epochs
//
// Every free extent and slab carries the epoch of its shard in which it was freed. A
// request of another stream that wants it ends the epoch and records an event on the
// stream; once that has passed, so has every earlier epoch. At most one event of a stream
// is in flight, none is recorded before a request wants it, and none on a capturing
// stream. A free that names other streams waits for their epochs in the same way. So
// freeing makes no driver call at all.
//
// Memory that changes its stream (steal.go, lag.go) waits for the GPU. Shards with free chunks
// or waiting blocks are on a list, so a miss does not walk all shards. If the GPU is
// about to pass enough of it, the request waits instead of growing the pool, because
// grown memory would stay. A stream that did not move on within a tenth of a second is
// not waited for again until it does.
//
// # Decay
//
// The pool gives back what it has beyond its greatest need of the last Options.Decay to
// twice that, in pieces, with pauses for what the driver does to released memory
// (upkeep.go). Only the timer pays for that: a stream's peak is counted anyway. A free
// extent has the epoch of the latest free in it, so beside steady work on a stream its
// largest one is never of an epoch that has passed. What is to go is cut out of it first,
// and goes when the GPU has passed that; a request that would need new memory puts it back.
//
// # Captures
//
// Whether a stream captures is known without the driver if only this library can reach
// the stream (core.Stream.MayCapture); for others the pool asks the driver. Inside a
// capture an arena (arena.go) serves, with shards of its own: the same rules, but nothing
// takes from them, nothing in them moves or is trimmed, and its streams share only what
// was free when the capture began, because the graph orders nothing else. When the last
// graph is gone the shards become the pool's, like those of a closed stream. A block from
// before the capture that is freed during it lands in its stream's ordinary shard, which
// serves no request while the stream captures and whose epoch cannot pass: that is what
// postpones the free.
//
// # Sleep
//
// A pool that is suspended (suspend.go) keeps all lists: blocks, free extents, slabs, arenas. Its
// shards are marked as closed, so that the way of a warm request is as before, and the miss
// says why. Frees edit lists in every state. What maps and unmaps runs under misses or pressing
// and asks for the state there. A Suspension lets both come free once and then holds neither,
// while bytes move for seconds: a request that waited for misses would not be refused at once.
// What the Suspension does to lists it does under pressing, like upkeep.
//
// Free chunks are not trimmed before they go: that would take the driver's calls twice, and change
// a pool whose suspension fails. They go like the others, without their bytes, and leave the
// lists before the pool is resumed, when that calls no driver. No epoch is asked then, since
// nothing can have used the memory.
//
// # Budgets
//
// A pool within a cuda.Budget charges its chunks there (phys.TryCreate), after its own limit
// has admitted them. What the budget refuses is a shortage like others (escalation.find): the
// pool trims itself, and then lets go of misses and has the budget make room, which asks other
// pools first (underPressure). While it does, it ignores that call for its own
// request, or it would give back the chunks that the request has gathered.
//
// # A cache in front
//
// libcuvmm keeps freed blocks in C, in front of a pool (front.go): to the pool they are live.
// The pool has the cache stand aside and give them back (Pool.aside) before that would show:
// before it makes a slab, trims, refuses or reads its blocks, and while it keeps a history. The
// cache counts for both. cmd/libcuvmm/notes.go has the rest.
//
// # Failure
//
// Growing rolls back. New chunks that could not be mapped are idle, and serve the next
// growth or trim; chunks that were to move are where they were. If the driver does not
// even undo, or does not unmap, the place is lost (lost.go): the System's list of leftovers
// has it and tries again. Until then it is out of use, and its memory counts as the pool's.
//
// Pool.Check compares lists, trees, counters and the driver's mappings. With the build
// tag invariants every operation ends with it.
//
// # Locks
//
// In the order in which they are taken, which internal/lock checks but for region.turn:
//
//	misses         shared by misses, which go on side by side; exclusive for one that
//	               finds no memory, and for Trim, Grant, Close and Check. Let go while a
//	               miss waits
//	addresses      over the reservation of address space
//	pressing       shared, by TryRLock, by callers outside of the pool that lack memory,
//	               by upkeep and by leftovers; exclusive for Grant, Close and Check. Only
//	               those wait for it, because a pool that lacks memory holds its own misses
//	               meanwhile
//	Capture.calls  shared by the calls that make and free nodes, exclusive for End
//	region.turn    over the calls that map and unmap in a region
//	shard.clock    its own lock, held over the calls that record and query its event
//	mu             regions, spans, lists of shards
//	shard.mu       a shard's blocks; two are never held at once
//	holding        edits of the pool's size, which the list of live objects has, too
//	offersMu, upkeep.mu, Capture.mu   leaves
//
// Only the locks listed before mu are held over driver calls.
//
// # Traces
//
// The generators (internal/tracegen) do not change, which testdata/golden.txt holds: the
// pool is measured by them, and must not be fitted to them, nor they to it. A pool's
// history is a ring of its latest allocations and frees, under a lock that is a leaf below
// the shards', so that their order across streams is kept. History.Trace makes a trace of
// it from the blocks whose allocation it recorded. A snapshot walks the pool under the
// pool's lock and each shard's in turn, and says of every mapped byte whether it is a
// block, a waiting block, or a hole.
