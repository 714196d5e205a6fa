package bulk

// # How much memory moves
//
// A copy between pinned host memory and a device reaches the rate of the link if two streams
// take turns with pieces of some MiB. All else here is about the host's side: where pinned
// memory comes from, and how bytes get into it and out of it at that rate.
//
// # Slabs
//
// Pinned memory is slabs of 16 MiB (slab, store.go): anonymous memory in huge pages, which
// threads populate and pin several times faster than the driver allocates any, near the
// device's NUMA node. Each is pinned by a driver call of its own, for all devices, so that
// threads pin in parallel and a slab's copy begins while the next are being pinned. The last
// one of a backing is smaller, and so are those of a stream of bytes: classes are powers of
// two from one huge page up.
//
// A slab that was used stays pinned and goes to the System's store, whatever it was used for.
// Pinning takes several times as long as the copy, and unpinning waits for the work of the
// whole context and stalls the launches of all threads meanwhile. The store retains idle slabs
// up to a limit (Engine.Retain); Trim, which System.TrimHost calls, and Close free them. A slab
// that the driver does not unpin stays idle and is tried again.
//
// Memory is counted before it is taken. A slab that is mapped and has no pages is promised
// (store.go: promised): the operating system does not count it yet, so the store adds all
// promises of the process to what the limits say is used. Before a request is refused the
// store frees what is idle.
//
// # Copies
//
// An operation leases a lane, two streams of its own: no one else submits to them or can
// capture them, and an operation that stands still, because a stream that it comes after does,
// holds up no other. A flight (flight.go) is what one goroutine has submitted. It has one event
// behind each piece, or behind several small copies, and polls the oldest, with pauses that are
// short beside the time that the rest in flight takes. A wait within the driver could be
// ended by nothing.
//
// Segments that follow each other in device memory are joined (segments.go). Segments that do
// not are submitted by one driver call a group, cuMemcpyBatchAsync, where the driver has it (and knows the
// addresses, which may be a caller's: scatter.go: reach), and else by one each, of a microsecond or two. Below 64 KiB neither reaches the link on the way to
// the device (docs/measurements/bulk.md). If what lies between them is mapped and holds nothing, as the holes
// of a pool do, Join takes them together: to copy a gap of up to WorthJoining costs less than
// another copy. Many small segments that Fill writes anywhere are one copy a piece, to a staging area
// with a table behind, from where a kernel distributes them (scatter.go).
//
// Options.Await and Passed let a caller map memory ahead of the copies and unmap it behind them,
// on another goroutine. What has passed is told in order, and as late as copies are in flight.
//
// Runs of several backings are one operation, as what several members of a suspension keep: the link would
// idle while the last copies of each are waited for. Out submits from one goroutine; with slabs that are not pinned yet, from those that
// pin them, each behind its slab (pinning.go). Fill and Drain have
// workers with two pieces each, one being copied while the other is read or written (ring.go).
// They pin their own pieces when they begin, with first pieces of different lengths, so that some
// are read while others are copied.
//
// # Endings
//
// After an error or the end of the context an operation submits nothing more, waits for its
// copies for at most the time grace, and returns. If they have not passed by then, its streams
// are unsettled (core.Stream.Unsettle), so that every fence covers them and the next operation
// comes behind them, and the reclaimer
// gives lane and slabs back once they have passed: pinned memory is never free, idle or
// unmapped while a copy may use it. After a loss no wait tells that, so the slabs of operations
// that were under way are kept until the System closes.
//
// Out reads device memory only, so pinning that fails halfway leaves everything as it was. A
// caller that can afford no failure once it has begun reserves ahead.
