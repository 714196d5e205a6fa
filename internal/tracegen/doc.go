// Package tracegen makes allocation traces: the requests of synthetic programs
// (Training, LoRA, Serving, Uniform, Mixture, Caches) that the pool and other allocators are
// measured with. The same Config gives the same trace in every version and on
// every machine, so that results of different versions and of other allocators
// can be compared.
package tracegen
