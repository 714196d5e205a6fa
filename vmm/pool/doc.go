// Package pool implements a general allocator of device memory: blocks of any size,
// allocated and freed in the order of streams, without stalling the GPU.
//
// [Pool.Alloc] returns a [Block] for the work of a stream. [Pool.Free] waits for nothing
// and makes no driver call: the same stream can have the memory again at once, another
// stream when the GPU has done the work that may use it. The pool asks the GPU about that
// only when another stream wants the memory. Free memory stays mapped until it is needed
// elsewhere, trimmed, or unused for long (Options.Decay).
//
// A nil object and a zero value return cuda.ErrInvalidArgument. A method that returns no
// error is not to be called on either. Only a zero [Block] is a value: no memory.
//
// # Where blocks lie
//
//   - Blocks up to Options.SmallMax lie in slots of a size class, in chunks of one
//     granule.
//   - Larger ones lie in long address ranges that are filled with chunks of
//     Options.Chunk bytes, by best fit; free neighbors are coalesced. These chunks move:
//     if no hole is large enough, free chunks are mapped into one contiguous gap, and
//     unmapped at their old places later. Nothing is copied, no live block is touched,
//     and the request does not wait for the GPU, because the stream that freed a chunk
//     uses it at the new address after all that it does at the old one. Requests of
//     four chunks or more lie apart from each other, with room to grow in place.
//
// So the memory that the pool holds follows what is requested, even if the GPU is far
// behind: it makes a chunk only if there are not enough free ones, and gives one back to
// the driver to make another only if it would otherwise pass a limit or the device's
// memory.
//
// Address ranges are as long as the device's memory, or several times as long, so a pool
// needs few of them. They are kept until the pool is closed, or until address space is
// short and nothing lies in one.
//
// # What the sizes trade
//
// Smaller chunks (Options.Chunk) move more freely, and take more driver calls a byte. On
// H200s, mapping and granting a free chunk of 32 MiB takes 20 to 39 µs, and one of 64 MiB no
// longer; unmapping it 12 to 22, mostly in the background. A new chunk takes 10 to 17 µs
// more. The table shows the peak of reserved memory divided by the peak of requested
// memory, for traces of programs that train with PyTorch. Each number is the worse of two
// runs, with an idle GPU and with one that is behind:
//
//	Chunk     8.3 GiB        8.7 GiB   12 GiB        19 GiB   19 GiB
//	          checkpointed   vision    graph layers  t5       llama
//	16 MiB    1.057          1.017     1.010         1.016    1.026
//	32 MiB    1.085          1.019     1.019         1.019    1.031
//	64 MiB    1.093          1.022     1.038         1.027    1.040
//
// Chunks of 64 MiB halve the number of driver calls. For a program of 2 GiB they raise the
// ratio from 1.09 to 1.16, and for random blocks of 1 to 1,500 MiB from 1.06 to 1.09.
//
// # Streams
//
// A block belongs to the stream that it was allocated for. Other streams may use it once
// they wait for that stream, and [Pool.Free] must name them. A request makes no driver
// call for a stream that only this library can reach; for a borrowed one, or one whose
// Handle was taken, it asks the driver whether the stream captures. The pool takes a
// closed stream's work for done, so close a borrowed stream only after that work.
//
// # Suspending
//
// A pool can be named in vmm.Suspend: its memory goes back to the driver, with the bytes of its
// live blocks kept, and comes back at the same addresses. Meanwhile Alloc returns
// cuda.ErrSuspended and Free works. docs/suspend.md has a table of all operations.
//
// # Captures
//
// [Pool.Capture] captures a graph whose allocations lie in an arena that lasts as long as
// the graph; [Pool.BeginCapture] does so for captures that other code begins.
// [Pool.Prepare] allocates workspaces in advance, so that a capture requests nothing.
package pool
