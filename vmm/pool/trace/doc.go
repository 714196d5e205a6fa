// Package trace describes what a program requests of an allocator, as a value:
// which blocks, of what sizes, on which streams, and in which order they are
// freed. A trace is recorded from a program (pool.History.Trace) or read from a
// file ([Read]), and replayed through any allocator ([Replay]) to see how much
// memory and how much time it takes. The command cuvmm replay replays traces
// through the pool.
package trace
