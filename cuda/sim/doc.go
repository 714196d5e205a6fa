// Package sim is the software driver: a machine with software GPUs whose
// driver keeps the rules of the real one, on memory of the operating system.
//
// It is a driver, not a mock. A program that works on the real driver works
// here; and a program that is wrong, but that a GPU lets pass, is caught: work
// is done as late and in as odd an order as the rules allow, freed addresses
// are not reused, and work on memory that was unmapped, freed or never granted
// destroys its context, as on a GPU, with the culprit named by
// [Machine.Fault].
//
// # Memory and addresses
//
// Device addresses are numbers in a window of the process in which every CPU
// access faults. Behind them an interval map finds the mapping, the allocation
// or the pinned host memory. Physical memory is a number of pages in one large
// arena per device, so that neither descriptors nor kernel mappings limit how
// many allocations there are; its limit is exact, but memory is only committed
// when it is touched. Memory that is exported moves into a sealed memory file:
// its descriptors are real, cross process borders, and pin the memory until
// the last of them is closed. Host-located memory appears to the CPU at its
// mapped address when access is granted to the host.
//
// # Work
//
// Streams, events, host and device copies are asynchronous; see engine.go for
// the order in which work is done. [Machine.Hold] keeps a stream's work from
// being done at all.
//
// # Tests
//
// [Machine.Inject] makes any driver call fail, [Machine.Counts] counts them,
// and [Machine.Close] reports every object that was created and not destroyed,
// with the stack of its creation.
//
// # Reading the source
//
// machine.go holds a machine's state and the gate that every call passes;
// vmm.go and share.go are the calls of virtual memory, on top of address.go
// (numbers), physical.go (bytes) and resident.go (what is where); context.go,
// stream.go, event.go and engine.go are the work. One lock guards a machine,
// and is released while bytes move, while kernels run, and while a call waits.
package sim
