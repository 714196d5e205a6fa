// Package handles shares GPU memory with other processes.
//
// A [Descriptor] describes the memory that a process offers: its chunks, its location, its
// contents. Memory is sent once over a connection of package handles/peer, or leased as a
// text. Package handles/publish shares memory that grows.
//
// # Sharing memory once
//
// [SendBuffer] and [SendArray] share memory as it is at the call, and
// [ReceiveBuffer] and [ReceiveArray] receive it at the other end
// of the connection. The two sides agree on the outcome: if one cannot take the memory
// the other receives the reason, and the connection goes on. Transfers run beside
// the program's own messages, and in both directions at once.
//
// Received memory is an ordinary [vmm.Buffer]: one contiguous range, on any
// device that reaches the memory, optionally read-only. It lives until the last
// process has closed it or has ended. Written bytes signal nothing: order the work of
// the two sides yourself, by messages for example.
//
// The file descriptors of memory are sent in batches. A sender closes each when it is
// sent, and a receiver when it has mapped the memory (see "Open files" for their number).
// Memory that was
// shared and is released is not free until every process has released it:
// cuda.Stats counts it apart (SharedReleased).
//
// # Fabric handles
//
// Memory that was created with a fabric handle (vmm.Fabric, or vmm.PreferFabric)
// travels by that to another host of its NVLink fabric; package fabric describes the requirements.
// Over a connection, whose ends are on one host, it does so only if it has no descriptor.
//
// Without a connection a [Lease] offers memory as a text ([Offer]), for a file, an
// argument or a store, and [ImportBuffer] and [ImportArray] import
// it. A fabric handle does not keep memory alive, so the lease does, until the first of
// these: its receivers have confirmed their imports ([Receipt], [Lease.Imported]), it is
// closed, or its deadline has passed. If the owner has released the memory too, a later
// import finds it gone.
//
// # Trust
//
// Everything that a peer sends is checked before use, and the error names the limit that
// it breaks. A file descriptor of memory is full access, to read and to
// write, for as long as any process holds it, and cannot be revoked.
//
// # Contexts
//
// Contexts must not be nil.
//
// # Open files
//
// A sender has descriptors of memory open until they are sent, within a quarter of its
// limit of open files; descriptors that are sent and not read yet are at most half of
// that limit. Above a limit the error is [peer.ErrOpenFiles]. One extra descriptor for each
// device that memory was sent from stays open while the process has connections
// or publications, which makes the driver's next export twenty times as
// fast. It keeps no memory alive, because it is closed before its memory is released.
//
// # Other systems
//
// Memory is shared by file descriptor on Linux; elsewhere that returns
// [cuda.ErrNotSupported]. A [Descriptor], which is only data, can be encoded and decoded
// on every system.
package handles
