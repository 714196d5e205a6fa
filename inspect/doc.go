// Package inspect takes snapshots of a process's GPU address space: reservations
// and what is mapped into them, physical memory, buffers, sparse ranges, pools with their
// blocks, managed memory, and what is shared with other processes.
//
//	s, err := inspect.Take(sys)
//	...
//	err = s.Write(file)
//
// A snapshot is plain data with a documented form in JSON (see [Snapshot]). Taking
// one does not wait for the GPU, makes no driver call except for a device's free
// memory and for where managed memory is, and holds each lock for well below a
// millisecond: large objects are read in steps. So the parts of a snapshot differ slightly in time, and may disagree on
// what changed between Time and Time + Took. For example, a mapping can name memory
// that is not listed. Snapshots cost nothing while none is taken.
//
// Objects have stacks if the System was opened with cuda.Options.TraceLeaks, and a pool's
// blocks with pool.Options.Track. A pool's history begins with pool.Pool.StartHistory.
//
// The packages below this one show snapshots: inspect/page as a picture in a
// browser, inspect/profile as a profile for go tool pprof, inspect/torch in the form
// of PyTorch's memory viewer, and inspect/serve over HTTP or a socket.
package inspect
