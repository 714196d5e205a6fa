// Package vmm has GPU arrays that grow in place, and the objects beneath them.
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
// # Streams and closing
//
// Where an operation takes a stream, nil is the device's own
// (cuda.Device.Transfer): the operation returns when it is done, and is ordered
// with no other stream.
//
// Unmapping does not wait for the GPU. Everything that takes memory or access
// away therefore has two forms. The plain one (Close, Clip) waits for all work
// that could touch the memory: first for the streams that the System knows, by
// events, and then for each context as a whole, by freeing a small block of
// device memory, which stalls other goroutines' launches into that context
// while foreign work runs. Work in contexts that the System was never told of
// is not waited for. The form with streams (CloseAfter, ClipAfter, RevokeAfter)
// waits for nobody, neither for the GPU nor for other goroutines that wait for
// it: the memory goes out of use at once, and is given back when the work that
// is on those streams has passed.
//
// # Several addresses of one memory
//
// The same physical memory can be mapped more than once: [Move] does it, and
// so does [Reservation.Map] of one allocation twice. Work on the different
// addresses must be ordered by streams or events, as for any memory; within
// one kernel, accesses through two addresses of the same memory are not
// ordered unless the kernel executes fence.proxy.alias between them.
package vmm
