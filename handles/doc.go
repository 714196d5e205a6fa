// Package handles shares GPU memory with other processes.
//
// A [Descriptor] says what memory a process offers: its chunks, where it lies, what it
// holds. Memory is sent once over a connection of package handles/peer, or leased as a
// text. Memory that grows, and that others follow, is for package handles/publish.
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
// process has closed it or has ended. Bytes are no signal: order the work of the two
// sides by messages or otherwise.
//
// Descriptors of memory are open only while they are on their way, in batches, and
// in a receiver until shortly after it has mapped the memory. They take at most a
// quarter of the process's limit of open files ([peer.ErrOpenFiles]). Memory that was
// shared and is released is not free until every process has released it:
// cuda.Stats counts it apart (SharedReleased).
//
// # Fabric handles
//
// Memory that was created with a fabric handle (vmm.Fabric, or vmm.PreferFabric)
// goes by that, also to another host of its NVLink fabric; see the package fabric
// for what this needs. Over a connection the receiver's driver decides: if it does not
// take the handle the memory goes by descriptor, if it has that too, and both ends
// record it ([TransfersOf], peer.Options.Log).
//
// Without a connection a [Lease] offers memory as a text ([Offer]), for a file, an
// argument or a store, and [ImportBuffer] and its kin take it. A fabric handle
// holds nothing, so the lease holds the memory until its receivers have said that
// they imported ([Receipt], [Lease.Imported]), until it is closed, or until its
// deadline: an import after that finds the memory gone.
//
// # Trust
//
// Whatever a peer sends is checked before it is used, and what does not fit is an error
// that names the limit. A file descriptor of memory is full access, to read and to
// write, for as long as any process holds it, and cannot be taken back.
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
// Memory is shared by file descriptor on Linux; elsewhere that returns
// [cuda.ErrNotSupported]. Descriptors work everywhere.
package handles
