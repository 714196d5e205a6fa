// Package multicast makes one address of the memory of several devices. A store
// there reaches all of them, and a load can add them up on its way, in the
// switches between the devices (NVLink SHARP).
//
// # Objects
//
// An [Object] is a multicast object of the driver: it has a size, a number of
// devices that take part, its team, and no memory of its own. Each device is
// added (AddDevice), and each binds memory of its own (Bind, BindMapping), its
// replica. Mapped like memory (vmm.Reservation.Map), the object is an address
// at which kernels reach all replicas at once.
//
// Only the multimem instructions of PTX may touch that address; csrc/kernels has
// kernels of them. Plain loads and stores, copies and memsets there are
// undefined. The same memory at its own address is ordinary. Where one kernel
// uses both addresses, fence.proxy.alias must stand between; between kernels the
// order of streams is enough.
//
// Binding and mapping block in the driver until all devices were added, those of
// other processes too, and nothing cancels that. Where the object is not shared
// this package knows when it would be for ever, and refuses. For the others it
// is the program's duty, or better a [Team]'s. While such a call blocks, what it
// works on cannot be closed: the mapping that memory is bound by, and the
// reservation that the object is mapped into, which is best one of its own. The
// object and the memory can.
//
// # Teams
//
// [NewTeam] leads the ranks of a group (fabric/rendezvous) through all of this in
// an order in which no rank blocks: no rank binds before all have added their
// devices. A rank has one device or several; ranks are goroutines, processes, or
// hosts of one NVLink fabric. Either every rank gets its side of the team, or
// every rank gets an error, which names the ranks that are the reason, and what
// was made is given back. So every rank can decide alike what to do without
// multicast: the errors of all match the same sentinels.
//
// A call that the driver does not come back from in time cannot be ended. It
// makes the team stuck ([ErrStuck]): its memory is left as it is, and Close says
// so at once, until the call has come back.
//
// # Closing
//
// Memory must stay bound while anybody's kernels use the object. Close waits for
// the work on this rank's devices alone, so the ranks first tell each other that
// theirs is done: [Team.Leave] does that, and gives nothing back while a rank is
// still at work.
//
// # Ranks that end
//
// A kernel that waits for the other ranks waits for ever when one of them has
// ended, and so does all that waits for its stream. So kernels that wait poll a
// word of host memory ([Team.AbortWord]), as those of csrc/kernels do. Leave and
// Close set it for work that outlasts their limit, and [Team.Abort] at once: the
// waits end, streams and team can be closed, and [ErrAborted] says that what the
// kernels made is not whole. One of them comes before whatever waits for such a
// stream without a limit (Synchronize, Download, the stream's Close). A kernel
// that waits and does not poll makes the team stuck; it ends with the process.
//
// The replicas of a process go with it. No rank may touch the team's address from
// then on; the software driver reports it, at the price of the context. Kernels
// that only wait do not touch it, and those that have yet to begin, when the word
// is set, do not begin to wait. The ranks that are left can form a new team.
//
// # Real drivers
//
// On a real driver an object that goes wrong can disturb everybody's work on the
// machine, so creating one must be asked for when the driver is opened
// (cuda.Options.RealMulticast); otherwise it is cuda.ErrNotPermitted. [Supported]
// and [Granularity] create nothing.
//
// All methods are safe for use by any goroutine.
package multicast
