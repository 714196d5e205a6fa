// Package load reads files of tensors into GPU memory at the rate of the link, and writes them.
//
// [OpenSafetensors] opens a file in the safetensors format, or a folder with many of them and
// their index. It reads and checks the headers alone. [Model.Tensors] lists what is in it.
//
// # Loading
//
// [Model.LoadAll] fills one range of memory with all tensors, as [Model.Layout] lays them out, and
// returns a [handles.Manifest]: names, types, shapes, offsets and digests, for followers of the
// memory or whoever uses it. [Model.Load] loads parts: tensors, slices or shards of them, each to an
// address of its own. Memory is an address and a length, so that of buffers, blocks of a pool,
// published memory and any other is loaded in the same way. [Model.Source] fills suspended
// memory again within its Resume.
//
// Threads read pieces of the files into pinned memory, which the System retains for the next
// load (System.TrimHost gives it back), while earlier pieces are copied. What the page cache has is taken
// from there. The rest is read past it, so that a load of a large model evicts nothing.
//
// # Trust
//
// A file may come from anywhere. Every length, offset, type and name of its header is checked
// before memory is touched, and an error names file and tensor ([Error]). A file that is
// written while it is loaded is an error, too (ErrChanged), as far as its size and its time of
// modification tell. The digests (CRC-32C) find damage, not forgery.
//
// # Saving
//
// [SaveSafetensors] writes a file that every reader of the format takes, and replaces the one
// before only when it is complete.
//
// docs/load.md shows the whole, notes.go says how it works and why.
package load
