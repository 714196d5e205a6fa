// Package handles shares GPU memory with other processes.
//
// An [FD] owns a file descriptor. A [Descriptor] says what memory a peer
// offers: its chunks, where it lies, what it holds. A [Conn] carries messages
// with descriptors of files between two processes: over a socket in a private
// directory ([Listen], [Dial]), or to a child ([Pair], [Inherit]).
//
// # Trust
//
// A peer is trusted with nothing but what the policy of the connection gives
// it: whatever it sends is checked before it is used, a wait has a limit, and
// what does not fit is an error that names the limit. A file descriptor of
// memory is full access, to read and to write, for as long as anybody holds
// it: nobody can take it back.
//
// # Other systems
//
// File descriptors and connections need Linux; elsewhere they answer
// [cuda.ErrNotSupported]. Descriptors work everywhere.
package handles
