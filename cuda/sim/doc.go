// Package sim is the software driver: a machine with software GPUs whose
// driver keeps the rules of the real one, on memory of the operating system.
//
// It is a driver, not a mock. A program that works on the real driver works
// here; and a program that is wrong, but that a GPU lets pass, is caught: work
// is done as late and in as odd an order as the rules allow, freed addresses
// are not reused, and work on memory that was unmapped, freed or never granted,
// a copy or memset whose addresses were given other memory before it was done,
// a copy between ranges that overlap, a kernel's access to an address that is not
// aligned, and the launch of a graph whose kernel's module was unloaded destroy their
// context. Errors then name the culprit, and so does [Machine.Fault]: the address, the
// mapping that was there, and whether it was unmapped before or after the work was
// submitted. [Machine.Log] says the same of a copy that is refused.
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
// Managed memory lies in one arena, at addresses that the CPU reaches too. The
// machine keeps an account of where each page would lie, on a device or the host:
// prefetches, copies, kernels and checked accesses of the CPU move pages, advice
// changes where they go, and what a device has no room for is paged out to the
// host. [Machine.Resident] returns that account. A plain discard behind unfinished
// work loses what is written after it, as on the real driver. Accesses of the CPU
// through a raw pointer are not seen. A device with pageable memory access
// (attribute 88) works on the operating system's memory too.
//
// # Processes
//
// Processes share memory by file descriptor if none of them gives [Options.Folder], or all
// give the same one: an import by a process that gives another, or none, fails with
// CUDA_ERROR_UNKNOWN. The environment variable CUVMM_SIM can give it to all.
// Processes that give [Options.Folder] are on one machine: its limits hold for
// all of them together, and memory is taken while any of them holds it. The
// folder has the machine's books (a record for each process and each piece of
// exported memory) and a file for each piece of exported memory. These files
// have names instead of seals, so that a process can find out whether a descriptor
// of one is still open after every process that knew it has died. A process that
// truncates one harms the others, so a folder is accepted only if it belongs to
// this user or to root and not every user may write to it. Exported memory has
// its room in the file system from its export on, so a full file system fails an
// export and kills no process. [Inspect] reports what is taken, and by which
// process. An allocation pages out managed memory of its own process only.
// Processes with a place on the same channel of the machine's fabric
// ([Options.Fabric]) share memory by fabric handles.
//
// # Work
//
// Streams, events, host and device copies are asynchronous. Work that no call
// waits for is delayed by a millisecond, a query lets one step be done, and if
// several streams can proceed [Options.Seed] decides; a test is as repeatable as
// its own goroutines are. [Machine.Hold] keeps a stream's work from
// being done at all. Stream capture has the real driver's states and kills
// captures by its rules, and a graph is replayed on what is mapped then.
//
// Kernels are Go functions, which [RegisterKernel] makes stand for PTX entries.
// Of the PTX only the declarations are read: text that the real driver refuses is
// refused with the same code, unless the fault is in a statement of a body.
// Variables of a module begin with the whole numbers that the PTX gives, and
// [Kernel.Global] finds them. A cooperative launch is refused as on a GPU, but its
// function does the whole grid's work and waits for no blocks. Priorities of
// streams change nothing.
//
// # Multicast
//
// Devices that have the attribute for it ([WithMulticast]) are on one switch. A
// multicast object has a team of devices, and the memory that is bound for each
// is its replica. Kernels reach all replicas at once with [MultimemStore],
// [MultimemReduce] and [MultimemLoadReduce]; whatever else touches a multicast
// address, and what misses a replica because nothing is bound there or the
// memory was freed, destroys the context. On a machine with a folder, processes
// take part in one object. Binding and mapping block until all devices were
// added, and nothing but the end of the machine or of the process ends that.
//
// # Races
//
// With [Options.Races] the machine looks for races: two accesses by GPU work to the same
// bytes of physical memory, at whatever addresses, of which at least one writes and which
// nothing orders. [Machine.Races] lists them, and [Machine.Close] returns an error that names
// both sides, so a test that uses [Open] fails. A race destroys no context.
//
// Streams order work, and so do events, the legacy stream and the streams that block with
// it, the dependencies within a graph, launches of one graph, the host's waits and queries,
// host functions, and words: what a stream or a kernel did before it wrote a word precedes
// what is done behind a later wait for or read of a word. An allocation and a free in the
// order of a stream count as writes.
//
// Whatever could have ordered two accesses counts, so a report is a mistake of the program.
// The price is that races are missed: if the first access was done by luck before the second
// was submitted, or before its stream found a word, even a word that has nothing to do with
// the first. [Machine.Hold] keeps work from being done so early. Not looked for are races of
// words and of multicast addresses (both are atomic), of prefetches and discards, of memory
// that the driver does not know, of the host's own reads and writes, and with work of other
// processes. A Go function that stands for a kernel is taken at its word: what it loads
// counts as read, even if the kernel reads less, and only the word methods order its
// accesses, not a flag that it stores and not a channel of Go.
//
// # What differs
//
// It is slow, or fast, in its own way: costs say nothing of a GPU. The first
// error of a context ends that context only. Memory allocated by cuMemAlloc
// (not virtual memory) takes whole pages, not 2 MiB blocks, of the device.
// There is one NUMA node and no peer access for memory of cuMemAlloc. What was
// measured of the real driver holds here too; where nothing was measured, the
// stricter reading does. Off Linux (amd64 and arm64) there are no descriptors, no
// host memory at mapped addresses, and all threads count as one.
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
// (numbers), physical.go (bytes) and backing.go (what is where), and of
// folder.go for a machine that processes share; multicast.go are the calls of
// multicast objects, on top of team.go (the devices and what is bound for them)
// and multimem.go (what kernels do there); outofuse.go what no work may use although it may
// be mapped; former.go is what was mapped where nothing
// is; context.go, stream.go, event.go and engine.go are the work; order.go is what precedes
// what, and race.go the accesses that nothing orders; module.go and ptx.go
// are kernels; capture.go and graph.go write it down instead. One lock guards a machine,
// and is released while bytes move, while kernels run, and while a call waits. The lock of
// the process's address space is taken inside it; that of the injected faults is never held
// together with another.
package sim
