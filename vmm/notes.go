package vmm

// # How buffers change
//
// Notes for readers of the source; the package document is for users. How closing
// waits for the GPU is described in internal/core/notes.go, and the order of locks
// in ARCHITECTURE.md.
//
// # Changes and copies
//
// Whatever changes a buffer holds buffer.changes (changes.go) for as long as that
// takes, including waits for the GPU: one change runs after the other. buffer.mu is
// only held for short steps. A copy holds it for reading while it is checked and
// submitted, piece by piece if it has pieces, and waits for its data with nothing
// but the object held. A change holds it for writing while it edits a list.
//
// ClipAfter must not wait. While another goroutine's change runs it leaves a
// job, and that change does the job when it ends (pending.go); the
// job's fence then also covers the streams that copies and the change itself have
// used meanwhile. The reclaimer hands in its part on a buffer in the same way, so
// it waits for no change and does not starve behind any.
//
// What each state of a buffer permits is one table (gate.go), which every change, job, hold
// and copy asks; a test walks it by every method.
//
// copies.go tracks running slice copies by stream, so that ClipAfter and a
// publication's Shrink fence streams that their caller did not name. The
// reclaimer does that fencing, because the caller would have to wait for the driver
// calls of the copy. Once memory is out of use no copy reaches it, so these streams
// are enough. A copy that waits does so for the pieces it submitted even if the rest
// is refused.
//
// # Functions that see memory
//
// Host holds no lock while the caller's function runs. vrange.Views lists the part of the
// range that each function sees, and whatever takes that part away returns ErrInUse; the
// forms with streams follow the function.
//
// # Shared and clipped chunks
//
// After Move only the successor of the old buffer changes. After Fork
// several buffers share whole chunks, all of which lie before the length of each, so
// appending never writes to one. A length that would end before a shared chunk's end
// is refused (fork.go: othersSeeLocked, which counts the mappings of the chunk's
// handle).
//
// Clipped chunks stay mapped, in the buffer's tail, until their streams have passed.
// Growing takes them back after it has waited for those streams. The tail loses
// chunks from its end, so it never has a hole.
//
// # Suspension
//
// internal/suspend takes the memory of buffers and mappings away and brings it back
// (sleeping.go makes them its members). The state of a buffer is set under mu, so that no
// copy is submitted after it; then the suspension holds changes for as long as it takes.
// Chunks stay in their list with their mappings and counts, and only the driver's mapping
// and memory are gone: so lengths, clips, lower access and Close work on the lists, and
// whoever counts the mappings of a chunk sees what it saw before. The tail is settled
// first. What was clipped while the memory was away is never mapped again.
//
// Chunks come back in their own sizes. Creating, mapping and granting takes as long for a chunk of 2
// MiB as for one of 32 (37 µs), and of these only mapping and granting go beside the copies: of 16
// GiB in chunks of 2 MiB, 8,192 creations come before the first byte. Joining runs of small chunks
// would save them, and is not done:
//   - A chunk is what Clip gives back, what Fork and Move share as a whole, and what a publication
//     announces. The program chose its size with FixedChunks, and would get less back afterwards.
//   - A Resume that fails leaves all asleep with the handles that it had. So every kind of member would
//     have two tables, of mappings, handles and budgets, until the last byte is back.
//   - What is shared, exported, owed or a page of a sparse range cannot be joined.
//
// Chunks of 32 MiB, or ones that grow with the buffer, need none of it.
//
// # Budgets
//
// A buffer's account (internal/budget) is charged by phys.Create and credited by the last
// release of a chunk, whoever does that. A successor has its predecessor's account, a fork one
// of its own. A refusal undoes the change and lets go of all locks (buffer.withRoom); then the
// System makes room, and the change begins anew. So owners that are asked may clip the very
// buffer that grows. The refusal counts what the change had made before, since the undo gives
// that back: else there would seem to be room at once.
//
// # Failure
//
// Options and sizes are checked before the first driver call. Building rolls back:
// Range.Map (internal/vrange) unmaps what it mapped, buffer.createLocked releases what it
// created, and appendLocked gives new memory back if the copy fails, after waiting
// for the part of the copy that is in flight. Memory and ranges that no user has and
// that the driver does not take back are the System's leftovers (core.Undo; a table in
// undo_test.go has the places). Tearing down goes forward, and can be retried.
//
// What neither an undo nor a teardown could unmap in a range that a user has stays in the
// range's list of stuck mappings. It counts as live, and building never uses its addresses (ErrInUse
// names them). An explicit Clip or Close tries it again, mapping by mapping, because
// part of it may be unmapped; so does the pool. If a change of access fails and its
// undo fails too, the library uses the lower access and waits for the higher, until
// a change succeeds.
