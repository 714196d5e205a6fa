// Package trace holds what a program asks of an allocator, as a value: which
// blocks, of what sizes, on which streams, in which order they go back. A trace
// is recorded from a program or made by a generator, and replayed through an
// allocator to see how much memory and how much time it takes.
//
// The generators (Training, LoRA, Serving, Uniform) are part of what the pool
// promises: the same Config gives the same trace in every version and on every
// machine, so that results of different versions and of other allocators can be
// compared.
package trace
