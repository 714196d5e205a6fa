// Package pool is the general allocator: many blocks of all sizes, taken and
// given back in the order of streams, without stalling the GPU.
//
// A [Pool] gives a [Block] for the work of a stream. Freeing it waits for
// nothing and makes no driver call: the same stream has the memory back at once,
// and another one when the GPU has passed, which the pool asks only where it
// wants the memory there. All memory is mapped by the three owners of package
// vmm, and stays mapped until it is trimmed, moved, or the pool is closed.
//
// # Where blocks lie
//
//   - Up to Options.SmallMax: in slots of a size class, cut from a chunk of one
//     granule.
//   - From Options.ExactFrom on: in a chunk of their own, never split, kept for
//     the next request of about the size.
//   - Between: in long address ranges that are filled with chunks of
//     Options.Chunk bytes, by best fit, with neighbours merged. These chunks
//     move: where no hole is large enough and the pool has memory enough, free
//     chunks are unmapped in their holes and mapped into one contiguous gap.
//     Nothing is copied, and no live block is touched.
//
// All address ranges are as long as the device's memory, or some times as long, so
// that a pool needs few of them; they are kept until it is closed, or until address
// space is short and nothing lies in one. What was unmapped leaves its addresses to
// what comes next, so however sizes vary, a pool that comes and goes within its
// memory uses a bounded part of the address space.
//
// # What the sizes trade
//
//	option     smaller                                larger
//	SmallMax   more mid-sized blocks: holes between   more classes, each with a slab of its own
//	Chunk      chunks move more freely: less memory   fewer driver calls a byte: faster growth and moves
//	ExactFrom  growth in one call, no holes; chunks   large blocks share the ranges, and are cut from
//	           of odd sizes are given back and made   what is free without a driver call
//	Slack      chunks move early: less memory         chunks move late: less time
//
// The generated traces (package trace) show it. For each setting: the most that
// the pool held over the most that was requested at once, the worst of 20 seeds,
// and the gigabytes that it mapped, made or moved, in the mean. Both are the same
// on every machine whose GPU keeps up.
//
//	                          training      LoRA          serving       uniform
//	defaults                  1.048, 18.2   1.047, 15.8   1.196, 12.6   1.226, 19.9
//	Slack -1                  1.049, 20.9   1.030, 16.5   1.088, 20.8   1.191, 21.4
//	Slack 1/8                 1.048, 18.2   1.047, 15.8   1.134, 13.2   1.192, 21.0
//	Chunk 16 MiB              1.240, 16.1   1.035, 12.9   1.220, 11.6   1.252, 17.1
//	Chunk 32 MiB              1.163, 17.2   1.039, 13.9   1.193, 12.0   1.244, 18.2
//	Chunk 128 MiB             1.057, 20.1   1.062, 19.8   1.189, 13.5   1.238, 22.6
//	ExactFrom 256 MiB         1.052, 16.7   1.047, 15.3   1.265, 22.8   1.226, 19.9
//	Chunk 2 MiB, Slack -1     1.017, 20.4   1.018, 13.1   1.045, 36.1   1.028, 25.3
//
// Mapping a chunk costs about 27 µs and 1.3 µs for each MiB on an H200: 1.7
// µs a MiB in chunks of 64 MiB, 2.1 of 32, 3 of 16, and 15 of 2.
//
// # Streams
//
// A block belongs to the stream that it was allocated for. Other streams may use
// it once they wait for that stream, and [Pool.Free] must name them. A stream
// that only this library can reach costs no driver call; of a borrowed one, or
// one whose Handle was given out, the driver is asked with each request whether
// it captures. A stream that was closed has passed: close a borrowed one after
// what it used was freed.
//
// # Captures
//
// [Pool.Capture] captures a graph whose allocations lie in an arena that lasts as
// long as the graph; [Pool.BeginCapture] does so for captures that others begin.
// [Pool.Prepare] makes workspaces ready before, so that a capture asks for
// nothing.
package pool
