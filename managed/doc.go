// Package managed has managed memory: memory at one address for the host and for
// every device, whose pages move to whoever touches them, or where advice and
// prefetches put them.
//
// A [Buffer] is memory that [New] or an [Allocator] made, a [Buffer.Clone] of
// one, or a [View] of managed memory that was made elsewhere. A [Range] is a part
// of one; a Buffer is the Range of all of it, so whatever can be done to a part
// can be done to the whole. An [Array] counts elements instead of bytes.
//
// # Advice
//
// Advice is kept by the driver, for each page, and read back from it: whether a
// range is read mostly, where it should lie, and who accesses it besides
// ([AccessedBy], a set that lives in the driver). What holds for part of a range
// only reads as if it did not hold. The driver works on whole pages, so advice and
// prefetches reach as far as the pages that a range touches.
//
// # Locations
//
// A device, the host (cuda.OnHost), a node of the host (cuda.OnHostNUMA), or the
// node of this goroutine's thread (cuda.OnCurrentNUMA), which is resolved to a
// node at the call. What takes which:
//
//	                 device  host  host NUMA node
//	SetPreferred     yes     yes   with a driver for CUDA 12.2 or later; reads back as none
//	AccessedBy       yes     yes   no: name the host
//	Prefetch         yes     yes   with a driver for CUDA 12.2 or later
//	DiscardPrefetch  yes     yes   yes
//
// A device must have concurrent managed access. What cannot be taken is refused
// before anything has changed: ErrInvalidArgument where it never could,
// ErrNotSupported where this driver or device cannot.
//
// # Discarding
//
// DiscardPrefetch drops the contents of a range and brings its pages to a place
// without copying them; what is read before the next write is undefined. Discard
// does so on the stream's device, where the next kernel finds them. Both are
// ordered with the other work on the stream, before and behind them. Only the
// whole pages inside of a range are discarded: what shares a page with it keeps
// its contents. It needs a driver for CUDA 13.0 or later, and concurrent managed
// access on every device.
//
// The driver also has a discard without a prefetch. This package never calls it:
// behind work that is still running the driver does not order it with what
// follows, and loses later writes. It would save nothing: the device's memory
// counts as taken until the managed memory is freed, whatever is discarded, and
// the next write faults for each page. On an H200, for 64 MiB that lie on the
// device, Discard takes 0.1 ms and the memset behind it 0.03 ms, against 0.2 and
// 80 to 135 ms; for 1 GiB 2 and 0.3 ms against 3.4 and 1,500 ms. Memory that lies
// on the host, or was never touched, costs 0.5 ms and 7 ms, and takes memory of
// the device from then on. DiscardPrefetch to the host costs 10 ms for 64 MiB and
// 385 ms for 1 GiB if the pages do not lie there yet, since the host's pages are
// new and zeroed.
//
// # The CPU
//
// [Range.Host] waits for the GPU's work and gives the memory as a Go slice. While
// a device without concurrent managed access works on anything, the CPU must not
// touch managed memory, that of other devices included; the process crashes if it
// does.
//
// # Freeing
//
// The driver frees managed memory by cuMemFree, which waits for all work of the
// context that made it and holds up other goroutines' launches into it meanwhile.
// Close does so after it has waited for what is known to run. CloseAfter does not
// wait: the memory goes out of use at once, and is freed on a goroutine of the
// library when the work that is on the streams has passed; that free still holds
// up launches while other work runs. So free managed memory when little runs,
// never on a hot path.
package managed
