package handles

// # How memory reaches another process
//
// Notes for readers of the source; the package document is for users, and
// docs/protocol.md specifies the messages. internal/test/vectors/testdata/protocol.json has an
// example of each, to check another implementation against.
//
// # Connections
//
// Sockets are bound and dialled through a directory that was opened and checked, so
// swapping the path afterwards changes nothing. In the handshake each side sends a
// nonce and the versions that it speaks; every later packet carries the receiver's
// nonce and a strict sequence number. On an ordered socket with a known user these
// protect against an end that several processes hold by mistake: a second speaker or
// reader is noticed at once. Surplus and truncated descriptors are closed. Closing a
// connection or a listener ends the calls that wait on it with ErrClosed. Every wait
// has a context and a limit. Errors are *peer.Error, because they are the
// protocol's and not the driver's.
//
// Any goroutine that reads from the connection sorts what it reads for all: the program's
// messages, the peer's transfer, and the replies to this side's. A bounded number of
// messages waits for the program; beyond it nothing is read until the program takes one.
//
// # Memory that leaves the process
//
// internal/phys exports and imports. A handle is marked as exported before the driver
// is called, because a call that fails may have left a descriptor: no cache may give
// such memory to another owner, and it is counted apart when it is released. In
// reverse, memory that a cache gave to another owner (Recycle) is not exported until
// it was set to zero (Clean). At its first export that would be too late: its owner's
// own bytes are in it. Today only blocks of the pool change owners. The pool marks its
// chunks when it makes them, no public call leads from a block to its chunk, and none
// is ever cleaned, so memory that changes owners is never exported. A future export of
// blocks has to clean the chunk first, or is refused.
//
// internal/share is how this package reaches into a vmm.Buffer: views of its chunks,
// each with a count; holds; and buffers of imported memory. A chunk's generation is
// the ID of its handle, which no other handle of the process ever has. A publication
// has a hold: what it covers is not closed and not clipped elsewhere, and the
// publication's Shrink removes chunks for good, so that growth makes new ones, while
// growth after an ordinary ClipAfter takes chunks back.
//
// A buffer of imported memory makes no memory: it grows within what there is, and a
// follower attaches new chunks. Buffers of one import share a reservation, its
// mappings, and the inner imported state, which counts them. While there are several,
// none changes the memory, and after a change no further one joins.
//
// # Sending memory once
//
// Transfers and publications share exports, imports and the budget (internal/exchange), but not
// their messages: a transfer is one call on each side, which must know the outcome, on a
// connection with the program's messages, and a publication has no outcome, but views that
// followers may skip. One protocol for both would keep all states of both, and take no lines away.
//
// A transfer (the diagram is in transfers.go) has an offer, chunks in messages of at most
// 64 descriptors of which four are in flight, and an end that both sides know: mapped,
// then confirmed; or declined, or withdrawn, with the reason. A sender that fails before its
// offer withdraws as well, so that no receiver waits for it. The sender exports while
// the receiver wakes and checks. The receiver imports as chunks come, maps them in one
// run, and grants access in one call. Closing a chunk's last descriptor takes the
// kernel half as long as importing it, so the receiver closes it after the sender
// knows that the memory is mapped, and many of them on a goroutine of their own.
//
// The driver sets its exports up with the first descriptor of memory that is open on
// the machine, and tears that down with the last, which takes twenty times as long as
// a descriptor in between. So while there is a connection or a publication, one
// descriptor stays open for each device that memory was sent from: a duplicate of one
// that was made anyway. It belongs to its memory's phys.Handle, which closes it before
// the memory is released.
//
// Waking a process costs more than importing and mapping a chunk. So a receiver spins
// briefly for what an active peer owes, if there are processors for it, and less and
// less often if that was in vain.
//
// # Trust
//
// An importer trusts nothing. It checks sizes against granularity, limits and
// overflow; the device by its UUID; what the driver reports of each handle against what
// was declared; and the size by mapping, because the driver reports it only there.
// Memory that the same connection brings again is found by the peer's name for it,
// together with its layout, device and options, so that one peer's claim never matches
// another's.
//
// Closing a file that a peer chose can take as long as the peer likes (a socket that
// lingers, a file system in user space), and so can closing a socket in whose queue
// such files lie. Both happen on goroutines of internal/fd, which nothing waits for
// longer than a second, and never under a lock. A file stops being foreign when the
// driver, or the check of a page, has taken it.
