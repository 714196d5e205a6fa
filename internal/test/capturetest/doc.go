// Package capturetest has the situations of a capture that are hardest to leave alone:
// one that the calling thread began itself, and one of a stream that a System has
// borrowed. It also has what becomes part of a capture, or is refused in one.
//
// No operation of this library ends a capture that another library has under way. Every
// test with a device sees to that (internal/test/gputest), for a capture of a stream
// that the System does not know, on another thread. So the operations here are a few,
// which reach each of the driver's calls that end captures.
package capturetest
