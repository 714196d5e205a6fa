// Package handles shares GPU memory with other processes.
//
// An [FD] owns a file descriptor. A [Descriptor] says what memory a peer
// offers: its chunks, where it lies, what it holds. A [Conn] carries messages
// with descriptors of files between two processes: over a socket in a private
// directory ([Listen], [Dial]), or to a child ([Pair], [Inherit]).
//
// # Sharing memory once
//
// [SendBuffer], [SendArray] and [SendAllocation] share memory as it is, and
// [ReceiveBuffer], [ReceiveArray] and [ReceiveAllocation] take it, each on one end
// of a connection. The two sides agree on the outcome: what one could not take
// the other is told, with the reason, and the connection goes on. They go beside
// the program's own messages, and in both directions at once.
//
// What was received is an ordinary [vmm.Buffer]: in one contiguous range, on any
// device that reaches the memory, read-only if asked. It lives until the last
// process has closed it, and a process that is killed has. Bytes are no signal:
// order the work of the two sides by messages or otherwise.
//
// Descriptors of memory are open only while they are on their way, in batches, and
// in a receiver until shortly after it has mapped the memory. They take at most a
// quarter of the process's limit of open files ([ErrOpenFiles]). Memory that was
// shared and is released is not to be taken for free: cuda.Stats counts it apart
// (SharedReleased).
//
// # Fabric handles
//
// Memory that was created with a fabric handle (vmm.Fabric, or vmm.PreferFabric)
// goes by that, also to another host of its NVLink fabric; see the package fabric
// for what this needs. Over a connection the receiver's driver decides: where it
// does not take the handle the memory goes by descriptor, if it has that too, and
// both ends tell of it ([Conn.Transfers], Options.Log).
//
// Without a connection a [Lease] offers memory as a text ([Offer]), for a file, an
// argument or a store, and [ImportBuffer] and its kin take it. A fabric handle
// holds nothing, so the lease holds the memory until its receivers have said that
// they imported ([Receipt], [Lease.Imported]), until it is closed, or until its
// deadline: whoever imports later finds the memory gone. Publications go by
// descriptor alone.
//
// # Publishing
//
// A [Server] publishes buffers and arrays under names, to the processes that
// connect. A [Client] lists them, opens them as they are once ([Open]), or
// follows them ([Follow]): what the publisher announces ([Publication.Announce])
// grows a mapping in each follower, at an address of its own that never changes,
// and what it takes back ([Publication.Shrink]) is unmapped there when its work is
// done. Sizes and data keep their order: a [Follower]'s stream sees the elements
// of a generation when the publisher's work before its announcement is done, and
// never before.
//
// A follower that is slow, or stands still, or dies, costs the publisher and the
// other followers nothing but the memory that it keeps, which is reported by
// follower. When a publisher dies its followers keep what they have mapped, are
// told, and no stream of theirs hangs.
//
// Goroutines that append at the same time announce what each of them appended
// ([Publication.AnnounceRange]), without a lock of their own.
//
// # Trust
//
// A peer is trusted with nothing but what the policy of the connection gives
// it: whatever it sends is checked before it is used, a wait has a limit, and
// what does not fit is an error that names the limit. A file descriptor of
// memory is full access, to read and to write, for as long as any process holds
// it, and cannot be taken back.
//
// [ServerOptions.Authorize] decides for each client which publications it sees,
// and which it may write. A client that sees none of a publication gets no
// descriptor of it. A client that may only read is one whose library maps the
// memory for reading: a process that is not trusted can map it for writing, so
// what such a process must not write is published as a copy. What a client can
// take of the server's files, places and time is bounded for each process.
//
// A live publisher that never finishes the work behind an announcement holds up
// the streams that follow it, unless [FollowOptions.MaxWait] bounds that.
//
// # Protocol
//
// docs/protocol.md specifies what travels, with test vectors, so that other
// languages can speak it. Connections negotiate a version.
//
// # Open files
//
// Descriptors of memory are open in the process that sends it until they are sent,
// within a quarter of its limit of open files; those that were sent and not read
// yet are at most half of that limit. Besides, one for each
// device that memory was sent from stays open while the process has connections
// or publications, since that makes the driver's next export twenty times as
// quick. It is closed before its memory is given back, and so keeps none.
//
// # Other systems
//
// File descriptors and connections need Linux; elsewhere they answer
// [cuda.ErrNotSupported]. Descriptors work everywhere.
package handles
