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
//   - Above: in long address ranges that are filled with chunks of Options.Chunk
//     bytes, by best fit, with neighbors merged. These chunks move: if no hole is
//     large enough, free chunks are mapped into one contiguous gap, and unmapped
//     where they were when the GPU has passed. Nothing is copied, no live block is
//     touched, and the GPU is not waited for, since the stream that freed a chunk
//     uses it at the new address behind all that it does at the old one.
//
// So the memory that the pool holds follows what is requested, also when the GPU is
// far behind: it makes a chunk only if there are not enough free ones, and never
// gives one back to the driver to make another.
//
// All address ranges are as long as the device's memory, or some times as long, so
// that a pool needs few of them; they are kept until it is closed, or until address
// space is short and nothing lies in one.
//
// # What the sizes trade
//
// A smaller Options.Chunk moves more freely, and takes more driver calls a byte. On
// an H200, mapping and granting a free chunk takes 20 to 25 µs from 2 to 64 MiB, and
// unmapping it 14 µs, which no request waits for. A new chunk takes some 10 µs more.
// Peak reserved over peak requested on traces of programs that train with PyTorch,
// the worse of an idle GPU and one that is behind:
//
//	Chunk     8.3 GiB        8.7 GiB   12 GiB        19 GiB   19 GiB
//	          checkpointed   vision    graph layers  t5       llama
//	16 MiB    1.044          1.011     1.013         1.014    1.028
//	32 MiB    1.070          1.019     1.022         1.019    1.050
//	64 MiB    1.078          1.022     1.033         1.031    1.040
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
