package fabric

// # How the library decides about fabric handles
//
// Notes for readers of the source; the package document is for users.
//
// Whether memory can be shared over a fabric is decided outside of the process: by
// device files, a kernel module's parameters, and services. internal/imex reads the
// files and opens none, because a process that opens a channel joins it.
// internal/nvml has the types, and csrc opens NVML at the first call. A driver
// reports by two small interfaces (imex.Source, nvml.Source) that it has a machine of
// its own. The software driver does, so a program on it gets the facts of that machine
// and not of the computer that it runs on.
//
// internal/diagnose turns the facts into findings, each with a remedy. It lies below
// package cuda, so that a creation that fails for lack of a channel carries findings
// in its error, in vmm and in Device.Probe, which know nothing of fabrics. Diagnose
// shows them, and Findings takes them out of an error. Attributes prove nothing here:
// the driver reports fabric handles even if no channel is open. The proof is to
// create, export and import one granule (internal/phys/probe: ProbeHandleType), on
// demand. NVML's results are valid for ten seconds if they only explain an error
// (core.System.Cached); the files are read each time.
//
// # Handle types at creation
//
// The default is a file descriptor, which needs no permission and costs nothing.
// vmm.PreferFabric requests both types. cuda.Device.Probe tries once per device and
// keeps a clear result; only the driver's codes 800 and 801 mean that descriptors
// alone work, and they are compared as codes, because other results are the same kind
// of error. The decision is kept with the other defaults and logged once.
//
// # A fabric handle pins nothing
//
// The exporter keeps the memory until the importer has it. In a transfer the sender's
// view does that, and ends with the receiver's reply. Without a connection a
// handles.Lease holds counts of the chunks, not the buffer, until receipts, Close or
// its deadline, whichever is first; so a forgotten lease keeps no memory. An importer
// holds the memory itself, and the end of a lease takes nothing from it.
//
// # Choosing per receiver
//
// A descriptor of memory names the handle types that it has. A sender begins by fabric
// if it can, with one message, and the receiver's import is the test: a handshake could
// only tell that the receiver has a channel, not that it has the exporter's. If the
// driver returns 800 or 801 for the first chunk, and the offer has descriptors too,
// the receiver says so and the sender starts over. Both count the downgrade, log it,
// and remember it for the connection. Any other result is an error on both sides.
// Publications use descriptors alone: each follower shares a page of memory with the
// publisher for the order of work, so it is on the same host.
//
// # Memory of another host
//
// lies on a device that the importer does not see. Only the driver can tell whether it
// is reachable: the device is not looked up, and the location that the driver reports
// is not compared. From then on the memory counts as the importing device's, with its
// limits and granularity.
