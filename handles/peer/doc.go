// Package peer provides connections between processes of one host that carry messages
// with file descriptors. Packages handles and handles/publish share GPU memory over them.
//
// A [Conn] carries messages with file descriptors, over a socket in a private
// directory ([Listen], [Dial]) or to a child process ([Pair], [Inherit]). Messages keep
// their order, arrive whole or not at all, and have limits ([MaxBody], [MaxFDs]). An
// [FD] owns a file descriptor, and reports one that is never closed ([TraceFDs]).
//
// # Trust
//
// The system tells each side the user and the process at the other end, and
// [Options.Allow] decides which are admitted: by default processes of the same user. A
// socket lies in a directory that only its owner may enter ([Options].Shared: may write), which both sides check.
// Beyond that a peer is not trusted: everything that it sends is checked before use,
// every wait for it has a limit, and a violation of the protocol ends the connection with
// an error that both sides see. docs/protocol.md specifies the protocol, with test
// vectors; both sides negotiate a version.
//
// # Contexts
//
// Contexts must not be nil, here and in the packages that use connections.
//
// # Other systems
//
// File descriptors and connections need Linux; elsewhere they return
// [cuda.ErrNotSupported].
package peer
