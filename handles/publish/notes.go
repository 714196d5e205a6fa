package publish

// # How a publication reaches its followers
//
// Notes for readers of the source; docs/life-announce.md follows one announcement
// through it, and docs/protocol.md specifies the messages.
//
// Four parts have neither sockets nor memory: the publisher's progress of one follower,
// the follower's replica of its publication, its subscription, and the codec between the
// two processes. The replica is what a follower has mapped; the subscription is what it
// shows of that, whether more may come, and what Next and Err return. The states of the
// first three are tables at their types, with model tests: progress and replica run
// against each other, and the subscription against all that a publisher may do. The words of the page,
// with holds, rewritings, exclusions and heirs, have a model test of their steps.
//
// A publication is one view: a generation, a length, chunks by identity. A follower is sent the difference between what it has and the view, one update at a
// time, the next after the acknowledgement. So a slow follower skips generations and
// delays no other, memory is given back before other memory takes its place, and a
// chunk that is made later at the same offset has another identity. An update brings
// at most 64 chunks, and no more than may be open at once, so few descriptors are in
// flight.
//
// # Goroutines
//
// A server has a goroutine for each client, which handles requests and waits for no
// publication, and one for each follower (replicator), which joins, sends and leaves.
// Announce exports new memory if the budget of descriptors has room, submits the writes
// of the fence words, and passes each idle follower's goroutine its update with the open
// exports. Followers that receive the same memory at the same time share the exports,
// which are closed after the last send. For a follower that does not read, the goroutine
// closes them, waits until the follower reads, and opens them again. So the budget is
// never held for long, no follower is dropped for lack of it, and a goroutine that waits
// for it holds none of it.
//
// Announcing memory wakes one process after the other. So up to four idle followers are
// warned before the export, and spin briefly. Within a process the goroutine that
// hands something over yields to the one that receives it, which then runs on the same
// processor instead of waiting for another to wake: Announce to the followers'
// goroutines at its end, a client's reader to the follower, and the follower to
// the caller of Next before it acknowledges. A client has one goroutine that reads. A
// follower has one that maps and unmaps, because that may wait for the GPU, and one
// that waits for the connection's end, because that must not wait for the first.
//
// # Order of work
//
// Each follower has a fence word in a page: a memory file of one page, sealed against
// resizing, made by the publisher and checked by the follower. The word reads the last
// generation whose work is done. Neither side submits an operation on a word to a stream
// of the user. A publication has a stream of its own (timeline), which waits for an event
// of the announced stream and then writes the words of all followers; so words never
// decrease, whatever streams announce, and a late follower's word is written in its
// turn. A follower has a stream of its own, which waits for the word, and the user's
// streams wait for its event. So no capture can record any of this: capturing streams
// are refused before anything is done, and only the library's streams access a
// page. If the word has the generation already, no driver call is made. For devices
// whose streams cannot write 64-bit words the CPU waits and writes.
//
// When the connection ends, or the follower closes, it swaps the word for a value above all
// generations, which satisfies all waits. The value before is the last generation that
// the publisher finished, and later ones are no longer shown. The follower keeps writing
// the final value until its stream is idle, because a last write of the publisher may
// still land. The outcome is settled under the follower's lock before any stream is
// released, so a caller that calls Err after waiting for its work gets the outcome of
// that work.
//
// # Rewriting
//
// The page says who reads, and what is rewritten: page_slot.go has the words, docs/protocol.md
// the rules. A follower begins to read with two accesses of memory: it writes that it holds, and
// looks whether the publisher wants to rewrite that. It ends by a write on a stream of its own
// (not the one that waits for the fence word, behind which it would wait for the very
// announcement that waits for it), behind events of the streams that read. Next ends its
// streams' holds just before it waits, not when something newer is there already: so a
// follower that the publisher never rewrites under makes these calls only while it has nothing
// else to do. A Next that waits would hold nothing until its goroutine runs. So the goroutine that
// maps begins the hold for it, before it acknowledges, and Rewrite waits briefly for
// acknowledgements before it writes that it wants to rewrite. Rewrite polls the words, and then the timeline, whose end is that of the work
// behind all announcements. Nobody's stream waits for a reader.
//
// What tears is told from what does not by order alone. A publisher stores what it began to
// rewrite before it returns to its caller, so even if it dies then the words say so. It
// stores that it goes on without a follower before it stops to wait for it. And a process
// that takes over begins after the end of the publisher's process, which a follower's socket
// shows at once: Intact asks the socket, not the goroutine that reads from it.
//
// A follower that closes is not waited for: it first lets the streams go that wait for the
// publisher, so what they read from then on counts for nothing, and a bounded wait would only
// hide that.
//
// # Suspending
//
// A suspension of the buffer recalls what is published of it (recall.go), before it decides
// which chunks go: by then the publication has no count of the memory, and no descriptor of it is
// open. It begins as a Rewrite does, which waits for readers, and then shows a view without
// memory. So progress and replica need nothing new, and a follower unmaps as it does for a Shrink, or
// refuses. Chunks that followers alone can have are marked as such when they are exported
// (phys.Handle.Followed); once a publication shows less, or is withdrawn, they count as
// exported for ever. Memory that came back has identities of its own, so that what a late
// follower has is never mistaken for it.
//
// # Coming back and taking over
//
// A client made by Dial with ComeBack has one connection after the other (line). The
// goroutine that maps a follower's memory handles the end of a connection, follows
// again on the next one, and replaces the word, which no stream waits for by then. What
// was complete by the old word is ordered behind nothing from then on, because the new
// one counts another publisher's generations.
// The follower tells the server what it has, so progress and replica begin with the same
// chunks. A publication makes its generation later than that of any follower that comes
// back. TakeOver waits for the publisher's process through its pidfd, binds the socket
// under its directory's lock, and only then ends the follower: a process that lost the
// race still follows, and is told which process has the socket (peer.ServedError), as is
// a publisher that returns. The publication continues with the last view that arrived
// and is complete (subscription.last), whether or not Next has shown it. Its generations are later than any
// that another follower may have received of the dead publisher, so that no word of the heir is taken
// for one about those (goesOn). One server's
// calls of TakeOver are serialized after their wait, because several publications may
// share a socket that only one call binds.
//
// A publication with a Page (kept.go) leaves behind what a follower would have of it: the page's slot is
// written as that of a follower that holds nothing, and is never waited for. The next publisher reads from it
// what subscription.heritage would say, and goes on as TakeOver does. Chunks have identities that the page's
// name gives them, since no view of them outlives the process.
//
// # Pages
//
// A page belongs to one client's connection, because a process that had it can write it
// forever, and its writes must not be read for another client. Each follower of the
// connection has a word that no other follower had, because a follower that left may
// still write its own to release its streams. The driver waits for its context's work
// while it unregisters memory, and stalls launches meanwhile; so unused pages are
// collected, and unregistered 64 at a time on a goroutine of their own.
//
// # Descriptions
//
// A description travels as a sealed file beside the page when a follower is accepted, since it may be
// larger than a message and most followers of a publication get the same. The publication keeps the one file until
// nothing is sent any more; the follower reads it, compares its digest, and closes it. It stays for
// the publication's identity, so an heir passes on what it received.
//
// # Access and quotas
//
// ServerOptions.Authorize decides when a client lists and when it follows. A hidden
// publication looks like one that does not exist. Read access is a promise of the
// client's library, because the driver has no read-only descriptors.
//
// Everything that a client can take is bounded, for each process (user and pid) and in
// all: connections and pages by a quarter of the limit of open files each, descriptors
// in flight by half of it (the kernel charges them to the sender's user, up to the
// limit), the rate of following by a token bucket. The last quarter of places, and of
// descriptors in flight, is reserved for processes that have none. A descriptor is in
// flight until the update is acknowledged, or the socket reports that everything was
// read. A client that reads nothing for Options.Timeout is cut off only if another
// client waits for the descriptors that it holds.
//
// # Closing
//
// Withdraw ends a publication and waits neither for followers nor for the GPU;
// followers keep what they have mapped. The publication is released when its timeline
// has passed and the followers' goroutines have ended. Follower.Close waits for all
// work, and CloseAfter for the named streams, on the reclaimer; both first release the
// streams that wait for the publisher, which might never finish. Server.Close withdraws
// everything, waits until the words are written and the followers are told, and ends
// the connections. Client.Close leaves followers what they have: close each follower,
// which closes its array. Any order works.
//
// # Locks
//
// The lists of what publications of this process share (overlaps) are a leaf.
// Publication.changes (driver calls and the buffer's locks are taken under it), then
// Publication.mu, then the open exports; the lists of sessions and servers are leaves.
// Before all of them comes a change of the buffer, which a Shrink begins: it shows the
// rest under changes, releases that lock, and then waits for the GPU, so that only
// the buffer's other changes wait with it. Server.takingOver comes before the locks of
// followers and publications. A follower's are nexts, words, waiting or holds, and lengths, in
// this order; its mu, which guards the subscription, is a leaf.
