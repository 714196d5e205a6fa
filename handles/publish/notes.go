package publish

// # How a publication reaches its followers
//
// Notes for readers of the source; docs/life-announce.md follows one announcement
// through it, and docs/protocol.md specifies the messages.
//
// Three state machines have neither sockets nor memory: the publisher's progress of
// one follower, the follower's replica of its publication, and the codec between them.
// Their transitions are written over the types, and a model runs the first two against
// each other. A publication is one view: a generation, a length, chunks by identity. A
// follower is told the difference between what it has and the view, in one update at a
// time, the next when that is acknowledged. So a slow follower skips what was between
// and holds up no one, memory is given back before other memory takes its place, and a
// chunk that is made later at the same offset has another identity. An update brings
// at most 64 chunks, and no more than may be open at once, so few descriptors are in
// flight.
//
// # Goroutines
//
// A server has a goroutine for each client, which takes requests and waits for no
// publication, and one for each follower, which joins, sends and leaves. Announce
// exports new memory if the budget of descriptors has room, has the fence words
// written, and hands each idle follower's goroutine its update with the exports open.
// Followers that are sent the same memory at the same time share those exports, which
// are closed after the last. A goroutine keeps them open only while they are sent: for
// a follower that does not read it closes them, waits until the follower reads, and
// opens them again. So the budget is never held for long, no follower is dropped for
// want of it, and whatever waits for it holds none of it.
//
// Announcing memory wakes one process after the other. So up to four idle followers are
// warned before the export, and spin for a moment. Within a process the goroutine that
// hands something over yields to the one that receives it, which then runs on the same
// processor instead of waiting for another to wake: Announce to the followers'
// goroutines when all is done, a client's reader to the follower, and the follower to
// the caller of Next before it acknowledges. A client has one goroutine that reads. A
// follower has one that maps and unmaps, because that may wait for the GPU, and one
// that waits for the connection's end, because that must not wait for the first.
//
// # Order of work
//
// Each follower has a fence word in a page: a memory file of one page, sealed against
// resizing, made by the publisher and checked by the follower. The word reads the last
// generation whose work is done. Neither side puts an operation on a word on a stream
// of the user's. A publication has a stream of its own, which waits for the event of
// the announced stream and then writes the words of all followers; so words never go
// backwards, whatever streams announce, and a late follower's word is written in its
// turn. A follower has a stream of its own, which waits for the word, and the user's
// streams wait for its event. So no capture can take up any of this, because capturing
// streams are refused before anything is done, and only the library's streams touch a
// page. If the word is already there no driver call is made. For devices whose streams
// write no 64-bit words the CPU waits and writes.
//
// When the connection ends, the follower's side swaps the word for a value above all
// generations, which satisfies all waits. The value before is the last generation that
// the publisher finished, and later ones are no longer shown. It goes on writing the
// final value until its stream is idle, because a last write of the publisher may still
// land. The outcome is settled under the follower's lock before any stream is let go,
// so a caller that asks Err after waiting for its work gets the outcome for that work.
//
// # Coming back and taking over
//
// A client made by Dial with ComeBack has one connection after the other (line). The
// goroutine that maps a follower's memory deals with the end of a connection, follows
// again on the next one, and swaps the word, which no stream waits for by then:
// generations up to the last that was complete count as reached from then on (floor).
// The follower tells the server what it has, so both sides of the state machine begin
// with the same chunks. A publication makes its generation later than that of any
// follower that comes back. TakeOver waits for the publisher's process through its pidfd,
// binds the socket under its directory's lock, and only then ends the follower: a
// process that was slower still follows. What is published on is the last view that
// arrived and whose generation is complete (came), whether or not Next has shown it.
//
// # Pages
//
// A page belongs to one client's connection, because a process that had it can write it
// for ever, and its writes must not be read for another client. Each follower of the
// connection has a word that no other follower had, because one that left may still
// write its own to release its streams. The driver waits for its context's work while
// it unregisters memory, and stalls launches meanwhile; so pages that are out of use
// are collected, and unregistered 64 at a time on a goroutine of their own.
//
// # Access and quotas
//
// ServerOptions.Authorize decides when a client lists and when it follows. A hidden
// publication looks like one that does not exist. Read access is a promise of the
// client's library, because the driver has no descriptor that can only be read.
//
// Everything that a client can take is bounded, for each process (user and pid) and in
// all: connections and pages by a quarter of the limit of open files each, descriptors
// in flight by half of it (the kernel counts them for the sender's user and refuses
// that user beyond the limit), the rate of following by a token bucket. The last
// quarter of places, and of descriptors in flight, is for processes that have none.
// A descriptor is in flight until the update is acknowledged, or the socket reports
// that everything was read. A client that reads nothing for Options.Timeout is cut off
// only if another client waits for what it holds.
//
// # Closing
//
// Withdraw ends a publication and waits neither for followers nor for the GPU;
// followers keep what they have mapped. Follower.Close waits for all work, and
// CloseAfter for the named streams, on the reclaimer. Server.Close withdraws
// everything, waits until the words are written and the followers are told, and ends
// the connections. Client.Close leaves followers what they have: close each follower,
// which closes its array. Any order works.
//
// # Locks
//
// Publication.changes (driver calls and the buffer's locks are taken under it), then
// Publication.mu, then the open exports; the lists of sessions and servers are leaves.
// Before all of them comes a change of the buffer, which a Shrink begins: it shows what
// is left under changes, releases that lock, and then waits for the GPU, so that only
// the buffer's other changes wait with it. A follower's lengths slot belongs to the
// goroutine that makes the buffer's length the shown one; follower.mu is a leaf.
