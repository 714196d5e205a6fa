// Package managed provides managed memory: memory at one address for the host and all
// devices, whose pages move to the processor that accesses them, or to where advice and
// prefetches place them.
//
// A [Buffer] is memory that [New] or an [Allocator] made, a [Buffer.Clone] of
// one, or a [View] of managed memory that was made elsewhere. A [Range] is a part
// of one; a Buffer embeds the Range of all of it, so it has all methods of a part. An
// [Array] counts elements instead of bytes.
//
// # Advice
//
// The driver keeps advice for each page and returns it: whether a range is read mostly,
// where it should be, and which other processors access it ([AccessedBy], a set in the
// driver). Advice that holds for only a part of a range reads as absent. The driver works
// on whole pages, so advice and prefetches affect every page that a range touches.
//
// # Locations
//
// A location is a device, the host (cuda.OnHost), a node of the host (cuda.OnHostNUMA), or
// the node of this goroutine's thread (cuda.OnCurrentNUMA), which the call resolves to a
// node. Which operations accept which:
//
//	                 device  host  host NUMA node
//	SetPreferred     yes     yes   with a driver for CUDA 12.2 or later; reads back as none
//	AccessedBy       yes     yes   no: name the host
//	Prefetch         yes     yes   with a driver for CUDA 12.2 or later
//	DiscardPrefetch  yes     yes   yes
//
// A device must have concurrent managed access. So must the device of the stream that a
// prefetch is on, whatever the location, and for DiscardPrefetch every device. Other
// locations are refused before anything has changed: with ErrInvalidArgument if no driver
// accepts them, with ErrNotSupported if this driver or device does not.
//
// # Discarding
//
// DiscardPrefetch drops the contents of a range and moves its pages to a location without
// copying them; reads before the next write return undefined data. Discard moves them to
// the stream's device, for the next kernel. Both are ordered with the other work on the
// stream. Only whole pages inside a range are discarded: bytes outside that share a page
// with it keep their contents. Both need a driver for CUDA 13.0 or later, and concurrent
// managed access on every device.
//
// The driver also has a discard without a prefetch. This package never calls it: behind
// work that is still running the driver does not order it with the work that follows, and
// loses later writes. It would save nothing: discarded memory stays allocated on the
// device until the managed memory is freed, and the next write faults for each page. On an
// H200, for 64 MiB on the device, Discard takes 0.1 ms and the memset behind it 0.03 ms,
// against 0.2 and 80 to 135 ms; for 1 GiB 2 and 0.3 ms against 3.4 and 1,500 ms. Memory on
// the host, or memory that was never accessed, takes 0.5 ms and 7 ms, and occupies memory
// of the device from then on. DiscardPrefetch to the host takes 10 ms for 64 MiB and 385 ms
// for 1 GiB if the pages are not there yet, since the host's pages are new and zeroed.
//
// # The CPU
//
// [Range.Host] waits for the GPU's work and provides the memory as a Go slice. While a
// device without concurrent managed access executes any work, the CPU must not access
// managed memory, including that of other devices: the process would crash.
//
// # Freeing
//
// The driver frees managed memory by cuMemFree, which waits for all work of the context
// that made it and blocks other goroutines' launches into it meanwhile. Close calls it
// after waiting for all known work. CloseAfter does not wait: the memory goes out of use
// at once, and a goroutine of the library frees it when the work that is on the streams
// has passed; that free still blocks launches while other work runs. So free managed
// memory when little work is in flight, never on a hot path.
package managed
