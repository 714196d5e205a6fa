package managed

// # How managed memory is kept
//
// Notes for readers of the source; the package document is for users.
//
// A Buffer is a count of an inner memory: an allocation of the driver, or a view of
// foreign memory. Clones increase the count, and the last Close frees. A Range is a
// value (the count, an offset, a length) and a Buffer is the Range of all of it, so
// every operation is written once. An operation holds two lives: the Buffer's, which
// its Close waits for, and the memory's, which an Allocator ends for all Buffers and
// clones at once. So using a Buffer after its Allocator closed is an error, not a
// crash.
//
// # Freeing
//
// The driver frees managed memory by cuMemFree alone, which waits for all work of
// its context and stalls launches meanwhile (measured, as for pinned memory). Pinned
// memory is pooled for that reason. Managed memory is not: its pages, advice and size
// are what it is used for, and a pool would have to forget all three. So Close first
// waits for the known work, and the free finds little to wait for. After CloseAfter
// the reclaimer starts the free on its own goroutine and polls again later
// (life.ErrAgain), because a free that waits must not hold up other teardowns. Memory
// that could be neither placed nor freed is one of the System's leftovers. The buffers of an allocator keep it alive, and are collected with it alone.
//
// # Advice, locations, batches
//
// Only the driver stores advice, and reading it queries the driver. A set of accessors
// is assigned by differences, additions first, and undone step by step if one fails,
// under the memory's advice lock.
//
// A location is checked in two steps before anything is sent: what no driver takes,
// then what this driver or device cannot. The node of the calling thread becomes a
// number in the first step, because goroutines move between threads. The driver's
// calls have two forms, by location (12.2 and later) and by ordinal; driver.Driver
// has a method for each, and cuGetProcAddress is called with the version, so that an older
// driver never returns its older form for the newer form's name.
//
// A batch is one call if the driver has it and every device has concurrent access.
// Otherwise prefetches are made one by one, and discards are not supported.
// Prefetches, discards and attachments are refused on a capturing stream before the
// driver is called, because they would end the capture in any mode.
//
// The driver works on pages. What it does to a page that is partly in a discarded
// range was never measured, so it only receives whole pages; the edges of a range,
// which hold bytes of neighbors, are prefetched at most. Every discard is the
// driver's discard-and-prefetch, because its plain discard on a busy stream is
// unordered with later work and loses later writes (docs/driver-facts.md, section 5).
//
// # The CPU
//
// Host lists its function with the memory's accesses, so that no two functions work on one
// memory and no Close begins under one; it holds the memory's host lock for writing and
// discards hold it for reading, so that nothing is discarded under a function. The
// software driver cannot see accesses of the CPU, so it has one method that the real
// driver lacks (driver.HostTouched), by which Host reports what the CPU will touch.
// In the software driver all managed bytes lie in one arena that the CPU reaches
// too. What moves is the account: runs of equal pages record where each lies, has
// copies, and is advised to be, and the devices' limits count them. Residency reads that by
// driver.Locator, the other method that the real driver lacks.
//
// # Locks
//
// The memory's host lock comes before everything that waits. The advice lock is held
// over driver calls of advice. memory.mu is held over the free, which waits; the
// reclaimer only tries it. An allocator's list is a leaf.
