// Package publish provides named GPU memory that other processes follow as it grows
// and shrinks.
//
// A [Server] publishes buffers and arrays under names ([Server.Publish], [Array]) to
// the processes that connect. A [Client] lists them, opens them once as they are
// ([Open]), or follows them ([Follow]): memory that the publisher announces
// ([Publication.Announce]) is mapped in each follower, behind an address of its own
// that never changes, and memory that it takes back ([Publication.Shrink]) is unmapped
// there when its work is done. Each announcement is a
// generation. Work on a [Follower]'s stream sees the elements of a generation only after
// the publisher's work before that announcement is done.
//
// A slow or crashed follower affects neither the publisher nor the other followers,
// except for the memory that it keeps, which [Publication.Stats] reports by follower.
// When a publisher dies its followers keep their mappings and are notified, and their
// streams do not hang. A client made by [Dial] can come back: its followers continue, at
// their addresses, with the next process that publishes under their names
// ([DialOptions.ComeBack]). That may be one of the followers: [TakeOver].
//
// Goroutines that append concurrently announce what each of them appended
// ([Publication.AnnounceRange]), without a lock of their own.
//
// # Rewriting
//
// Elements that were announced stay as they are: followers may read them at any time.
// [Publication.Rewrite] opens them for changes, once no follower reads them, and the next
// Announce shows the new ones:
//
//	for {
//		check(weights.Rewrite(ctx, publish.RewriteOptions{}))
//		check(update(array, writer)) // any work, on any streams
//		check(weights.Announce(ctx, array.Len(), writer))
//	}
//
// A follower reads on the streams that it gave to Next, and each stream's next Next says that
// it has read what was there. One that reads less often than it is asked releases earlier:
//
//	for {
//		check(follower.Next(ctx, reader))
//		check(use(follower.Array(), reader)) // on reader alone
//		check(follower.Release(reader))
//	}
//
// Every other stream that reads is ordered ([Follower.Order]), and then released. A follower that
// reads on the host calls Next and Release without streams; that hold is the follower's, so one
// goroutine at a time reads in this way, and calls Next. What reads without either is not
// waited for, and neither is what a follower reads when it closes: wait for its work first.
//
// A publisher may exclude followers that are late ([RewriteOptions.ExcludeAfter]), may die, and
// may withdraw. So a result counts if [Follower.Intact] says so when the work that read is done, and
// before the follower releases or closes:
//
//	check(follower.Next(ctx, reader))
//	generation := follower.Generation()
//	check(use(follower.Array(), reader))
//	check(reader.Synchronize())
//	valid := follower.Intact(generation)
//	check(follower.Release(reader))
//
// Followers may skip generations: the last counts.
//
// Between Rewrite and Announce followers have nothing to begin to read. A publisher that has room
// for two versions announces both as the halves of one array, and rewrites them in turn
// ([RewriteOptions].Turn, [HalfOf]): then one of them can be read at any time.
//
// # Suspending
//
// vmm.Suspend of published memory has the followers unmap it first, once they have read what they
// read, and Resume shows them the new memory, at their addresses, as another generation. Between
// the two Next waits, and State is [Suspended]: the loops above need no change. docs/suspend.md
// says what happens to a follower that is late, refuses, or comes meanwhile.
//
// # Tensors
//
// A publication says what its memory holds ([PublishOptions]): a manifest of tensors, or a description
// in the program's own form. A follower has it as soon as Follow returns, and before anything is mapped: one that
// expects other tensors is refused ([FollowOptions].Expect). Then it finds them by name, in one mapping:
//
//	check(follower.Next(ctx, reader))
//	tensor, bytes, err := follower.Tensor("layer.0.w")
//
// # Trust
//
// [ServerOptions.Authorize] decides for each client which publications it sees, and
// which it may write. A client that does not see a publication gets no descriptor of
// it. Read access means that the client's library maps the memory for reading. An
// untrusted process can map it for writing, so memory that such a process must not
// write is published as a copy. The file descriptors, sessions and
// time of the server that one client process can take are bounded.
//
// A live publisher that never finishes the work behind an announcement holds up the
// streams that follow it, unless [FollowOptions.MaxWait] bounds that.
//
// # Contexts
//
// Contexts must not be nil.
//
// # Protocol
//
// Connections are those of package handles/peer, and carry nothing else. docs/protocol.md
// specifies the messages, with test vectors. Publications go by file descriptor alone,
// within one host.
package publish
