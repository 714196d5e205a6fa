package load

// # From a file to memory
//
// A load is a stream of bytes in the order in which it is read (reading), which internal/bulk
// fills device memory with: its threads ask for pieces of the stream, copy one while they read
// the next, and know nothing of files. Items are places of the stream: a block of a tensor each,
// which is runs of bytes in a file (block). So whole files, slices with a run for each row, and
// layouts with gaps are one thing: a piece finds its items, these their runs, and runs that follow
// each other in file and piece are read at once.
//
// The order is that of the files, which a disk likes, or that of the memory, if that makes fewer
// copies (arrange). A copy is a driver call of some microseconds under a lock of the driver, so
// 100,000 small tensors, each copied by itself, take longer than all of their bytes. LoadAll owns all
// of its memory, gaps too, so there a piece is one copy; Load owns no more than its parts, and joins
// those that are neighbors. To gather small tensors from all over a file is a read each, so many of
// them are read in the order of the files, and a kernel distributes them (bulk.Distributes, spread).
// What is done for each of very many is done on all processors (inParallel), or by the threads that read.
//
// # Page cache, or past it
//
// Each piece's largest run can be read with O_DIRECT. The piece then begins in its room (bulk.Slack)
// where file and memory are aligned alike, so that data behind a header of any length is read to
// where it is copied from. Whole blocks reach into what lies beside the run: the room, or other
// runs, which are read afterwards. What is less than leastDirect is read through the page cache.
//
// Automatic asks the page cache first, with RWF_NOWAIT, step by step, and goes past it at the first
// step that is not there. The first step is small, because asking begins a read-ahead. Past the page
// cache nothing is evicted, and nothing stays: a model that is loaded again and again from the same host
// is better read once through it (PageCache).
//
// # Digests
//
// Bytes are summed step by step, while they are in the core's cache. A tensor's pieces are summed by
// several threads, in any order, and combined in the end (sums.go). The format has no digests, so
// files that are saved keep them in its metadata; files of others are not checked.
//
// # What a header may say
//
// The scanner reads no more than the format has: a header is hostile until it has passed parseHeader,
// which allows exactly the files that the format's reference reads, but for tensors of element types
// that this library has not, and of names and dimensions beyond the limits of a manifest. Tensors
// fill the data without gaps. That is why a saved file aligns only tensors of whole blocks: those
// come first, and the header is padded to a block.
//
// # What is compared with the file's state
//
// Size and time of modification are compared before the first byte and behind the last. A file
// system's time has a resolution of some milliseconds, so a write that follows the opening within
// them and keeps the size is not seen; digests see it. A file that is replaced by a rename is read to its
// end as it was, since it is open.
