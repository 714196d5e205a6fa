// Package multicast provides one address for the memory of several devices. A store to it
// writes the memory of all of them, and a load can reduce their values on its way, in the
// switches between the devices (NVLink SHARP).
//
// # Objects
//
// An [Object] is a multicast object of the driver. It has a size, a number of devices that
// take part, and no memory of its own. Each device is added (AddDevice) and binds memory of
// its own (Bind, BindMapping), its replica. Mapped like memory (vmm.Reservation.Map), the
// object is an address at which kernels access all replicas at once.
//
// Only the multimem instructions of PTX may access that address; csrc/kernels has kernels
// that use them. Plain loads and stores, copies and memsets there are undefined. The same
// memory at its own address is ordinary memory. A kernel that uses both addresses needs
// fence.proxy.alias between them; between kernels the order of streams suffices.
//
// Binding and mapping block in the driver until all devices were added, including those of
// other processes, and cannot be canceled. If the object is not shared, this package
// detects that they would block without end, and refuses. Otherwise the program, or better
// a [Team], ensures the order. While such a call blocks, the mapping that memory is bound
// by and the reservation that the object is mapped into cannot be closed, so map the object
// into a reservation of its own. The object and the memory can be closed.
//
// # Teams
//
// [NewTeam] performs all of this for the ranks of a group (fabric/rendezvous) in an order
// in which no rank blocks: none binds before all have added their devices. A rank has one
// or more devices; ranks are goroutines, processes, or hosts of one NVLink fabric. Either
// every rank gets its side of the team, or every rank gets an error that names the ranks
// that caused it, and all resources are released. All ranks can decide alike how to go on
// without multicast, since the errors of all match the same sentinels.
//
// A driver call that does not return in time cannot be canceled. It makes the team stuck
// ([ErrStuck]): its memory is kept, and Close returns that error at once until the call
// has returned.
//
// # Closing
//
// Memory must stay bound while any rank's kernels use the object. Close waits only for the
// work on this rank's devices, so the ranks first tell each other that their work is done:
// [Team.Leave] does that, and releases nothing while a rank has work in flight.
//
// # Ranks that die
//
// A kernel that waits for the other ranks never ends if one of them has died, and neither
// does a wait for its stream. So kernels that wait poll a word of host memory
// ([Team.AbortWord]), as those of csrc/kernels do. Leave and Close set it for work that
// exceeds their limit, and [Team.Abort] sets it at once: the waits end, streams and team
// can be closed, and [ErrAborted] reports that the kernels' results are incomplete. Call
// one of them before any operation that waits for such a stream without a limit
// (Synchronize, Download, the stream's Close). A kernel that waits without polling makes
// the team stuck until the process ends.
//
// The replicas of a process are freed when it dies. From then on no kernel may access the
// team's address; the software driver reports an access, which loses the context. Kernels
// that only wait do not access it, and kernels that start after the word is set do not
// wait. The remaining ranks can form a new team.
//
// # Real drivers
//
// On a real driver a faulty object can disturb all work on the machine, so creating one is
// opt-in when the driver is opened (cuda.Options.RealMulticast); otherwise Create returns
// cuda.ErrNotPermitted. [Supported] and [Granularity] create nothing.
//
// All methods are safe for use by any goroutine.
package multicast
