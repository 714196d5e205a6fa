package sim

// # What processes share
//
// Notes for readers of the source; the package document is for users, and
// internal/ledger describes the books of a machine that processes share.
//
// Only the kernel notices that the last descriptor of exported memory was closed when
// its maker and its importers are dead, or that it lies in a socket. So the books keep
// nothing that a living process would have to put right. A process holds memory by a bit
// in its record, and the record counts for as long as the process's lock on it. An
// exported descriptor holds memory by a lock on the memory's file. Both locks belong to
// an open file description, and end with its last descriptor wherever that is. There are
// no totals: a query adds up the records and the files. That needs names, because a memfd
// can only be queried through a descriptor. So on a machine with a folder exported memory
// lies in named files, which can be truncated; without one it lies in sealed memfds.
//
// A peer may pass any descriptor, and lock a file that it received in any way. So
// descriptors are checked by what the kernel knows of them without a call to their file
// system, labels are read and not mapped, and no lock on a passed file is ever waited for.
// The lock of the books is taken inside the machine's.
//
// A fabric handle is the number of a memory. It holds nothing, and is valid for as long as
// the memory's maker holds it. A multicast object that processes share is a memory file
// too, without bytes: its devices and binds are the object's state (team.go), changed under
// the lock of the books. A bind names its process, so that the binds of a killed process
// are recognized.
