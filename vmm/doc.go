// Package vmm provides GPU arrays that grow in place, and the objects beneath
// them.
//
// Three objects own everything. An [Allocation] is physical memory, a
// [Reservation] is address space, and a [Mapping] ties the two together. A
// [Buffer] is an ordered run of mappings at the front of a reservation, so it
// grows and shrinks while its address stays the same for life; an [Array] is
// its typed face. The memory of one mapping is a chunk of the buffer. A [Sparse] has mappings
// anywhere in its reservation, in pages of one size, which a source ([Pages]) recycles.
//
// # Sizes
//
// Physical memory comes in multiples of the granularity, 2 MiB on today's GPUs, and a
// chunk is mapped and unmapped as a whole. Sizes and offsets are in bytes, except that
// an Array and a Slice count elements.
//
// # Verbs
//
// The table shows what each does to a buffer or an array. Waiting means waiting for the
// GPU; every verb except those that end in After may also wait for another goroutine's
// change of the same buffer.
//
//	verb              length     memory                     address    waits
//	NewBuffer         0          none                       reserved   no
//	Append            grows      grows if it must           stays      if no stream is named *
//	AppendUndefined   grows      grows if it must           stays      no *
//	Grow              stays      grows to hold n more       stays      no *
//	Resize, longer    grows      grows if it must           stays      if no stream is named *
//	Resize, shorter   shrinks    stays                      stays      no
//	Clip              stays      what is unused goes        stays      yes
//	ClipAfter         stays      goes after the streams     stays      no
//	Move              stays      shared with the source,    another,   no
//	                             which is frozen            larger
//	Fork              the        whole chunks are shared,   another    if no stream is named
//	                  prefix     the rest is copied
//	Suspend           stays      goes, its bytes kept       stays      yes
//	SuspendAfter      stays      goes after the streams     stays      no
//	Resume            stays      comes back                 stays      until it is there
//	Close             0          goes                       goes       yes
//	CloseAfter        0          goes after the streams     goes       no
//	System.Drain      -          what was closed or         -          yes
//	                             clipped is gone
//
//	* Growth that takes back memory from a ClipAfter waits for the streams that were
//	  named there.
//
// A failed growth changes nothing.
//
// Of the objects beneath, [Reserve] takes address space and no memory, [Create] memory
// without an address, [Reservation.Map] maps memory at an address, and
// [Reservation.SetAccess] lets devices use it. None of them waits, except SetAccess if it
// takes access away.
//
// # Streams and closing
//
// An operation whose stream is nil runs on the device's own stream
// (cuda.Device.Transfer): it returns when it is done, and is unordered with any other
// stream.
//
// Unmapping does not wait for the GPU. Operations that take memory away
// therefore have two forms. The plain one (Close, Clip, and lower access) waits for all work that could use
// the memory. It waits by events for the streams that the [cuda.System] knows. Then it
// waits for each context as a whole, by freeing a small block of device memory; while
// work of other libraries runs there, that stalls launches into the context by other
// goroutines. It does not wait for contexts that the System does not know. The form with
// streams (CloseAfter, ClipAfter) never blocks, neither on the GPU nor on a
// goroutine that waits for the GPU: the memory goes out of use at once, and is freed when
// the work that is on those streams is done. An object's Released says when its memory is
// back.
//
// Neither form waits for a capture that it is called in.
//
// # Suspending
//
// [Suspend] gives memory back to the driver and keeps its addresses, so that another user has
// the GPU; [Suspension.Resume] brings it back with the same contents at the same addresses, where
// pointers, kernels and graphs find it. It takes buffers, arrays, mappings and sparse ranges. Close, Clip,
// shorter lengths and lower access work meanwhile; all else that needs the memory returns
// cuda.ErrSuspended. docs/suspend.md has what goes, what stays, and what no library can promise.
//
// # Ranges with holes
//
// [Sparse.Map] and [Sparse.UnmapAfter] map and unmap pages of a range in any order, for caches
// whose entries have contiguous addresses and as much memory as they use. A page that was
// unmapped goes to another place, of any range of its source, when the GPU has passed its last
// use, and is there again without a driver call if the same place is mapped for the same
// stream. [Sparse.Share] maps a page at several places, which count its uses. docs/sparse.md has
// what a hole is, how pages are recycled, and how large they should be.
//
// # Several addresses of one memory
//
// The same physical memory can be mapped more than once: [Move] and [Fork] do it,
// and so does [Reservation.Map] of one allocation twice. Work on the different
// addresses must be ordered by streams or events, as for any memory; within
// one kernel, accesses through two addresses of the same memory are not
// ordered unless the kernel executes fence.proxy.alias between them.
package vmm
