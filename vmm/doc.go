// Package vmm provides GPU arrays that grow in place, and the objects beneath
// them.
//
// Three objects own everything. An [Allocation] is physical memory, a
// [Reservation] is address space, and a [Mapping] ties the two together; each
// is the only owner of its driver handle. A [Buffer] is an ordered run of
// mappings at the front of a reservation, so it grows and shrinks while its
// address stays the same for life; an [Array] is its typed face.
//
// # Sizes
//
// Physical memory comes in multiples of the granularity, 2 MiB on the GPUs of
// today, and is mapped and unmapped whole: a chunk is indivisible. Sizes and
// offsets are in bytes, except where an Array or a Slice counts elements.
//
// # Verbs
//
// What each does to a buffer or an array. Waiting is for the GPU; every verb may
// wait for another goroutine's change of the same buffer, but for those with
// streams.
//
//	verb              length     memory                     address    waits
//	NewBuffer         0          none                       reserved   no
//	Append            grows      grows if it must           stays      if no stream is named
//	AppendUndefined   grows      grows if it must           stays      no
//	Grow              stays      grows to hold n more       stays      no
//	Resize, longer    grows      grows if it must           stays      if no stream is named
//	Resize, shorter   shrinks    stays                      stays      no
//	Clip              stays      what is unused goes        stays      yes
//	ClipAfter         stays      goes after the streams     stays      no
//	Move              stays      shared with the source,    another,   no
//	                             which is frozen            larger
//	Fork              the        whole chunks are shared,   another    if no stream is named
//	                  prefix     the rest is copied
//	Close             0          goes                       goes       yes
//	CloseAfter        0          goes after the streams     goes       no
//	System.Drain      -          what was closed or         -          yes
//	                             clipped is gone
//
// Growth that takes back what ClipAfter has given up waits for the streams that
// were named there. A failed growth leaves everything as it was.
//
// For the objects beneath, [Reserve] takes address space and no memory, [Create]
// memory without an address, and [Reservation.Map] and [Reservation.SetAccess] put
// it at one and let devices use it. None of them waits, except to take access away.
//
// # Streams and closing
//
// An operation that takes a stream runs on the device's own
// (cuda.Device.Transfer) if that is nil: it returns when it is done, and is
// unordered with any other stream.
//
// Unmapping does not wait for the GPU. Everything that takes memory or access
// away therefore has two forms. The plain one (Close, Clip) waits for all work
// that could touch the memory: first for the streams that the System knows, by
// events, and then for each context as a whole, by freeing a small block of
// device memory, which stalls other goroutines' launches into that context
// while foreign work runs. Work in contexts that the System was never told of
// is not waited for. The form with streams (CloseAfter, ClipAfter, RevokeAfter)
// waits for nothing, neither for the GPU nor for other goroutines that wait for
// it: the memory goes out of use at once, and is given back when the work that
// is on those streams has passed. Released tells when that is.
//
// Neither form waits for a capture that it is called in.
//
// # Several addresses of one memory
//
// The same physical memory can be mapped more than once: [Move] and [Fork] do it,
// and so does [Reservation.Map] of one allocation twice. Work on the different
// addresses must be ordered by streams or events, as for any memory; within
// one kernel, accesses through two addresses of the same memory are not
// ordered unless the kernel executes fence.proxy.alias between them.
package vmm
