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
//   - From Options.ExactFrom on: in a chunk of their own, in a range of their
//     own, never split, kept for the next request of about the size.
//   - Between: in long address ranges that are filled with chunks of
//     Options.Chunk bytes, by best fit, with neighbours merged. These chunks
//     move: where no hole is large enough and the pool has memory enough, free
//     chunks are unmapped in their holes and mapped into one contiguous gap.
//     Nothing is copied, and no live block is touched.
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
// On the generated traces (package trace) of training, fine-tuning and serving the
// defaults reserve 4 to 8% above the most that was requested at once, and 16% on
// uniformly random sizes, the worst of 20 seeds each where the GPU keeps up.
// Chunks of a granule, exact ones from 64 MiB and no slack come to 1 to 3%, for
// ten times the driver calls.
//
// # Streams
//
// A block belongs to the stream that it was allocated for. Other streams may use
// it once they wait for that stream, and [Pool.Free] must name them. A stream
// that only this library can reach costs no driver call; of a borrowed one, or
// one whose Handle was given out, the driver is asked with each request whether
// it captures.
//
// # Captures
//
// [Pool.Capture] captures a graph whose allocations lie in an arena that lasts as
// long as the graph; [Pool.BeginCapture] does so for captures that others begin.
// [Pool.Prepare] makes workspaces ready before, so that a capture asks for
// nothing.
package pool
