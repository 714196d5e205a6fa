// Package broker keeps GPU memory for processes that come and go: a process that was restarted, or
// another one, attaches what an earlier one loaded, with every byte in place.
//
// A [Broker] makes memory and hands it out. A process writes an object once ([Client.Create],
// [Writer.Commit]) and others attach it by name ([Client.Attach]); it outlives all of them. Nothing
// that is not committed is ever attached: an object whose writer dies before that is never seen.
// [Client.Ensure] does both: the first process loads an object, and the others wait for it.
//
// A broker makes memory and exports it without a context, so it takes no memory of a GPU for itself.
// It may be killed: clients keep what they have mapped, and their [Client] connects to the next one
// by itself. What survives it is with its keeper (package keeper), which holds the file descriptors
// of all memory and starts the next broker, in less than a second.
//
// # Versions
//
// A name can be written again while its readers go on with what they have. The newest version is
// attached; an older one stays as long as a client holds it. An ephemeral object goes with its last
// holder, too.
//
// # Publications
//
// What one process rewrites under others is a publication (package publish). [Client.Keep] has a broker keep its
// memory: when the publisher has ended, the next one gets the memory with the last complete generation, and
// followers come back to it with what they have mapped.
//
// # Trust
//
// A file descriptor of GPU memory is full access to it. Whoever attaches an object is trusted not to
// write to it: its library maps it for reading only, which guards against mistakes alone. A holder
// that says that it released memory is believed, since one that lies has no more memory than it
// could take from the driver itself.
//
// [Options.Authorize] decides what each client may do with each name, and how much memory the objects of its
// user may have; a [Policy] is one that an administrator writes. Memory counts until the object has ended and
// no process holds it any more, so that what a killed writer's kernels may still write to is not given to
// anyone. Clients of other users need a socket that they can reach: peer.Options.Shared.
//
// # Contexts
//
// Contexts must not be nil.
package broker
